"""lm-evaluation-harness over a small model: its tasks, its data from folders, its numbers against the logits."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.own_tasks import ITEMS

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation import paper
from megatron_palimpsa.evaluation.scorer import Scorer
from megatron_palimpsa.evaluation.tables import paper_columns
from megatron_palimpsa.evaluation.tasks import Options, plan
from megatron_palimpsa.inference import Opened
from megatron_palimpsa.model.generation import generate

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra `eval`)")


def options(data: Path | None, *tasks: str, include: Path | None = None, **settings: Any) -> Options:
    return Options(tasks=tasks, data=data, include=() if include is None else (include,), **settings)


def direct(it: Opened, context: str, continuation: str) -> float:
    """From the logits of the whole text in float64."""
    assert it.tokenizer is not None
    ids, known = it.tokenizer.encode(context + continuation), len(it.tokenizer.encode(context.rstrip()))
    with torch.no_grad():
        tokens = torch.from_numpy(ids)[None].long()
        found = it.model(input_ids=tokens, position_ids=None, attention_mask=None)[0].double().log_softmax(-1)
    return float(sum(found[place - 1, ids[place]] for place in range(known, len(ids))))


def test_a_task_of_our_own_is_scored_by_the_logits(
    it: Opened, harness: ModuleType, harness_data: Path, include: Path
) -> None:
    (task,) = plan(options(harness_data, "own_choice", include=include))
    result = task.run(Scorer(it, None, 512))
    scores = [[direct(it, item["question"], choice) for choice in item["choices"]] for item in ITEMS]
    lengths = [[len(choice) for choice in item["choices"]] for item in ITEMS]
    right = [max(range(3), key=own.__getitem__) == item["answer"] for own, item in zip(scores, ITEMS, strict=True)]
    normed = [
        [score / length for score, length in zip(*pair, strict=True)] for pair in zip(scores, lengths, strict=True)
    ]
    right_norm = [max(range(3), key=own.__getitem__) == item["answer"] for own, item in zip(normed, ITEMS, strict=True)]
    assert result.items == 3
    assert result.metrics["acc"].value == pytest.approx(sum(right) / 3)
    assert result.metrics["acc_norm"].value == pytest.approx(sum(right_norm) / 3)
    assert result.metrics["acc"].stderr is not None
    assert result.details["versions"] == {"own_choice": 3}


def test_the_adapter_gives_the_harness_what_the_logits_say(it: Opened, harness: ModuleType) -> None:
    model = harness.HarnessModel(Scorer(it, None, 512))

    def requests(*arguments: tuple[Any, ...]) -> list[Any]:
        return [harness.Instance("loglikelihood", {}, own, number) for number, own in enumerate(arguments)]

    pairs = [("abc def", " ghi"), ("jih", " efg hij"), ("abc def", " jab")]
    found = model.loglikelihood(requests(*pairs))
    for (value, _), pair in zip(found, pairs, strict=True):
        assert value == pytest.approx(direct(it, *pair), abs=1e-4)
    assert it.tokenizer is not None
    greedy = it.tokenizer.decode(generate(it.model, it.tokenizer.encode("abc def"), max_new_tokens=1))
    assert all(
        is_greedy == (continuation == greedy) for (_, continuation), (_, is_greedy) in zip(pairs, found, strict=True)
    )
    rolling = model.loglikelihood_rolling(requests(("abc def ghi",)))
    eod = Scorer(it, None, 512).rolling(["abc def ghi"])
    assert rolling == eod


def test_generation_ends_at_stop_strings_and_lengths(it: Opened, harness: ModuleType) -> None:
    model = harness.HarnessModel(Scorer(it, 64, 512))
    assert it.tokenizer is not None
    whole = it.tokenizer.decode(generate(it.model, it.tokenizer.encode("abc def"), max_new_tokens=8))
    stop = whole[len(whole) // 2]
    settings = ({"max_gen_toks": 8}, {"max_gen_toks": 8, "until": [stop]}, {"max_gen_toks": 8, "until": stop})
    requests = [harness.Instance("generate_until", {}, ("abc def", own), 0) for own in settings]
    prompts = model.generate_until(requests)
    assert prompts[0] == whole
    assert prompts[1] == prompts[2] == whole[: whole.index(stop)]
    assert model.generate_until([harness.Instance("generate_until", {}, ("", {"max_gen_toks": 2}), 0)])


def test_all_tasks_of_the_paper_run_from_folders(it: Opened, harness: ModuleType, harness_data: Path) -> None:
    scorer = Scorer(it, 32, 512)
    results = [task.run(scorer) for task in plan(options(harness_data, "paper", limit=2))]
    assert [result.task for result in results] == list(paper.TASKS)
    columns = paper_columns(results)
    assert list(columns) == [row.column for row in paper.TABLE] + ["average"]
    averaged = [columns[row.column].value for row in paper.TABLE if row.averaged]
    assert len(averaged) == 7
    assert columns["average"].value == pytest.approx(sum(averaged) / 7)
    assert {result.items for result in results if result.task != "wikitext"} == {2}
    assert scorer.truncation.inputs > 0


def test_groups_tags_and_generation_run(it: Opened, harness: ModuleType, harness_data: Path, include: Path) -> None:
    arc, writing = plan(options(harness_data, "ai2_arc", "own_writing", include=include))
    result = arc.run(Scorer(it, None, 512))
    assert {"arc_easy/acc", "arc_challenge/acc_norm"} <= result.metrics.keys()
    assert result.items == 6
    assert writing.run(Scorer(it, None, 512)).metrics["exact_match"].value in (0, 1 / 3, 2 / 3, 1)


def test_what_is_missing_is_one_message(harness: ModuleType, harness_data: Path, tmp_path: Path, include: Path) -> None:
    for settings, message in (
        (options(harness_data, "own_chioce", include=include), "no task, tag or group 'own_chioce'"),
        (options(harness_data, "hellaswg"), "no task, tag or group 'hellaswg'"),
        (options(tmp_path, "piqa"), rf"task piqa: its data set baber/piqa is not in --data {tmp_path} \(the folder "),
        (options(tmp_path, "own_choice", include=include), "task own_choice: its data set own is not in --data"),
        (options(None, "piqa"), "task piqa: its data cannot be loaded .*--data FOLDER"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(settings)
    (tmp_path / "baber" / "piqa").mkdir(parents=True)
    (tmp_path / "baber" / "piqa" / "validation.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="task piqa: its data cannot be loaded"):
        plan(options(tmp_path, "piqa"))
