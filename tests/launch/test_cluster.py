"""Chains of stages on a real SLURM with virtual nodes, through what happens to jobs there."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from helpers.mini_slurm import mini_slurm, reason_to_skip, wait_until
from helpers.standin_chain import StandInChain


@pytest.fixture(scope="module")
def cluster():
    if reason := reason_to_skip():
        pytest.skip(reason)
    with mini_slurm() as slurm:
        yield slurm


@pytest.fixture
def chain(cluster, tmp_path, tiny_data, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return StandInChain(tmp_path, tiny_data, cluster)


def test_second_stage_follows_a_first_that_took_two_attempts(chain):
    chain.behave("if ((SLURM_RESTART_COUNT)); then complete; fi; until_told; reach 4; ends 75")
    assert chain.submit() == 0
    chain.wait_for_attempt("first", 0)
    chain.cluster.call("scancel", "--batch", "--signal=USR1", chain.job_id("first"))
    chain.wait_for("second", "COMPLETED")
    assert "requeued (time limit near: true)" in chain.log("first")
    assert "attempt 1 from step 4" in chain.log("first")
    assert chain.cluster.state(chain.job_id("first")) == "COMPLETED"


def test_failed_stage_cancels_the_next_and_can_be_submitted_again(chain, capsys):
    chain.behave("reach 3; ends 3")
    assert chain.submit() == 0
    chain.wait_for("first", "FAILED")
    chain.wait_for("second", "CANCELLED")
    chain.behave("complete")
    assert chain.submit() == 0
    chain.wait_for("second", "COMPLETED")
    capsys.readouterr()
    assert chain.submit() == 0
    assert "first: complete already" in capsys.readouterr().out


def test_cancelled_stage_saves_stays_away_and_goes_on_when_submitted_again(chain):
    chain.behave("until_told; reach 4; ends 75")
    assert chain.submit() == 0
    chain.wait_for_attempt("first", 0)
    assert chain.submit() == 2  # it has a job
    chain.cluster.call("scancel", chain.job_id("first"))
    chain.wait_for("first", "CANCELLED")
    chain.wait_for("second", "CANCELLED")
    wait_until("the checkpoint", (chain.runs / "first" / "checkpoints" / "latest").exists)
    chain.behave("[[ -d $stage/checkpoints ]] && complete")
    assert chain.submit() == 0
    chain.wait_for("second", "COMPLETED")


@pytest.mark.long
def test_requeue_by_hand_and_a_lost_node(chain):
    chain.behave("((SLURM_RESTART_COUNT == 2)) && complete; reach $((SLURM_RESTART_COUNT + 1)); sleep 100")
    assert chain.submit() == 0
    chain.wait_for_attempt("first", 0)
    chain.cluster.call("scontrol", "requeue", chain.job_id("first"))
    chain.wait_for_attempt("first", 1)
    node = chain.cluster.node_of(chain.job_id("first"))
    chain.cluster.kill_node(node)
    try:
        chain.wait_for("second", "COMPLETED")
    finally:
        chain.cluster.start_node(node)
    assert "attempt 2 from step 2" in chain.log("first")


@pytest.mark.long
def test_part_that_is_lost_without_slurm_s_knowledge_costs_one_attempt(chain):
    """Its slurmstepd is killed with its ranks, as by the kernel where memory is short: SLURM goes on to count it."""
    chain.behave("((SLURM_RESTART_COUNT)) && complete; reach 4; until_told; exit 1")
    assert chain.submit("--nodes", "2", "train.global_batch_tokens=256", "optimizer.warmup_steps=0") == 0
    chain.wait_for_attempt("first", 0)
    job = chain.job_id("first")
    (batch,) = steps_of(job, "batch")
    parts = wait_until("both nodes' parts", lambda: len(found := steps_of(job, "0")) == 2 and found)
    (lost,) = (part for part in parts if host(part) != host(batch))  # the script goes on
    ranks = [int(child) for child in (lost / "task" / lost.name / "children").read_text().split()]
    for process in [int(lost.name), *ranks]:
        os.kill(process, signal.SIGKILL)
    (chain.runs / "first" / "logs" / f"{job}-restart-0" / "STOP").touch()  # the others notice
    chain.wait_for("second", "COMPLETED")
    assert "attempt 1 from step 4" in chain.log("first")


def steps_of(job: str, step: str) -> list[Path]:
    """The slurmstepd of one step on each node, in /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes().startswith(f"slurmstepd: [{job}.{step}]".encode()):
                found.append(path)
    return found


def host(process: Path) -> Path:
    return (process / "ns" / "uts").readlink()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--partition", "gone"), "invalid partition specified: gone"),
        (("--partition", "short", "--time", "60"), "time limit"),
        (
            ("--nodes", "64", "train.global_batch_tokens=2048", "train.tokens=1M"),
            "More processors requested than permitted",
        ),
        (("--gpus-per-node", "8", "--processes-per-node", "1"), "Invalid generic resource"),
    ],
)
def test_what_slurm_refuses_is_one_message(chain, capsys, options, expected):
    assert chain.submit(*options) == 2
    assert expected in capsys.readouterr().err
    assert not chain.runs.exists()
