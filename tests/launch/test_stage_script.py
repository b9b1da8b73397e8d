"""What a stage's batch script does with each way in which its ranks can end; SLURM and training are stand-ins."""

import contextlib
import json
import os
import shutil
import signal
import socket
import time

import pytest
from helpers.slurm_script import StageScript, write_program

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


def test_every_node_gets_the_list_with_the_head_first_and_two_ports_below_those_of_clients(tmp_path):
    script = StageScript(tmp_path, "complete", processes_per_node=4, gpus_per_node=2)
    script.run(job=987654)
    options = node_options(script, job=987654)
    assert options["nodes"] == "node1 node2"
    assert options["processes"] == "4"
    assert options["gpus"] == "2"
    assert options["stage-folder"] == str(script.folder)
    assert json.loads(options["preflight"])["seconds"] == 180
    ports = {int(options["port"]), int(options["check-port"])}
    assert len(ports) == 2
    assert all(20000 <= port < 32000 for port in ports)


def test_ports_in_use_are_left_out_and_those_of_other_jobs_are_others(tmp_path):
    script = StageScript(tmp_path, "complete")
    first = ports(script, job=1000)
    others = [ports(script, job=job) for job in range(995, 1006) if job != 1000]
    assert not any(first & other for other in others)
    with contextlib.ExitStack() as stack:
        # Bound but not listening, on one address only, IPv6: each is one that cannot be had.
        for port, family, address in zip(
            sorted(first), (socket.AF_INET, socket.AF_INET6), ("127.0.1.1", "::1"), strict=True
        ):
            taken = stack.enter_context(socket.socket(family))
            taken.bind((address, port))
            taken.listen()
        again = ports(script, job=1000)
    assert not first & again
    assert len(again) == 2


def ports(script: StageScript, job: int) -> set[int]:
    (script.folder / "STAGE_COMPLETE").unlink(missing_ok=True)
    assert script.run(job=job)[0] == 0
    options = node_options(script, job)
    return {int(options["port"]), int(options["check-port"])}


def node_options(script: StageScript, job: int = 12345) -> dict[str, str]:
    lines = (script.logs(job=job) / "arguments").read_text().splitlines()
    assert lines[:2] == ["-m", "palimpsa_launch.node"]
    assert lines[-3:] == ["--", "train", str(script.folder / "job" / "stage.yaml")]
    return dict(line.removeprefix("--").split("=", 1) for line in lines[2:-3])


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


def test_crash_is_requeued_unless_three_attempts_got_no_further(tmp_path):
    script = StageScript(tmp_path, "kill -9 $$")
    for attempt in range(2):
        assert script.run(attempt)[0] == REQUEUED
    status, output = script.run(attempt=2)
    assert status == 1
    assert "no step was gained since step 0 in three attempts" in output
    assert len(script.requeued.read_text().splitlines()) == 2
    # A step gained gives three more.
    (script.folder / "behaviour").write_text("reach 10; kill -9 $$")
    assert script.run(job=2)[0] == REQUEUED
    assert [script.run(attempt, job=2)[0] for attempt in (1, 2, 3)] == [REQUEUED, REQUEUED, 1]


def test_a_success_without_the_marker_is_none(tmp_path):
    assert StageScript(tmp_path, "exit 0").run()[0] == REQUEUED


def test_bad_nodes_are_left_out_of_the_next_attempts_up_to_a_cap(tmp_path):
    behaviour = """
        echo "node$((10 + SLURM_RESTART_COUNT))" >"$logs/bad-nodes"
        exit 1
    """
    script = StageScript(tmp_path, behaviour, exclude="node[7-8]", preflight={"max_excluded": 4})
    for attempt in range(4):
        status, output = script.run(attempt)
        assert status == 75
        assert f"requeued without node{10 + attempt}" in output
    assert script.requeued.read_text().splitlines()[::2] == ["12345"] * 4
    assert script.requeued.read_text().splitlines()[1::2] == [
        f"JobId=12345 ExcNodeList=node[7-8],{','.join(f'node{10 + number}' for number in range(count))}"
        for count in range(1, 5)
    ]
    status, output = script.run(attempt=4)
    assert status == 1
    assert "more than 4 nodes were bad" in output
    # Attempts that a bad node has ended say nothing of the stage.
    (script.folder / "behaviour").write_text("complete")
    assert script.run(attempt=5)[0] == 0


def test_list_of_bad_nodes_is_offered_again_where_slurm_is_not_ready_for_it(tmp_path):
    script = StageScript(tmp_path, 'echo node2 >"$logs/bad-nodes"; exit 1')
    scontrol = tmp_path / "bin" / "scontrol"
    once = f"update) if mkdir {tmp_path}/refused 2>/dev/null; then exit 1; fi;"
    scontrol.write_text(scontrol.read_text().replace("update)", once))
    status, output = script.run()
    assert status == 75
    assert "try 1" in output
    assert script.requeued.read_text().splitlines() == ["12345", "JobId=12345 ExcNodeList=node2"]


def test_container_runs_the_interpreter_with_every_word_as_it_is(tmp_path):
    container = {"engine": "apptainer", "image": "/an image's $HOME.sif", "mounts": ["/a b:/c"]}
    script = StageScript(tmp_path, "complete", container=container, gpus_per_node=1, local_folder="/local disk")
    program = f"""#!/usr/bin/env bash
        printf '%s\\n' "$@" >{tmp_path}/words
        while [[ $1 != /an* ]]; do shift; done
        shift
        exec "$@"
    """
    write_program(tmp_path / "bin" / "apptainer", program)
    assert script.run()[0] == 0
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:8] == [
        "exec",
        "--nv",
        f"--bind={script.folder}",
        f"--bind={tmp_path}",
        "--bind=/local disk",
        "--bind=/a b:/c",
        f"--pwd={tmp_path}",
        "/an image's $HOME.sif",
    ]
    assert node_options(script)["local-folder"] == "/local disk"


