"""Programs that stand in for SLURM's clients and note what they are asked."""

from __future__ import annotations

from pathlib import Path

from helpers.slurm_script import write_program

# Job ids count up; `refused` holds a pattern of scripts that are refused.
_SBATCH = """#!/usr/bin/env bash
here=$(dirname "$0")
script=$(cat)
if [[ -e $here/refused ]] && grep -qf "$here/refused" <<<"$script $*"; then
    echo "sbatch: error: invalid partition specified: gone" >&2
    exit 1
fi
[[ $1 == --test-only ]] && exit 0
id=$(($(cat "$here/last" 2>/dev/null || echo 100) + 1))
echo "$id" >"$here/last"
name=$(sed -n 's/^#SBATCH --job-name=//p' <<<"$script")
comment=$(sed -n 's/^#SBATCH --comment="\\(.*\\)"$/\\1/p' <<<"$script")
echo "$id|$name|$comment" >>"$here/names"
echo "$*" >>"$here/calls"
[[ $(cat "$here/signal" 2>/dev/null) == "$id "* ]] && kill -s "$(cut -d" " -f2 "$here/signal")" "$PPID"
env | grep -E '^(SBATCH|SLURM)_' >>"$here/environment"
echo "$id"
"""

# `queue` holds the jobs that squeue knows: ID|STATE|REASON|NODES.
_SQUEUE = """#!/usr/bin/env bash
for argument; do
    case $argument in
        --jobs=*) jobs=${argument#--jobs=} ;;
        --user=*) exec cat "$(dirname "$0")/names" ;;
    esac
done
known=$(grep -E "^(${jobs//,/|})\\|" "$(dirname "$0")/queue" 2>/dev/null)
[[ -n $known ]] && echo "$known" && exit 0
echo "slurm_load_jobs error: Invalid job id specified" >&2
exit 1
"""

_SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >>"$(dirname "$0")/calls"
"""

# `accounts` holds what sacct knows: ID|STATE.
_SACCT = """#!/usr/bin/env bash
exec cat "$(dirname "$0")/accounts"
"""


class FakeSlurm:
    """Stand-ins in `folder`, which has to come first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("sbatch", _SBATCH), ("squeue", _SQUEUE), ("scancel", _SCANCEL), ("sacct", _SACCT)):
            write_program(folder / name, text)

    def calls(self) -> list[str]:
        """Submissions and cancellations, with their arguments."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def refuse(self, pattern: str) -> None:
        """Scripts, or arguments of sbatch, that hold this."""
        (self.folder / "refused").write_text(pattern)

    def signal_at(self, job: str, name: str) -> None:
        """What is sent to the program that submits, once the job of this id is submitted."""
        (self.folder / "signal").write_text(f"{job} {name}\n")

    def queue(self, *jobs: str) -> None:
        """What squeue knows from now on: ID|STATE|REASON|NODES."""
        (self.folder / "queue").write_text("".join(f"{job}\n" for job in jobs))

    def account(self, *jobs: str) -> None:
        """What sacct knows from now on: ID|STATE."""
        (self.folder / "accounts").write_text("".join(f"{job}\n" for job in jobs))
