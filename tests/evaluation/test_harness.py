"""lm-evaluation-harness over a small model: its tasks, its data from folders, its numbers against the logits."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from helpers.hub_data import write_hub_data

from megatron_palimpsa import cli
from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation import paper
from megatron_palimpsa.evaluation.scorer import Scorer
from megatron_palimpsa.evaluation.tables import paper_columns
from megatron_palimpsa.evaluation.tasks import Options, plan
from megatron_palimpsa.inference import Opened
from megatron_palimpsa.model.generation import generate

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra `eval`)")

ITEMS = [
    {"question": "abc def", "choices": [" ghi", " jab cde", " f"], "answer": 1},
    {"question": "jih", "choices": [" a", " bcd", " efg hij"], "answer": 0},
    {"question": "cab fed ", "choices": ["gh", "ij", "ab"], "answer": 2},
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The adapter, with the data sets' cache in a folder of its own and no hub."""
    import datasets.config

    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    yield importlib.import_module("megatron_palimpsa.evaluation.harness")
    patch.undo()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of the paper's tasks and one of our own."""
    folder = write_hub_data(tmp_path_factory.mktemp("data"))
    (folder / "own").mkdir()
    (folder / "own" / "test.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    return folder


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("include")
    task: dict[str, Any] = {
        "dataset_path": "own",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        "metadata": {"version": 3},
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    scores = {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    write = {"output_type": "generate_until", "doc_to_target": "a", "metric_list": [{"metric": "exact_match"}]}
    settings = {"generation_kwargs": {"until": ["b"], "max_gen_toks": 6, "do_sample": False}}
    for name, own in (("own_choice", choice | scores), ("own_writing", write | settings)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **task, **own}))
    return folder


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


def test_a_task_of_our_own_is_scored_by_the_logits(it: Opened, harness: ModuleType, data: Path, include: Path) -> None:
    (task,) = plan(options(data, "own_choice", include=include))
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


def test_the_command_runs_it_on_a_stage_and_on_its_export(
    evaluated_stage: Path,
    harness: ModuleType,
    data: Path,
    include: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exported = tmp_path / "exported"
    assert cli.main(["export", str(evaluated_stage), str(exported)]) == 0
    found = []
    for model, output in ((evaluated_stage, tmp_path / "of stage"), (exported, tmp_path / "of export")):
        command = ["eval", "run", str(model), "--output", str(output), "--tasks", "own_choice"]
        assert cli.main([*command, "--data", str(data), "--include", str(include)]) == 0
        assert "| own_choice: acc_norm |" in capsys.readouterr().out
        found.append(json.loads((output / "results.json").read_text())["results"])
    assert found[0] == found[1]
    assert [(one["task"], one["items"]) for one in found[0]] == [("own_choice", 3)]


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


def test_all_tasks_of_the_paper_run_from_folders(it: Opened, harness: ModuleType, data: Path) -> None:
    scorer = Scorer(it, 32, 512)
    results = [task.run(scorer) for task in plan(options(data, "paper", limit=2))]
    assert [result.task for result in results] == list(paper.TASKS)
    columns = paper_columns(results)
    assert list(columns) == [row.column for row in paper.TABLE] + ["average"]
    averaged = [columns[row.column].value for row in paper.TABLE if row.averaged]
    assert len(averaged) == 7
    assert columns["average"].value == pytest.approx(sum(averaged) / 7)
    assert {result.items for result in results if result.task != "wikitext"} == {2}
    assert scorer.truncation.inputs > 0


def test_groups_tags_and_generation_run(it: Opened, harness: ModuleType, data: Path, include: Path) -> None:
    arc, writing = plan(options(data, "ai2_arc", "own_writing", include=include))
    result = arc.run(Scorer(it, None, 512))
    assert {"arc_easy/acc", "arc_challenge/acc_norm"} <= result.metrics.keys()
    assert result.items == 6
    assert writing.run(Scorer(it, None, 512)).metrics["exact_match"].value in (0, 1 / 3, 2 / 3, 1)


def test_what_is_missing_is_one_message(harness: ModuleType, data: Path, tmp_path: Path, include: Path) -> None:
    for settings, message in (
        (options(data, "own_chioce", include=include), "no task, tag or group 'own_chioce'"),
        (options(data, "hellaswg"), "no task, tag or group 'hellaswg'"),
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