def test_two_jobs_do_not_train_into_one_folder(tmp_path):
    script = StageScript(tmp_path, "reach 4; ends 75")
    script.run(job=1)
    script.states.write_text("1 RUNNING\n")
    status, output = script.run(job=2)
    assert status == 2
    assert "job 1 trains into" in output
    assert not script.logs(job=2).exists()
    assert script.run(attempt=1, job=1)[0] == REQUEUED
    # A job that is gone holds nothing.
    script.states.write_text("1 FAILED\n")
    assert script.run(job=2)[0] == REQUEUED


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
        output, _ = process.communicate(timeout=240)
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
        process.communicate(timeout=240)
    assert process.returncode == 75
    assert not script.requeued.exists()


def test_job_that_slurm_has_ended_already_is_not_requeued(tmp_path):
    """The ranks of a cancelled job may end before its script is told."""
    script = StageScript(tmp_path, "reach 7; ends 75")
    script.states.write_text("12345 COMPLETING\n")
    assert script.run()[0] == 75
    assert not script.requeued.exists()


@pytest.mark.parametrize("signals", [[], [signal.SIGUSR1], [signal.SIGTERM]], ids=str)
def test_clean_up_that_slurm_never_starts_changes_nothing(tmp_path, signals):
    """A part that is lost without SLURM's knowledge holds its node."""
    script = StageScript(tmp_path, "reach 4; kill -9 $$")
    srun = tmp_path / "bin" / "srun"
    never = f"""#!/usr/bin/env bash
        if [[ $* == *palimpsa_launch.node_folder* ]]; then
            echo "$*" >{tmp_path}/waits
            exec sleep 1000
        fi
    """
    srun.write_text(never + srun.read_text())
    if not signals:
        minute = f'#!/usr/bin/env bash\n[[ $2 == 60 ]] && exec {shutil.which("timeout")} "$1" 2 "${{@:3}}"'
        write_program(tmp_path / "bin" / "timeout", minute)
    with script.start() as process:
        _wait_for(tmp_path / "waits")
        for number in signals:
            process.send_signal(number)
        output, _ = process.communicate(timeout=240)
    assert "stopped at step 4; srun ended with 137" in output
    if signals == [signal.SIGTERM]:
        assert process.returncode == 75
        assert "not requeued from here: it was told to end" in output
    else:
        assert process.returncode == REQUEUED
        assert script.requeued.read_text() == "12345\n"
    assert "--overlap" in (tmp_path / "waits").read_text()


def test_attempt_that_ends_while_slurm_is_away_is_requeued_once_it_is_back(tmp_path):
    script = StageScript(tmp_path, "reach 4; ends 75")
    script.away.write_text("3")
    status, output = script.run()
    assert status == REQUEUED
    assert output.count("SLURM does not say what job 12345 is") == 3
    assert "Unable to contact slurm controller" in output
    assert script.requeued.read_text() == "12345\n"


@pytest.mark.parametrize("bad_node", [False, True])
def test_requeue_is_asked_for_again_where_slurm_is_away(tmp_path, bad_node):
    script = StageScript(tmp_path, f"{'echo node2 >"$logs/bad-nodes";' if bad_node else ''} reach 4; ends 75")
    squeue = tmp_path / "bin" / "squeue"
    # It goes after it has said that the job runs.
    goes = f"&& {{ mkdir {tmp_path}/once 2>/dev/null && echo 4 >$AWAY; exit 0; }}"
    squeue.write_text(squeue.read_text().replace("&& exit", goes))
    status, output = script.run()
    assert status == (75 if bad_node else REQUEUED)
    assert output.count("SLURM has not taken the requeue") == 1
    assert output.count("SLURM does not say what job 12345 is") == 3
    assert script.requeued.read_text().splitlines() == ["12345", *["JobId=12345 ExcNodeList=node2"] * bad_node]


def test_job_that_was_cancelled_while_slurm_was_away_does_not_come_back(tmp_path):
    script = StageScript(tmp_path, f"echo '12345 COMPLETING' >'{tmp_path}/states'; reach 4; ends 75")
    script.away.write_text("3")
    status, output = script.run()
    assert status == 75
    assert "the job is COMPLETING" in output
    assert not script.requeued.exists()


def test_slurm_that_stays_away_is_said(tmp_path):
    script = StageScript(tmp_path, "reach 4; ends 75")
    script.away.write_text("1000")
    status, output = script.run()
    assert status == 75
    assert "SLURM has not answered for minutes" in output


def test_holder_of_whom_slurm_says_nothing_is_not_taken_for_gone(tmp_path):
    script = StageScript(tmp_path, "reach 4; ends 75")
    script.run(job=1)
    script.states.write_text("1 RUNNING\n")
    script.away.write_text("2")
    assert script.run(job=2)[0] == 2
    script.away.write_text("1000")
    status, output = script.run(job=2)
    assert status == 75
    assert "refused: SLURM has not answered for minutes whether job 1 still trains" in output
    assert (script.folder / "job" / "holder").read_text() == "1\n"
    # Forgotten, which it says in an error too.
    script.away.unlink()
    script.states.unlink()
    assert script.run(job=2)[0] == REQUEUED


def test_hang_is_said(tmp_path):
    script = StageScript(tmp_path, 'reach 4; echo "Timeout (0:00:09)!" >"$logs/rank-3.log"; exit 1')
    status, output = script.run()
    assert status == REQUEUED
    assert "it hung" in output


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
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
