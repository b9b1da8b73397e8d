"""A submitted chain on the tests' own SLURM, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from helpers.mini_slurm import MiniSlurm, wait_until
from helpers.runs import write_stage
from helpers.slurm_script import write_trainer
from megatron_palimpsa import cli


class StandInChain:
    """Two stages in a folder of their own; what stands in for training does what their `behaviour` says.

    `changes` are those of the first stage's recipe.
    """

    def __init__(self, folder: Path, data: Path, cluster: MiniSlurm, **changes: Any) -> None:
        self.cluster = cluster
        self.runs = folder / "runs"
        self.recipes = [
            write_stage(folder, data, "first", **changes),
            write_stage(folder, data, "second", init_from={"stage": "first"}),
        ]
        self.job = folder / "job.yaml"
        settings = {"time": "60", "gpus_per_node": 0, "processes_per_node": 1, "python": str(write_trainer(folder))}
        self.job.write_text(yaml.safe_dump(settings))

    def behave(self, first: str, second: str = "complete") -> None:
        for name, behaviour in (("first", first), ("second", second)):
            (self.runs / name).mkdir(parents=True, exist_ok=True)
            (self.runs / name / "behaviour").write_text(behaviour)

    def submit(self, *options: str) -> int:
        return cli.main(["submit", *map(str, self.recipes), "--job", str(self.job), *options])

    def job_id(self, name: str) -> str:
        return str(yaml.safe_load((self.runs / name / "job" / "submission.json").read_text())["job_id"])

    def wait_for(self, name: str, *states: str) -> None:
        job = self.job_id(name)
        wait_until(f"{states} of {name}, which is", lambda: self.cluster.state(job) in states)

    def wait_for_attempt(self, name: str, attempt: int) -> None:
        logs = self.runs / name / "logs" / f"{self.job_id(name)}-restart-{attempt}"
        wait_until(f"attempt {attempt} of {name}", (logs / "arguments").exists)

    def log(self, name: str) -> str:
        return (self.runs / name / "logs" / f"job-{self.job_id(name)}.log").read_text()
