"""`status`, `logs`, `cancel`, `resume` and `save-now` over a submitted chain; SLURM's clients are stand-ins."""

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
import yaml
from helpers.fake_slurm import FakeSlurm
from helpers.runs import write_stage
from palimpsa_launch import follow

from megatron_palimpsa import cli
from megatron_palimpsa.config import load_stage
from megatron_palimpsa.training.checkpoint_state import FORMAT_VERSION, fingerprint
from megatron_palimpsa.training.run_folder import RunFolder

JOB = ("--time", "60", "--gpus-per-node", "0", "--processes-per-node", "2")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    return fake


@pytest.fixture
def run(tmp_path, tiny_data, slurm, monkeypatch, capsys):
    """A chain of three stages, submitted as jobs 101 to 103; -> its folder."""
    monkeypatch.chdir(tmp_path)
    recipes = [write_stage(tmp_path, tiny_data, "first", output_dir="runs/mine")]
    for before, name in (("first", "second"), ("second", "third")):
        recipes.append(write_stage(tmp_path, tiny_data, name, output_dir="runs/mine", init_from={"stage": before}))
    assert cli.main(["submit", *map(str, recipes), *JOB]) == 0
    for recipe in recipes:
        recipe.unlink()  # what goes on with the run needs its folder alone
    capsys.readouterr()
    return tmp_path / "runs" / "mine"


def complete(run, name):
    folder = RunFolder(run / name)
    (folder.checkpoints / "step-8").mkdir(parents=True)
    config = load_stage(run / name / "job" / "stage.yaml")
    folder.write_config(config)
    folder.write_marker({"steps": 8, "tokens": 512, "seconds": 3.0, "checkpoint": "checkpoints/step-8"})
    state = {"format_version": FORMAT_VERSION, "model": fingerprint(config.model)}
    (folder.checkpoints / "step-8" / "state.json").write_text(json.dumps(state))


