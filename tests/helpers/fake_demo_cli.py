"""In place of the command line: each command leaves what the real one would, at once or when it is let go.

FAKE_DEMO is a folder: `calls` gets one line a command; the file `STAGE.does` says `exit CODE`, `kill` or `wait` (until
SIGTERM, then exit 75), once; without it the stage completes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from helpers.finished_stage import write_finished_stage
from megatron_palimpsa.config import load_stage

PLACE = Path(os.environ["FAKE_DEMO"])


def main(command: str, *arguments: str) -> int:
    with (PLACE / "calls").open("a") as calls:
        calls.write(" ".join([command, *arguments]) + "\n")
    if command == "train":
        return train(*arguments)
    if command == "report":
        folder = Path(arguments[0]) / "report"
        folder.mkdir()
        (folder / "report.json").write_text("{}")
    return 0


def train(recipe: str, *overrides: str) -> int:
    config = load_stage(recipe, list(overrides))
    does = PLACE / f"{config.name}.does"
    if does.exists():
        what = does.read_text().split()
        does.unlink()
        if what[0] == "exit":
            return int(what[1])
        if what[0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return wait_for_signal(config.name)
    write_finished_stage(config, first_loss=7.0, last_loss=4.0)
    return 0


def wait_for_signal(name: str) -> int:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    (PLACE / f"{name}.pid").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while not stopped and time.monotonic() < deadline:
        time.sleep(0.02)
    return 75


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
