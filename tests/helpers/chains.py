"""Chains of tiny stages on a real SLURM of virtual nodes, and what befalls them."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from palimpsa_launch import stages

from helpers.mini_slurm import MiniSlurm, wait_until
from helpers.runs import Events, read_checkpoint, train_on_ranks, write_stage
from megatron_palimpsa import cli

STEPS = 8
PATIENCE = 900.0  # seconds; other programs may want the cores


class FaultyChain:
    """Stages of 8 steps on two nodes, saved every second step; `plan` as in `faults/sitecustomize.py`."""

    def __init__(
        self,
        folder: Path,
        cluster: MiniSlurm,
        recipes: Sequence[Path],
        plan: Mapping[str, Mapping[int, tuple[str, int]]],
        job: Mapping[str, Any] | None = None,
        processes: int = 2,
    ) -> None:
        """`processes` of each node; `job` goes over the settings of the job."""
        self.cluster = cluster
        self.ranks = 2 * processes
        self.faults = folder / "faults"
        self.faults.mkdir()
        (self.faults / "plan.json").write_text(json.dumps(plan))
        self.run = folder / "runs"
        self.recipes = recipes
        hook = str(Path(__file__).parent / "faults")
        variables = {"PYTHONPATH": f"{hook}:{os.environ.get('PYTHONPATH', '')}", "FAULTS": str(self.faults)}
        settings = {"time": "60", "nodes": 2, "gpus_per_node": 0, "processes_per_node": processes}
        settings |= {"preflight": None, "variables": variables | {"OMP_NUM_THREADS": "1"}, **(job or {})}
        self.job = folder / "job.yaml"
        self.job.write_text(yaml.safe_dump(settings))

    def submit(self) -> None:
        assert cli.main(["submit", *map(str, self.recipes), "--job", str(self.job)]) == 0

    def job_id(self, stage: str) -> str:
        return str(json.loads((self.run / stage / "job" / "submission.json").read_text())["job_id"])

    def state(self, stage: str) -> str:
        return self.cluster.state(self.job_id(stage))

    def wait_for(self, stage: str, *states: str) -> None:
        wait_until(f"{states} of {stage}", lambda: self.state(stage) in states, PATIENCE)

    def wait_at(self, stage: str, step: int) -> None:
        """Until the fault of a step has come."""
        wait_until(f"step {step} of {stage}", (self.faults / f"at-{stage}-{step}").exists, PATIENCE)

    def go_on(self, stage: str, step: int) -> None:
        (self.faults / f"go-{stage}-{step}").touch()

    def log(self, stage: str) -> str:
        return "".join(path.read_text() for path in sorted((self.run / stage / "logs").glob("job-*.log")))

    def rank_logs(self, stage: str, attempt: int) -> list[str]:
        folder = self.run / stage / "logs" / f"{self.job_id(stage)}-restart-{attempt}"
        return [(folder / f"rank-{rank}.log").read_text() for rank in range(self.ranks)]

    def seconds_lost(self, stage: str, step: int) -> float:
        """From a fault, or the last step that its attempt still did, until a later attempt had done one step more."""
        begin, attempt = (self.faults / f"at-{stage}-{step}").read_text().split()
        done = [line.split() for line in (self.faults / "steps").read_text().splitlines()]
        of_stage = [(int(number), float(at), by) for name, number, at, by in done if name == stage]
        last, end = max(((number, at) for number, at, by in of_stage if by == attempt), default=(step - 1, 0.0))
        return min(at for number, at, _ in of_stage if number > last) - max(float(begin), end)


class Unbroken:
    """Stages that nothing befalls, trained on this machine, each when it is first asked for."""

    def __init__(self, recipes: Sequence[Path], ranks: int) -> None:
        self._recipes = recipes
        self._ranks = ranks

    def weights(self, stage: str) -> dict[str, Any]:
        run = self._recipes[0].parent / "runs"
        for recipe in self._recipes:
            if not (run / recipe.stem / "STAGE_COMPLETE").exists():
                assert train_on_ranks(recipe, ranks=[Events()] * self._ranks) == [0] * self._ranks
            if recipe.stem == stage:
                break
        return weights(run, stage)


def write_chain(folder: Path, data: Path, count: int, **train: Any) -> list[Path]:
    """Stages of a tiny model, each from the weights of the one before."""
    changes = {"tokens": STEPS * 128, "global_batch_tokens": 128, "eval_interval": STEPS, **train}
    recipes = []
    for number in range(1, count + 1):
        source = {"init_from": {"stage": f"stage-{number - 1}"}} if number > 1 else {}
        checkpoint = {"interval": 2, "keep": 8}
        recipes.append(write_stage(folder, data, f"stage-{number}", train=changes, checkpoint=checkpoint, **source))
    return recipes


def write_demo(folder: Path, data: Path) -> list[Path]:
    """The demo's three stages, each cut to 8 steps, on data that lies in `data` or will."""
    recipes = []
    for name in ("continue-pretraining", "long-context", "instruct"):
        blends = {f"{split}_blend": str(data / "blends" / f"{name}-{split}.yaml") for split in ("train", "valid")}
        tree = {
            "base": str(stages.path(f"demo/{name}")),
            "output_dir": str(folder / "runs"),
            "data": blends | {"tokenizer": str(data / "tokenizer.model")},
            "train": {"tokens": STEPS * 2048, "eval_interval": STEPS},
            "optimizer": {"warmup_steps": 2},
            "parallel": {"tp": 2},
            "checkpoint": {"interval": 2, "keep": 8},
        }
        recipes.append(folder / f"{name}.yaml")
        recipes[-1].write_text(yaml.safe_dump(tree))
    return recipes


def write_preparation(folder: Path, data: Path) -> Path:
    """The demo's data, made in `data`."""
    recipe = folder / "data.yaml"
    command = shlex.join(["prep", "demo", "--folder", str(data)])
    recipe.write_text(yaml.safe_dump({"name": "data", "output_dir": str(folder / "runs"), "then": [command]}))
    return recipe


def weights(run: Path, stage: str) -> dict[str, Any]:
    """All tensors of a stage's last checkpoint."""
    with tempfile.TemporaryDirectory() as scratch:
        return read_checkpoint(run / stage / "checkpoints" / f"step-{STEPS}", Path(scratch))


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not one[key].equal(other[key])] == []
