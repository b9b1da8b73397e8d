"""RULER's tasks: exact lengths, answers that the text gives, the same for a seed, nothing shared with training."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.bpe import write_tokenizer
from palimpsa_data import tokenizers
from palimpsa_data.needles import NeedleOptions, needle
from palimpsa_data.needles.draws import Draw
from palimpsa_data.needles.names import split_of, value, word

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation.ruler import GENERATED, NAMES, Sample, Sources, make_sample, words


def tokens(texts: Sequence[str]) -> list[int]:
    """A stand-in for a tokenizer: words of up to six characters and every sign."""
    return [len(re.findall(r" ?[A-Za-z]{1,6}|[0-9]{1,3}|\S|\s", text)) for text in texts]


def sample(name: str, index: int = 0, length: int = 4096, seed: int = 0, data: Path | None = None) -> Sample:
    return make_sample(Sources(data).task(name), length, seed, index, tokens)


@pytest.mark.parametrize("name", GENERATED)
def test_prompt_and_answer_have_exactly_the_length(name: str) -> None:
    task = Sources(None).task(name)
    for length in (3000, 4096):
        for index in range(3):
            assert tokens([sample(name, index, length).prompt])[0] + task.answer_tokens == length


@pytest.mark.parametrize("kind", ["json", "sentencepiece"])
def test_length_is_exact_in_real_tokenizers(kind: str, tmp_path: Path, tiny_data: Path) -> None:
    path = write_tokenizer(tmp_path) if kind == "json" else tiny_data / "tokenizer.model"
    tokenizer = tokenizers.load(path)
    for name in ("niah_single_1", "niah_multikey_3", "vt", "fwe"):
        task = Sources(None).task(name)
        made = make_sample(task, 4096, 0, 1, lambda texts: np.diff(tokenizer.encode_flat(texts).offsets).tolist())
        assert len(tokenizer.encode(made.prompt)) + task.answer_tokens == 4096


def test_length_is_exact_where_tokens_depend_on_what_is_far_away() -> None:
    def counted(texts: Sequence[str]) -> list[int]:
        return [tokens([text])[0] + len(text) // 7 for text in texts]

    task = Sources(None).task("niah_single_2")
    made = [make_sample(task, 2000, 0, index, counted) for index in range(12)]
    assert {counted([one.prompt])[0] for one in made} == {2000 - task.answer_tokens}


def test_each_seed_index_and_length_gives_its_own_sample_again_and_again() -> None:
    keys = [("vt", 0, 2048, 0), ("vt", 1, 2048, 0), ("vt", 0, 2049, 0), ("vt", 0, 2048, 1), ("fwe", 0, 2048, 0)]
    made = [sample(*key) for key in keys]
    assert [sample(*key) for key in keys] == made
    assert len({one.answers for one in made}) == len(made)


def test_a_seed_means_the_same_samples_for_good() -> None:
    assert sample("niah_multiquery", 0, 2048).answers == ("6187360", "8019043", "9605251", "6420818")
    assert sample("vt", 0, 2048).answers == ("YURNM", "RRPJN", "UQBHW", "POYRN", "RSSIR")


def needles(prompt: str) -> list[tuple[str, str]]:
    return re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt)


@pytest.mark.parametrize(
    ("name", "keys", "answers", "key", "value"),
    [
        ("niah_single_1", 1, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_single_2", 1, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_single_3", 1, 1, r"[a-z]+-[a-z]+", r"[0-9a-f-]{36}"),
        ("niah_multikey_1", 4, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multikey_2", None, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multikey_3", None, 1, r"[0-9a-f-]{36}", r"[0-9a-f-]{36}"),
        ("niah_multivalue", 1, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multiquery", 4, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
    ],
)
def test_needles_say_what_is_asked(name: str, keys: int | None, answers: int, key: str, value: str) -> None:
    for index in range(3):
        made = sample(name, index)
        found = needles(made.prompt)
        asked = re.findall(r"special magic \w+ for ([^?.\n]+?) mentioned", made.prompt)
        assert len(set(asked)) == 1
        names = re.split(r", and |, ", asked[0])
        assert sorted(made.answers) == sorted(text for own, text in found if own in names)
        assert len(made.answers) == len(set(made.answers)) == answers
        if keys is None:
            assert len(found) > 50
        else:
            assert len({own for own, _ in found}) == keys
        assert all(re.fullmatch(key, own) and re.fullmatch(value, text) for own, text in found)


def test_variables_are_those_that_the_assignments_reach() -> None:
    made = sample("vt")
    asked = made.prompt.rsplit("\n\n", 1)[1]
    wanted = re.search(r"assigned the value (\d+)", asked)
    assert wanted
    reached: dict[str, str] = {}
    for left, right in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", asked):
        reached[left] = reached.get(right, right)
    assert [name for name, found in reached.items() if found == wanted[1]] == list(made.answers)
    assert len(made.answers) == 5


def test_common_words_are_the_ten_most_common_ones() -> None:
    asked = sample("cwe").prompt.rsplit("Below is", 1)[1]
    listed = re.findall(r"(\d+)\. ([a-z]+)", asked)
    counted = Counter(spelled for _, spelled in listed)
    assert set(sample("cwe").answers) == {spelled for spelled, _ in counted.most_common(10)}
    assert {counted[spelled] for spelled in sample("cwe").answers} == {30}
    assert [int(place) for place, _ in listed[:-5]] == list(range(1, len(listed) - 4))
    # The last entries are cut to the length and may add one.
    assert sum(count > 3 for count in counted.values()) <= 11


def test_frequent_words_are_the_three_most_frequent_behind_the_dots() -> None:
    coded = sample("fwe").prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
    counted = Counter(spelled for spelled in coded.split() if spelled.isalpha()).most_common(4)
    assert tuple(spelled for spelled, _ in counted[:3]) == sample("fwe").answers
    assert counted[2][1] > counted[3][1]
    assert coded.split().count("...") > counted[0][1]


# Apart from training


def test_no_key_value_or_word_is_one_of_the_training_needles() -> None:
    options = NeedleOptions(shortest=512, longest=512, loss="all")
    trained: set[str] = set()
    for index in range(40):
        trained |= set(re.findall(r"[\w-]+", needle(options, index, tokens).text))  # type: ignore[union-attr]
    draw = Draw(5)
    trained |= {value(draw) for _ in range(3000)} | {word(draw) for _ in range(3000)}
    draw = Draw(6)
    for make in (words.key, words.number, words.uuid, words.variable, words.coded_word, words.list_word):
        made = {make(draw) for _ in range(3000)}
        assert len(made) > 1500, make
        assert not made & trained, make
    for name in GENERATED:
        for index in range(3):
            made_sample = sample(name, index)
            own = {text for pair in needles(made_sample.prompt) for text in pair} | set(made_sample.answers)
            assert own
            assert not own & trained


def test_they_are_apart_by_how_they_are_made() -> None:
    draw = Draw(7)
    for _ in range(300):
        for make in (words.key, words.variable, words.coded_word, words.list_word):
            assert split_of(make(draw).lower()) == "evaluation"
        # Training's values: 5, 6 or 8 digits, or KT-4071-W.
        assert re.fullmatch(r"\d{7}", words.number(draw))
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", words.uuid(draw))


# Scores


def test_score_is_the_share_of_answers_that_the_prediction_holds() -> None:
    task = Sources(None).task("niah_multivalue")
    assert task.score(" 111 and 222", ("111", "222", "333", "444")) == 0.5
    assert task.score("COMUS\x00abcde", ("comus", "ABCDE")) == 1.0
    assert task.score("", ("1",)) == 0.0


# The user's files


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "ruler" / "essays").mkdir(parents=True)
    essay = " ".join(f"Sentence {number} of the essay is here." for number in range(40))
    (folder / "ruler" / "essays" / "one.txt").write_text(essay)
    paragraphs = [
        {
            "context": f"Paragraph {number}. The keeper of house {number} is called Mr. Name{number}.",
            "qas": [
                {"question": f"Who keeps house {number}?", "answers": [{"text": f"Name{number}"}]},
                {"question": "Who keeps nothing?", "answers": [], "is_impossible": True},
            ],
        }
        for number in range(8)
    ]
    (folder / "ruler" / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [
        {
            "question": f"How old is friend {number}?",
            "answer": f"age {number}",
            "context": [[f"T{number}-{k}", [f"Text {k} of {number}."]] for k in range(4)],
            "supporting_facts": [[f"T{number}-1", 0], [f"T{number}-3", 0]],
        }
        for number in range(3)
    ]
    (folder / "ruler" / "hotpotqa.json").write_text(json.dumps(hotpot))
    return folder


def test_essays_are_the_haystack_where_there_are_some(data: Path) -> None:
    made = sample("niah_single_2", length=1024, data=data)
    assert "Sentence 7 of the essay is here." in made.prompt
    assert made.answers == sample("niah_single_2", length=1024).answers
    assert Sources(data).essays
    assert Sources(None).essays is None


@pytest.mark.parametrize("name", ["qa_squad", "qa_hotpotqa"])
def test_questions_stand_among_documents_of_others(name: str, data: Path) -> None:
    task = Sources(data).task(name)
    for index in range(4):
        made = sample(name, index, 1024, data=data)
        assert tokens([made.prompt])[0] + task.answer_tokens == 1024
        number = re.findall(r"(?:house|friend) (\d+)\? Answer:", made.prompt)[0]
        if name == "qa_squad":
            assert made.answers == (f"Name{number}",)
            assert made.prompt.count(f"Mr. Name{number}.") == 1
        else:
            assert made.answers == (f"age {number}",)
            assert all(made.prompt.count(f"Text {k} of {number}.") == 1 for k in (1, 3))
        assert task.score(f"It is {made.answers[0]}.", [*made.answers, "other"]) == 1.0


def test_what_is_missing_or_wrong_is_one_message(data: Path, tmp_path: Path) -> None:
    for name in set(NAMES) - set(GENERATED):
        with pytest.raises(ConfigError, match=rf"task ruler/{name}: needs the file ruler/\w+.json below --data"):
            Sources(tmp_path).task(name)
    (tmp_path / "ruler").mkdir()
    for content, message in (("{", "cannot be read"), ("{}", "is no SQuAD file"), ('{"data": []}', "too few")):
        (tmp_path / "ruler" / "squad.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            Sources(tmp_path).task("qa_squad")
    with pytest.raises(ConfigError, match="task ruler/cwe: does not fit into 600 tokens"):
        sample("cwe", length=600)
