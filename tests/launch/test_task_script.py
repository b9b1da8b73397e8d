"""What the batch script of one command does with each way in which that can end; SLURM is a stand-in."""

import signal
import time

from helpers.slurm_script import TaskScript

REQUEUED = -signal.SIGTERM  # as SLURM ends the shell of a job that is requeued


def test_third_failure_ends_it_with_its_last_error(tmp_path):
    script = TaskScript(tmp_path, 'echo "megatron-palimpsa: error: no scores"; echo "  more"; echo; exit 1')
    assert [script.run(attempt)[0] for attempt in range(2)] == [REQUEUED, REQUEUED]
    status, log = script.run(attempt=2)
    assert status == 1
    last = log.splitlines()[-1]
    assert last.endswith("not requeued: it failed three times, now with 1: megatron-palimpsa: error: no scores")
    assert script.requeued.read_text().splitlines() == ["12345"] * 2
    # Submitted again it is another job.
    assert script.run(job=2)[0] == REQUEUED


def test_without_an_error_the_last_line_is_shown(tmp_path):
    script = TaskScript(tmp_path, "printf 'half\\rway\\n\\n'; exit 9")
    for attempt in range(3):
        status, log = script.run(attempt)
    assert status == 1
    assert log.endswith("now with 9: way\n")


def test_attempts_that_the_time_limit_or_a_preemption_ended_are_no_failures(tmp_path):
    script = TaskScript(tmp_path, "exit 1")
    for attempt in range(2):
        assert script.run(attempt)[0] == REQUEUED
    script.command.write_text("#!/usr/bin/env bash\nkill -TERM $$\n")
    assert script.run(attempt=2)[0] == REQUEUED
    script.command.write_text(f"#!/usr/bin/env bash\ntouch {tmp_path}/runs\nexec sleep 1000\n")
    with script.start(attempt=3) as process:
        while not (tmp_path / "runs").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(240) == REQUEUED
    script.command.write_text("#!/usr/bin/env bash\nexit 1\n")
    assert [script.run(attempt)[0] for attempt in (4, 5, 6)] == [REQUEUED, REQUEUED, 1]


def test_requeue_is_asked_for_until_slurm_is_back(tmp_path):
    script = TaskScript(tmp_path, "exit 1")
    script.away.write_text("3")
    status, log = script.run()
    assert status == REQUEUED
    assert log.count("SLURM does not say") == 3
    assert script.requeued.read_text() == "12345\n"


def test_command_that_has_ended_well_or_is_wrong_or_cancelled_is_not_requeued(tmp_path):
    for command, expected in (("exit 0", 0), ("exit 2", 2)):
        script = TaskScript(tmp_path / command, command)
        assert script.run()[0] == expected
        assert not script.requeued.exists()
    script = TaskScript(tmp_path, "exit 1")
    script.states.write_text("12345 COMPLETING\n")
    assert script.run()[0] == 75
    assert not script.requeued.exists()
