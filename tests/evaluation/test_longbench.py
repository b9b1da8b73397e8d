"""LongBench v2 from a file: what is asked, what is left out of long texts, what counts as an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.longbench import entry, write_longbench

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation import longbench
from megatron_palimpsa.evaluation.longbench import extract, find_file, read_items, without_middle
from megatron_palimpsa.evaluation.scorer import Scorer, Truncation
from megatron_palimpsa.inference import Opened


def test_a_prompt_has_the_text_the_question_and_the_choices(tmp_path: Path) -> None:
    (item, *_) = read_items(find_file(write_longbench(tmp_path)))
    for part in ("<text>\nabc def 0 ghi", "question: which 0?\n", "(A) abc 0\n", "(D) jab 0\n\n"):
        assert part in item.prompt
    assert (item.id, item.answer, item.groups) == ("q0", "A", ("easy", "short"))


@pytest.mark.parametrize("name", longbench.FILES)
def test_every_place_and_format_of_the_file_is_found(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    rows = [entry(0), entry(1)]
    lines = "\n".join(map(json.dumps, rows))
    place.write_text(lines if name.endswith("l") else json.dumps(rows))
    assert [item.id for item in read_items(find_file(tmp_path))] == ["q0", "q1"]


def test_the_middle_is_left_out_and_counted() -> None:
    truncation = Truncation()
    ids = np.arange(10)
    assert without_middle(ids, 5, truncation).tolist() == [0, 1, 7, 8, 9]
    assert without_middle(ids, 10, truncation) is ids
    assert without_middle(ids, None, truncation) is ids
    assert truncation == Truncation(inputs=1, tokens=5, longest=10)


def test_an_answer_is_what_the_benchmark_takes_for_one() -> None:
    answers = {
        "The correct answer is (B).": "B",
        "**The correct answer is** (C)": "C",
        "The correct answer is D": "D",
        "The correct answer is A or The correct answer is (B)": "B",
        "(A)": None,
        "The correct answer is (E)": None,
        "": None,
    }
    assert {text: extract(text) for text in answers} == answers


def test_the_likeliest_letter_is_chosen(it: Opened, tmp_path: Path) -> None:
    items = read_items(find_file(write_longbench(tmp_path)))
    result = longbench.choose(items, Scorer(it, None, 4096))
    assert it.tokenizer is not None
    for item, given in zip(items, result.details["answers"], strict=True):
        scores = []
        for letter in "ABCD":
            ids = torch.from_numpy(it.tokenizer.encode(f"{item.prompt}The correct answer is ({letter}")).long()
            with torch.no_grad():
                logits = it.model(input_ids=ids[None], position_ids=None, attention_mask=None)[0].double()
            scores.append(float(logits.log_softmax(-1)[-2, ids[-1]]))
        assert given == {"id": item.id, "answer": "ABCD"[int(np.argmax(scores))]}
    right = [item.answer == given["answer"] for item, given in zip(items, result.details["answers"], strict=True)]
    assert result.metrics["acc"].value == pytest.approx(sum(right) / len(right))
    assert result.metrics["acc_easy"].value == (right[0] + right[2]) / 2
    assert result.metrics["acc_hard"].value == float(right[1])
    assert not result.details["truncation"]["inputs"]


def test_long_prompts_lose_their_middle_in_both_ways(it: Opened, tmp_path: Path) -> None:
    items = read_items(find_file(write_longbench(tmp_path)))[:1]
    assert it.tokenizer is not None
    for evaluate, end, room in (
        (longbench.choose, "The correct answer is (A", 200),
        (longbench.generate, longbench._FORMAT, 200 - 128),
    ):
        whole = len(it.tokenizer.encode(items[0].prompt + end)) - (evaluate is longbench.choose)
        result = evaluate(items, Scorer(it, 200, 4096))
        assert result.details["truncation"] == {"inputs": 1, "tokens": whole - room, "longest": whole}
        assert result.items == 1


def test_what_is_missing_or_wrong_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task longbench_v2: needs one of the files .* below --data FOLDER"):
        find_file(tmp_path)
    wrong: list[tuple[Any, str]] = [
        ({}, "holds no list of questions"),
        ([], "holds no list of questions"),
        ([entry(0), {"context": "abc"}], "entry 2 is no question of LongBench v2"),
        ([entry(0) | {"answer": "E"}], "entry 1: the answer 'E' is none of A, B, C, D"),
    ]
    for content, message in wrong:
        (tmp_path / "longbench_v2.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message):
            read_items(find_file(tmp_path))
    (tmp_path / "longbench_v2.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_items(find_file(tmp_path))
