"""One rank of a stage's job: `python -m palimpsa_launch.rank FOLDER ARGUMENTS...` is `megatron-palimpsa ARGUMENTS...`.

What it prints goes to `FOLDER/rank-N.log` and its exit code to `FOLDER/rank-N.exit`: torchrun, whatever its ranks end
with, ends with 1. Saved and stopped counts as success for torchrun.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    name = f"rank-{int(os.environ['RANK'])}"
    with (folder / f"{name}.log").open("a") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    # From here on, so that what the imports print or raise is in the log.
    from megatron_palimpsa.cli import main as run
    from megatron_palimpsa.training.exit_codes import ExitCode

    code = run(arguments, lambda code: _note(folder / f"{name}.exit", code))
    # torchrun would kill the other ranks, and print pages about a failure.
    return 0 if code == ExitCode.SAVED_AND_STOPPED and "TORCHELASTIC_RUN_ID" in os.environ else code


def _note(path: Path, code: int) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(f"{int(code)}\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
