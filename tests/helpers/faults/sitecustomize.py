"""Python imports this by itself where its folder is on PYTHONPATH: it lets faults befall ranks at given steps.

FAULTS is a folder. `plan.json` in it holds {stage: {step: [what, rank]}}; steps count from 1 and a fault comes once
over all attempts, before its step: `kill` by SIGKILL, `hang` for ever, `wait` until the file `go-STAGE-STEP` is there.
Rank 0 notes in `steps` when each step is done.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

_LOOP = "megatron_palimpsa.training.loop"
_ATTEMPT = f"{os.environ.get('SLURM_JOB_ID')}-{os.environ.get('SLURM_RESTART_COUNT', 0)}"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run_module = spec.loader.exec_module

        def exec_module(module):
            run_module(module)
            _put_into(module)

        spec.loader.exec_module = exec_module
        return spec


def _put_into(loop) -> None:
    build_engine = loop.build_engine

    def build(config):
        engine = build_engine(config)
        take_step = engine.train_step

        def train_step(batches, accept):
            step = engine.scheduler_state()["steps"] + 1
            _befall(config.name, step)
            result = take_step(batches, accept)
            if os.environ["RANK"] == "0":
                with Path(os.environ["FAULTS"], "steps").open("a") as file:
                    file.write(f"{config.name} {step} {time.time()} {_ATTEMPT}\n")
            return result

        engine.train_step = train_step
        return engine

    loop.build_engine = build


def _befall(stage: str, step: int) -> None:
    folder = Path(os.environ["FAULTS"])
    plan = json.loads((folder / "plan.json").read_text())
    what, rank = plan.get(stage, {}).get(str(step), ("", -1))
    fired = folder / f"at-{stage}-{step}"
    if int(os.environ["RANK"]) != rank or fired.exists():
        return
    fired.write_text(f"{time.time()} {_ATTEMPT}")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while what == "hang" or not (folder / f"go-{stage}-{step}").exists():
        time.sleep(0.05)


if "FAULTS" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, _Finder())
