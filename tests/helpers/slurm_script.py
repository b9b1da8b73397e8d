"""Programs that stand in for SLURM's and for training, so that a batch script runs without either."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from palimpsa_launch.job import load_job
from palimpsa_launch.render import render_stage, render_task

_SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""

# AWAY holds how many questions the controller does not answer.
_AWAY = """#!/usr/bin/env bash
away=$(cat "$AWAY" 2>/dev/null || echo 0)
if [[ $1 != show ]] && ((away)); then
    echo $((away - 1)) >"$AWAY"
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
    exit 1
fi
"""

_SCONTROL = """
case $1 in
    show) printf '%s\\n' node1 node2 ;;
    requeue) echo "$2" >>"$REQUEUED"; kill -TERM "$PPID" ;;
    update) echo "${*:2}" >>"$REQUEUED" ;;
esac
"""

# JOB_STATES holds lines of a job and its state; the script's own job runs unless they say otherwise.
_SQUEUE = """
for argument; do case $argument in --jobs=*) job=${argument#--jobs=} ;; esac; done
[[ $job == "$SLURM_JOB_ID" ]] && state=RUNNING
state=$(sed -n "s/^$job //p" "$JOB_STATES" 2>/dev/null | grep . || echo "${state-}")
[[ -n $state ]] && echo "$state" && exit
echo "slurm_load_jobs error: Invalid job id specified" >&2
exit 1
"""

# The pauses between questions to SLURM take no time.
_SLEEP = f"""#!/usr/bin/env bash
[[ $* == 10 ]] || exec {shutil.which("sleep")} "$@"
"""

# Called as python is: `-m palimpsa_launch.node OPTIONS -- train STAGE/job/stage.yaml`.
_TRAINER = """#!/usr/bin/env bash
[[ $2 == palimpsa_launch.node ]] || exit 0
for argument; do case $argument in --logs=*) logs=${argument#--logs=} ;; esac; done
stage=$(dirname "$(dirname "${*: -1}")")
printf '%s\n' "$@" >"$logs/arguments"
# The step reached, as a checkpoint.
reach() { mkdir -p "$stage/checkpoints"; echo "step-$1" >"$stage/checkpoints/latest"; }
complete() {
    echo '{"steps": 8, "tokens": 512, "seconds": 3.0, "checkpoint": "checkpoints/step-8"}' >"$stage/STAGE_COMPLETE"
    exit 0
}
# Ranks with these exit codes under torchrun.
ends() { local rank=0; for code; do echo "$code" >"$logs/rank-$rank.exit"; rank=$((rank + 1)); done; exit 1; }
until_told() { while [[ ! -e $PALIMPSA_STOP_FILE ]]; do sleep 0.05; done; }
# As training, it goes on to the next step.
trap : TERM
source "$stage/behaviour"
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_trainer(folder: Path) -> Path:
    """A `python` that does what the file `behaviour` in the stage's folder says (shell; see the functions above)."""
    return write_program(folder / "trainer", _TRAINER)


class _Script:
    """A rendered script over stand-ins in `folder`, which may hold more of them in `bin`."""

    def __init__(self, folder: Path, text: str) -> None:
        self.text = text
        self.requeued = folder / "requeued"
        self.states = folder / "states"
        self.away = folder / "away"
        self._bin = folder / "bin"
        write_program(self._bin / "srun", _SRUN)
        write_program(self._bin / "scontrol", _AWAY + _SCONTROL)
        write_program(self._bin / "squeue", _AWAY + _SQUEUE)
        write_program(self._bin / "sleep", _SLEEP)

    def start(self, attempt: int = 0, job: int = 12345) -> subprocess.Popen[str]:
        environment = os.environ | {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "REQUEUED": str(self.requeued),
            "JOB_STATES": str(self.states),
            "AWAY": str(self.away),
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_RESTART_COUNT": str(attempt),
        }
        return subprocess.Popen(
            ["bash", "-c", self.text],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, attempt: int = 0, job: int = 12345) -> tuple[int, str]:
        """-> exit status (minus the signal's number), output."""
        with self.start(attempt, job) as process:
            output, _ = process.communicate(timeout=240)
        return process.returncode, output


class StageScript(_Script):
    """One stage's."""

    def __init__(self, folder: Path, behaviour: str, **job: object) -> None:
        self.folder = folder / "a stage"
        (self.folder / "job").mkdir(parents=True)
        (self.folder / "behaviour").write_text(behaviour)
        settings = {"time": "30", "nodes": 2, "python": str(write_trainer(folder))}
        command = ["train", str(self.folder / "job" / "stage.yaml")]
        super().__init__(folder, render_stage(load_job(None, settings | job), "stage", self.folder, folder, command))

    def logs(self, attempt: int = 0, job: int = 12345) -> Path:
        return self.folder / "logs" / f"{job}-restart-{attempt}"


class TaskScript(_Script):
    """That of a command, which is shell here; its output is in the job's log, where SLURM writes it."""

    def __init__(self, folder: Path, command: str, **job: object) -> None:
        self.folder = folder / "a step"
        self.log = self.folder / "logs" / "job-12345.log"
        self.log.parent.mkdir(parents=True)
        self.command = write_program(folder / "command", f"#!/usr/bin/env bash\n{command}\n")
        settings = {"time": "30", "gpus_per_node": 0, "processes_per_node": 1, **job}
        text = render_task(load_job(None, settings), "task", self.folder, folder, [str(self.command)])
        super().__init__(folder, f"exec >>'{self.log}' 2>&1\n{text}")

    def run(self, attempt: int = 0, job: int = 12345) -> tuple[int, str]:
        """-> exit status (minus the signal's number), the log so far."""
        return super().run(attempt, job)[0], self.log.read_text()
