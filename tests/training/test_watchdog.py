"""A process that hangs tells where and ends; one that gets something done does not."""

import signal
import subprocess
import sys

from helpers.runs import write_stage

from megatron_palimpsa import cli
from megatron_palimpsa.training import loop

_PROGRAM = """
import ctypes, threading, time
from megatron_palimpsa.training.watchdog import Watchdog

def stuck_in_c():
    ctypes.PyDLL(None).sleep(20)  # holds the interpreter lock

def other_thread():
    time.sleep(20)

threading.Thread(target=other_thread, daemon=True).start()
with Watchdog(0.5, grace=0.5) as watchdog:
    {inside}
time.sleep({after})
print("came to its end")
"""


def run(inside: str, after: float = 0) -> subprocess.CompletedProcess[str]:
    program = _PROGRAM.format(inside=inside, after=after)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)


def test_hang_that_holds_the_interpreter_lock_is_told_and_ended():
    answer = run("stuck_in_c()")
    assert answer.returncode == -signal.SIGALRM
    assert answer.stderr.startswith("Timeout (")
    assert "in stuck_in_c" in answer.stderr
    assert "in other_thread" in answer.stderr


def test_beats_keep_it_alive_and_nothing_is_left_afterwards():
    answer = run("[(time.sleep(0.3), watchdog.beat()) for _ in range(4)]", after=1.2)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "came to its end\n", "")


def test_every_step_validation_and_save_is_a_beat(tmp_path, tiny_data, monkeypatch):
    made = []

    class Counting:
        def __init__(self, seconds):
            self.seconds, self.beats, self.inside = seconds, 0, False
            made.append(self)

        def __enter__(self):
            self.inside = True

        def __exit__(self, *error):
            self.inside = False

        def beat(self):
            assert self.inside
            self.beats += 1

    monkeypatch.setattr(loop, "Watchdog", Counting)
    assert cli.main(["train", str(write_stage(tmp_path, tiny_data))]) == 0
    (watchdog,) = made
    assert watchdog.seconds is None  # alone
    assert watchdog.beats == 8 + 3 + 2  # steps, validations (before the first and at 4 and 8), saves
