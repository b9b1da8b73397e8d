"""Gated DeltaNet layers (`G`), which keep no states: likelihoods are measured, what continues texts is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import reference_model
from helpers.gated_delta_net import pytorch_kernels as pytorch_kernels
from helpers.longbench import write_longbench
from helpers.random_stage import write_random_stage

from megatron_palimpsa import cli
from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation import paper
from megatron_palimpsa.evaluation.scorer import Scorer
from megatron_palimpsa.evaluation.spans import Span, score_spans
from megatron_palimpsa.evaluation.tables import paper_columns
from megatron_palimpsa.evaluation.tasks import Options, plan
from megatron_palimpsa.inference import opened
from megatron_palimpsa.model.naming import global_parameters

ONE_OF_A_KIND = ("wikitext", "lambada_openai", "arc_easy")
"""Of each way in which the paper's tasks ask for likelihoods."""


@pytest.fixture
def stage(tmp_path: Path, tiny_data: Path, pytorch_kernels: None) -> Path:
    model = {"pattern": "G-G", "num_attention_heads": None}
    return write_random_stage(tmp_path, tiny_data, model=model)


def test_likelihoods_are_those_of_each_document_alone_in_float64(stage: Path) -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 320, length).astype(np.int32) for length in (9, 5, 14)]
    with opened(stage) as it:
        found = score_spans(it.model, [Span(ids, 1) for ids in documents], batch_tokens=100)
        weights = {name: weight.detach().double() for name, weight in global_parameters(it.model)}
    for ids, scores in zip(documents, found, strict=True):
        read, predicted = (torch.from_numpy(part.astype(np.int64))[None] for part in (ids[:-1], ids[1:]))
        offsets = torch.tensor([0, len(ids) - 1])
        expected = reference_model.losses(weights, it.config.model, read, predicted, offsets)
        assert reference_model.relative_error(torch.from_numpy(-scores.log_probabilities), expected) < 1e-5


def test_tasks_that_continue_texts_are_refused_before_the_first_starts(
    stage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_longbench(tmp_path)
    output = tmp_path / "results"
    command = [
        "eval",
        "run",
        str(stage),
        "--data",
        str(data),
        "--limit",
        "2",
        "--max-length",
        "0",
        "--output",
        str(output),
        "--tasks",
    ]
    for tasks, named in (("longbench_v2_choice,ruler/vt", "ruler/vt/4096"), ("longbench_v2", "longbench_v2")):
        assert cli.main([*command, tasks]) == 2
        (message,) = capsys.readouterr().err.splitlines()
        assert f"task {named}: continues texts, and Gated DeltaNet layers (G) keep no states" in message
        assert not output.exists()


def test_tasks_of_the_paper_run(stage: Path, request: pytest.FixtureRequest, harness_data: Path, include: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra `eval`)")
    request.getfixturevalue("harness")
    tasks = plan(Options(ONE_OF_A_KIND, data=harness_data, limit=1))
    (writing,) = plan(Options(("own_writing",), data=harness_data, include=(include,)))
    with opened(stage) as it:
        scorer = Scorer(it, it.config.model.seq_length, 1000)
        for task in tasks:
            task.require(scorer)
        with pytest.raises(ConfigError, match="task own_writing: continues texts"):
            writing.require(scorer)
        columns = paper_columns([task.run(scorer) for task in tasks])
    assert list(columns) == [row.column for row in paper.TABLE if row.task in ONE_OF_A_KIND]
