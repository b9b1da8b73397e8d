"""What a stage's batch script does with each way in which its ranks can end; SLURM and training are stand-ins."""

import os
import re
import signal
import time

import pytest
from helpers.slurm_script import StageScript

REQUEUED = -signal.SIGTERM  # as SLURM ends the shell of a job that is requeued


def test_complete_stage_ends_with_0(tmp_path):
    script = StageScript(tmp_path, "reach 8; complete")
    status, output = script.run()
    assert status == 0
    assert "the stage is complete" in output
    assert not script.requeued.exists()
    # Nothing is started for one that was complete before.
    (script.folder / "behaviour").write_text("ends 1")
    assert script.run(job=2)[0] == 0
    assert not script.logs(job=2).exists()


def test_torchrun_gets_nodes_head_and_a_port_below_those_of_clients(tmp_path):
    script = StageScript(tmp_path, "complete", processes_per_node=4)
    script.run(job=987654)
    arguments = (script.logs(job=987654) / "arguments").read_text()
    assert arguments.startswith("-m torch.distributed.run --")
    options = dict(re.findall(r"--([\w-]+)=(\S+)", arguments))
    assert options["nnodes"] == "2"
    assert options["node-rank"] == "0"
    assert options["nproc-per-node"] == "4"
    assert options["master-addr"] == "node1"
    assert 1024 < int(options["master-port"]) < 32768
    assert options["max-restarts"] == "0"


def test_saved_and_stopped_is_requeued_and_goes_on(tmp_path):
    script = StageScript(tmp_path, "if ((SLURM_RESTART_COUNT)); then complete; fi; reach 4; ends 75 75")
    status, output = script.run()
    assert status == REQUEUED
    assert "stopped at step 4" in output
    assert script.requeued.read_text() == "12345\n"
    assert script.run(attempt=1)[0] == 0
    assert script.logs(attempt=0).is_dir()
    assert script.logs(attempt=1).is_dir()


@pytest.mark.parametrize(("codes", "expected"), [("3 3", 3), ("2", 2), ("75 3", 3), ("2 75", 2)])
def test_numerical_stop_and_wrong_input_are_not_requeued(tmp_path, codes, expected):
    script = StageScript(tmp_path, f"reach 4; ends {codes}")
    status, output = script.run()
    assert status == expected
    assert "not requeued" in output
    assert not script.requeued.exists()


def test_crash_is_requeued_only_after_progress(tmp_path):
    script = StageScript(tmp_path, "kill -9 $$")
    status, output = script.run()
    assert status == 1
    assert "no step was gained since step 0" in output
    assert not script.requeued.exists()
    (script.folder / "behaviour").write_text("reach 10; kill -9 $$")
    assert script.run()[0] == REQUEUED
    status, output = script.run(attempt=1)
    assert status == 1
    assert "no step was gained since step 10" in output


def test_a_success_without_the_marker_is_none(tmp_path):
    assert StageScript(tmp_path, "exit 0").run()[0] == 1


def test_requeues_are_capped(tmp_path):
    script = StageScript(tmp_path, "reach $((SLURM_RESTART_COUNT + 1)); ends 75", max_requeues=2)
    assert script.run(attempt=1)[0] == REQUEUED
    status, output = script.run(attempt=2)
    assert status == 1
    assert "max_requeues" in output
    assert script.requeued.read_text().splitlines() == ["12345"]
    # SLURM requeues by itself too, after a lost node.
    status, output = script.run(attempt=3)
    assert status == 1
    assert "giving up" in output
    assert not script.logs(attempt=3).exists()


def test_attempts_that_slurm_ended_without_progress_are_counted(tmp_path):
    script = StageScript(tmp_path, 'reach 5; touch "$logs/reached"; exec sleep 60')
    for attempt in range(4):  # the first begins at step 0, the others at step 5
        with script.start(attempt) as process:
            _wait_for(script.logs(attempt) / "reached")
            os.killpg(process.pid, signal.SIGKILL)
    (script.folder / "behaviour").write_text("reach 6; complete")
    status, output = script.run(attempt=4)
    assert status == 1
    assert "three attempts began at step 5" in output
    assert script.run(job=2)[0] == 0


def test_signal_before_the_limit_makes_the_stop_file_and_requeues(tmp_path):
    script = StageScript(tmp_path, "until_told; reach 7; ends 75")
    with script.start() as process:
        _wait_for(script.logs() / "arguments")
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == REQUEUED
    assert "the time limit is near" in output
    assert (script.logs() / "STOP").exists()
    # The next attempt is not told to stop by the last one's file.
    (script.folder / "behaviour").write_text("[[ ! -e $PALIMPSA_STOP_FILE ]] && complete")
    assert script.run(attempt=1)[0] == 0


def test_cancelled_job_saves_and_is_not_requeued(tmp_path):
    script = StageScript(tmp_path, "until_told; reach 7; ends 75")
    with script.start() as process:
        _wait_for(script.logs() / "arguments")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 75
    assert not script.requeued.exists()


def test_requeue_that_slurm_refuses_is_a_failure(tmp_path):
    script = StageScript(tmp_path, "reach 4; ends 75")
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(scontrol.read_text().replace('kill -TERM "$PPID"', "exit 1"))
    assert script.run()[0] not in (0, REQUEUED)


def test_nodes_that_scontrol_does_not_name_are_refused(tmp_path):
    script = StageScript(tmp_path, "complete")
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(scontrol.read_text().replace("node1 node2", "node1"))
    status, output = script.run()
    assert status == 1
    assert "names 1 of the job's 2 nodes" in output


def _wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