def record(run, name, step):
    line = {"kind": "train", "step": step, "loss": 2.5, "tokens_per_second": 64.0}
    (run / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def attempt(run, name, folder, logs, codes=()):
    path = run / name / "logs" / folder
    path.mkdir(parents=True)
    for rank, text in enumerate(logs):
        (path / f"rank-{rank}.log").write_text(text)
    for rank, code in enumerate(codes):
        (path / f"rank-{rank}.exit").write_text(f"{code}\n")
    return path


def command(capsys, *arguments) -> tuple[int, str]:
    code = cli.main(list(arguments))
    return code, capsys.readouterr().out


def rows(text) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_status_of_a_run_in_the_middle(run, slurm, capsys):
    complete(run, "first")
    record(run, "second", 5)
    slurm.queue("102|RUNNING|None|node[1-2]", "103|PENDING|Dependency|")
    code, out = command(capsys, "status", "mine")
    assert code == 75
    found = rows(out)
    assert found["first"][:2] == ["complete", "-"]
    # 3 steps of 64 tokens at 64 tokens/s.
    assert found["second"] == ["running", "102", "on", "node[1-2]", "5/8", "2.5000", "64", "0:00:03"]
    assert found["third"][:3] == ["waiting", "103", "0/8"]
    assert "third: SLURM says Dependency on second" in out


def test_status_says_why_a_stage_failed_and_what_fell_with_it(run, slurm, capsys):
    complete(run, "first")
    log = run / "second" / "logs" / "job-102.log"
    log.write_text(
        "2026-01-01 10:00:00 launch: attempt 0\nsrun: noise\n2026-01-01 10:00:01 launch: not requeued: exit code 3\n"
    )
    attempt(run, "second", "102-restart-0", ["fine\n", "step 5\nERROR: 10 steps in a row were skipped\n"], [75, 3])
    slurm.account("102|FAILED", "103|CANCELLED by 0")
    code, out = command(capsys, "status", str(run))
    assert code == 1
    assert rows(out)["second"][0] == "failed"
    assert "second: SLURM says FAILED; not requeued: exit code 3; rank 1: ERROR: 10 steps in a row" in out
    assert "third: never started, because second failed" in out


def test_status_says_nothing_of_jobs_submitted_before(run, slurm, capsys):
    complete(run, "first")
    attempt(run, "second", "99-restart-0", ["Error: of yesterday\n"], [1])
    slurm.queue("102|PENDING|Resources|", "103|PENDING|Dependency|")
    assert "second: SLURM says Resources" in command(capsys, "status", str(run))[1]
    slurm.queue()
    slurm.account("102|CANCELLED by 0", "103|CANCELLED by 0")
    out = command(capsys, "status", str(run))[1]
    assert "second: SLURM says CANCELLED; megatron-palimpsa resume goes on" in out


def test_status_of_complete_and_of_unknown_runs(run, capsys):
    for name in ("first", "second", "third"):
        complete(run, name)
    assert command(capsys, "status", "mine")[0] == 0
    assert cli.main(["status", "yours"]) == 2
    assert "no run has that name or folder; runs/ holds mine" in capsys.readouterr().err


def test_cancel_saves_what_trains_and_drops_what_waits(run, slurm, capsys):
    slurm.queue("101|RUNNING|None|node1", "102|PENDING|Dependency|", "103|PENDING|Dependency|")
    before = len(slurm.calls())
    code, out = command(capsys, "cancel", "mine")
    assert code == 0
    assert slurm.calls()[before:] == ["scancel --batch --signal=TERM 101", "scancel 103 102"]
    assert "first: job 101 saves and stops" in out
    command(capsys, "cancel", "mine", "--now")
    assert slurm.calls()[-1] == "scancel 103 102 101"
    slurm.queue()
    assert cli.main(["cancel", "mine"]) == 2
    assert "nothing to cancel" in capsys.readouterr().err


def test_resume_submits_what_is_left_with_what_was_recorded(run, slurm, capsys):
    complete(run, "first")
    slurm.queue("102|RUNNING|None|node1")
    assert cli.main(["resume", "mine"]) == 2
    assert "second has job 102 (RUNNING)" in capsys.readouterr().err
    slurm.queue("102|FAILED|None|node1")
    code, out = command(capsys, "resume", "mine", "--time", "90")
    assert code == 0
    assert "first: complete already" in out
    assert "second: job 104" in out
    assert slurm.calls()[-2:] == [
        "--parsable --dependency=singleton",
        "--parsable --dependency=afterok:104,singleton --kill-on-invalid-dep=yes",
    ]
    job = yaml.safe_load((run / "third" / "job" / "job.yaml").read_text())
    assert (job["time"], job["processes_per_node"]) == ("90", 2)
    assert json.loads((run / "third" / "job" / "submission.json").read_text())["job_id"] == "105"


def test_save_now_asks_the_stage_that_trains(run, slurm, capsys):
    assert cli.main(["save-now", "mine"]) == 2
    assert "no stage of the run is training" in capsys.readouterr().err
    slurm.queue("101|RUNNING|None|node1")
    assert command(capsys, "save-now", "mine")[0] == 0
    assert RunFolder(run / "first").save_now.exists()
    slurm.queue()
    with (run / "second" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as training on this machine holds it
        assert command(capsys, "save-now", "mine")[0] == 0
    assert RunFolder(run / "second").save_now.exists()


def test_logs_show_the_newest_attempt_and_the_rank_that_failed(run, capsys):
    assert cli.main(["logs", "mine"]) == 2
    assert "has logged nothing yet" in capsys.readouterr().err
    attempt(run, "first", "101-restart-0", ["old\n"])
    newest = attempt(run, "first", "101-restart-1", ["a\nb\nc\n", "broken\n"])
    assert (
        command(capsys, "logs", "mine", "-n", "2")[1]
        == f"==> runs/mine/first/logs/{newest.name}/rank-0.log <==\nb\nc\n"
    )
    (newest / "rank-1.exit").write_text("1\n")
    assert command(capsys, "logs", "mine")[1].endswith("rank-1.log <==\nbroken\n")
    assert command(capsys, "logs", "mine", "--rank", "0")[1].endswith("a\nb\nc\n")
    (run / "first" / "logs" / "job-101.log").write_text("from the script\n")
    assert command(capsys, "logs", "mine", "--job")[1].endswith("from the script\n")
    assert cli.main(["logs", "mine", "--stage", "fourth"]) == 2
    assert "the run has first, second, third" in capsys.readouterr().err


def test_a_run_is_worked_on_from_another_folder(run, slurm, capsys, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out = command(capsys, "resume", str(run))
    assert code == 0
    assert str(run / "third" / "logs") in out
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert f"working_folder={tmp_path}\n" in (run / "first" / "job" / "job.sh").read_text()
    slurm.queue("104|RUNNING|None|node1")
    assert command(capsys, "save-now", "../runs/mine")[0] == 0
    assert RunFolder(run / "first").save_now.exists()
    assert rows(command(capsys, "status", str(run))[1])["first"][0] == "running"
    assert command(capsys, "cancel", "../runs/mine")[0] == 0
    assert Path.cwd() == tmp_path / "elsewhere"


def test_resume_of_a_run_that_is_not_where_its_paths_lead_is_refused(run, slurm, capsys, tmp_path, monkeypatch):
    before = slurm.calls()
    moved = tmp_path / "moved"
    run.rename(moved)
    assert cli.main(["resume", str(moved)]) == 2
    assert f"trains into runs/mine/first, which is {run / 'first'} seen from {tmp_path}" in capsys.readouterr().err
    moved.rename(run)
    for name in ("first", "second", "third"):
        path = run / name / "job" / "submission.json"
        path.write_text(path.read_text().replace(f'"{tmp_path}"', f'"{tmp_path}/gone"'))
    assert cli.main(["resume", "mine"]) == 2
    assert f"was submitted from {tmp_path}/gone: that folder is gone" in capsys.readouterr().err
    for name in ("first", "second", "third"):  # as records were before they had a working folder
        path = run / name / "job" / "submission.json"
        path.write_text(path.read_text().replace(f'"{tmp_path}/gone"', "null"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["resume", str(run)]) == 2
    assert "call it from the folder that it was submitted from" in capsys.readouterr().err
    assert slurm.calls() == before


@pytest.mark.parametrize("change", [{"jobs": {}}, {"main": ["train"]}, {"submitted": 5}, {"working_folder": 5}])
def test_submission_that_cannot_be_read_is_one_message(run, capsys, change):
    path = run / "first" / "job" / "submission.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert cli.main(["status", "mine"]) == 2
    assert "submission.json cannot be read" in capsys.readouterr().err


VICTIM = (
    "megatron-palimpsa: error: rank {} cannot reach the others: [gloo/transport/tcp/pair.cc:547] Connection closed\n"
    "If one of them ended first, what it printed says why. Checkpoints stay; the same command goes on from the newest\n"
)


@pytest.mark.parametrize(
    ("codes", "culprit", "expected"),
    [
        ({0: 1, 1: 1, 2: 1}, "Traceback\nValueError: bad tensor\n", "rank 1: ValueError: bad tensor"),
        ({0: 1, 2: 1}, "step 5\n", "rank 1 was killed or crashed; its log ends: step 5"),
        # torchrun killed those that still waited for the one that failed.
        ({1: 1}, "OSError: disk full\n", "rank 1: OSError: disk full"),
        ({0: 1, 1: 1, 2: 1}, VICTIM.format(1), "rank 0: megatron-palimpsa: error: rank 0 cannot reach the others"),
    ],
)
def test_status_and_logs_name_the_rank_that_ended_first(run, slurm, capsys, codes, culprit, expected):
    logs = [VICTIM.format(0) if 0 in codes else "step 4\n", culprit, VICTIM.format(2) if 2 in codes else "step 4\n"]
    folder = attempt(run, "first", "101-restart-0", logs)
    for rank, code in codes.items():
        (folder / f"rank-{rank}.exit").write_text(f"{code}\n")
    slurm.account("101|FAILED", "102|CANCELLED by 0", "103|CANCELLED by 0")
    assert expected in command(capsys, "status", "mine")[1]
    assert f"rank-{expected.split()[1].rstrip(':')}.log <==" in command(capsys, "logs", "mine")[1]


def test_status_of_steps_that_have_no_resolved_configuration_of_their_own_yet(run, slurm, capsys):
    for name in ("first", "second", "third"):
        (run / name / "job" / "submission.json").unlink()  # as `train` without SLURM leaves them as it starts
    assert command(capsys, "status", "mine")[0] == 75


def test_follow_goes_on_with_later_attempts_and_stages_to_the_end(run, slurm, monkeypatch):
    monkeypatch.setattr(follow, "_LOOK_AT_FILES", 0.02)
    monkeypatch.setattr(follow, "_ASK_SLURM", 0.1)
    slurm.queue("101|RUNNING|None|node1", "102|PENDING|Dependency|", "103|PENDING|Dependency|")
    first = attempt(run, "first", "101-restart-0", ["one\ntwo\n"])
    seen: list[str] = []

    def wait_for(text):
        for _ in range(500):
            if text in "".join(seen):
                return
            threading.Event().wait(0.02)
        raise AssertionError(f"{text!r} is not in {''.join(seen)!r}")

    thread = threading.Thread(target=follow.follow, args=(Path("runs/mine"), None, None, False, 1, seen.append))
    thread.start()
    wait_for("two\n")
    with (first / "rank-0.log").open("a") as file:
        file.write("three\n")
    wait_for("three\n")
    attempt(run, "first", "101-restart-1", ["four\n"])
    wait_for("four\n")
    complete(run, "first")
    slurm.queue("102|RUNNING|None|node1", "103|PENDING|Dependency|")
    attempt(run, "second", "102-restart-0", ["five\n"])
    wait_for("five\n")
    slurm.queue("102|FAILED|None|node1")
    wait_for("second is failed")
    thread.join(10)
    assert not thread.is_alive()
    text = "".join(seen)
    assert "one" not in text
    assert [text.count(word) for word in ("two", "three", "four", "five")] == [1] * 4
