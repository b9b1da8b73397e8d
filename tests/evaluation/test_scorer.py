"""Texts to likelihoods: where they are cut, what is left out, what is counted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from palimpsa_data.tokenizers import Tokenizer

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation import scorer as scorer_module
from megatron_palimpsa.evaluation.scorer import Progress, Scorer, Truncation
from megatron_palimpsa.inference import Opened


def direct(it: Opened, ids: list[int], first: int) -> float:
    """Log-likelihood of ids from `first` on, from the logits of the whole text in float64."""
    with torch.no_grad():
        logits = it.model(input_ids=torch.tensor([ids]), position_ids=None, attention_mask=None)[0].double()
    found = logits.log_softmax(-1)
    return float(sum(found[place - 1, ids[place]] for place in range(first, len(ids))))


@pytest.fixture
def scorer(it: Opened) -> Scorer:
    return Scorer(it, max_length=32, batch_tokens=64)


def tokens(it: Opened, text: str) -> list[int]:
    assert it.tokenizer is not None
    return it.tokenizer.encode(text).tolist()


PAIRS = [("abc de", " fgh"), ("abc de ", "fgh"), ("", "abc"), ("  ", "abc"), ("jih gfe dcb", " a\n\n"), ("abc", "")]


def test_log_likelihoods_are_those_of_the_logits(it: Opened, scorer: Scorer) -> None:
    found = scorer.log_likelihoods(scorer.encode_pairs(PAIRS))
    whole = tokens(it, "abc de fgh")
    expected = direct(it, whole, len(tokens(it, "abc de")))
    assert found[0][0] == pytest.approx(expected, abs=1e-5)
    assert found[1] == found[0]
    eod = it.tokenizer.eod_id if it.tokenizer else 0
    assert found[2][0] == pytest.approx(direct(it, [eod, *tokens(it, "abc")], 1), abs=1e-5)
    assert found[3][0] == pytest.approx(direct(it, [eod, *tokens(it, "  abc")], 1), abs=1e-5)
    assert found[5] == (0.0, True)
    assert scorer.truncation == Truncation()


class Merging:
    """A tokenizer that joins pairs of letters, so that a context's ids change with what follows."""

    path, vocab_size, eod_id = "merging", 300, 0

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [
            np.array([sum(map(ord, text[at : at + 2])) for at in range(0, len(text), 2)], np.int32) for text in texts
        ]


def test_a_continuation_that_changes_the_contexts_last_id_begins_with_it(it: Opened) -> None:
    scorer = Scorer(dataclasses.replace(it, tokenizer=_as_tokenizer(Merging())), None, 64)
    (span,) = scorer.encode_pairs([("abc", "def")])
    assert span is not None
    assert (span.ids.tolist(), span.first) == ([97 + 98, 99 + 100, 101 + 102], 1)
    (span,) = scorer.encode_pairs([("a", "b")])
    assert span is not None
    assert (span.ids.tolist(), span.first) == ([0, 97 + 98], 1)


def _as_tokenizer(tokenizer: Merging) -> Tokenizer:
    return tokenizer  # type: ignore[return-value]


def test_a_long_input_loses_its_beginning_and_is_counted(it: Opened, scorer: Scorer) -> None:
    context, continuation = "abc def " * 20, "ghi jab"
    whole = tokens(it, context + continuation)
    assert len(whole) > 33
    (found,) = scorer.log_likelihoods(scorer.encode_pairs([(context, continuation)]))
    first = len(tokens(it, context.rstrip())) - (len(whole) - 33)
    assert found[0] == pytest.approx(direct(it, whole[-33:], first), abs=1e-5)
    assert scorer.truncation == Truncation(1, len(whole) - 33, len(whole))
    unlimited = Scorer(it, None, 64)
    (whole_score,) = unlimited.log_likelihoods(unlimited.encode_pairs([(context, continuation)]))
    assert whole_score[0] == pytest.approx(direct(it, whole, len(tokens(it, context.rstrip()))), abs=1e-5)


def test_a_continuation_longer_than_all_loses_its_own_beginning(it: Opened, scorer: Scorer) -> None:
    continuation = " abc def" * 20
    whole = tokens(it, "j" + continuation)
    (found,) = scorer.log_likelihoods(scorer.encode_pairs([("j", continuation)]))
    assert found[0] == pytest.approx(direct(it, whole[-33:], 1), abs=1e-5)


def test_every_id_of_a_whole_text_counts_once(it: Opened, scorer: Scorer) -> None:
    text = "abc def ghi j" * 12
    assert it.tokenizer is not None
    ids = [it.tokenizer.eod_id, *tokens(it, text)]
    assert len(ids) > 80
    expected = sum(direct(it, ids[start : start + 33], 1) for start in range(0, len(ids) - 1, 32))
    found = scorer.rolling([text, "", "abc"])
    assert found[0] == pytest.approx(expected, abs=1e-4)
    assert found[1] == 0.0
    assert found[2] == pytest.approx(direct(it, [ids[0], *tokens(it, "abc")], 1), abs=1e-5)
    assert Scorer(it, None, 64).rolling([text])[0] == pytest.approx(direct(it, ids, 1), abs=1e-4)


def test_a_text_that_is_none_is_one_message(scorer: Scorer) -> None:
    scorer.task = "piqa"
    with pytest.raises(ConfigError, match=r"task piqa: a text of its data cannot be tokenized: .*surrogates"):
        scorer.encode_pairs([("abc \ud800", "def")])


def test_a_model_without_a_tokenizer_or_with_a_larger_one_is_refused(it: Opened) -> None:
    with pytest.raises(ConfigError, match="names no tokenizer; name its file with --tokenizer"):
        Scorer(dataclasses.replace(it, tokenizer=None), None, 64)
    other = Merging()
    other.vocab_size = 321
    with pytest.raises(ConfigError, match=r"321 ids, but the model in .* has 320"):
        Scorer(dataclasses.replace(it, tokenizer=_as_tokenizer(other)), None, 64)


def test_progress_is_said_now_and_then_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times, said = iter([100.0, 105.0, 130.0, 131.0]), []
    monkeypatch.setattr(scorer_module, "monotonic", lambda: next(times))
    monkeypatch.setattr(scorer_module.logger, "info", lambda text, *values: said.append(text % values))
    progress = Progress("piqa")
    for done in (500, 3000, 3500):
        progress(done, 12000)
    assert said == ["piqa: 25 % of 12,000 tokens, 0:01:30 left"]
