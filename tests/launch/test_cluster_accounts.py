"""Accounts and QOS on a real SLURM that keeps them."""

import pytest
from helpers.mini_accounts import AccountedSlurm, reason_to_skip_accounts
from helpers.mini_slurm import mini_slurm, wait_until
from helpers.standin_chain import StandInChain
from palimpsa_launch import slurm as clients

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster():
    if reason := reason_to_skip_accounts():
        pytest.skip(reason)
    with mini_slurm(kind=AccountedSlurm) as slurm:
        yield slurm


@pytest.fixture
def chain(cluster, tmp_path, tiny_data, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return StandInChain(tmp_path, tiny_data, cluster)


@pytest.mark.parametrize(
    "options",
    [("--account", "gone"), ("--account", "closed"), ("--qos", "gone"), ("--account", "physics", "--qos", "slow")],
)
def test_account_or_qos_that_may_not_be_used_is_one_message(chain, capsys, options):
    assert chain.submit(*options) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "sbatch refuses the job: " in message
    assert "nvalid" in message
    assert not chain.runs.exists()


def test_job_runs_under_account_and_qos_and_its_end_is_known_from_the_accounts(chain, cluster):
    chain.behave("ends 3")
    assert chain.submit("--account", "physics", "--qos", "fast") == 0
    first = chain.job_id("first")
    chain.wait_for("first", "FAILED")
    asked = ("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={first}", "--format=Account,QOS")
    wait_until("the accounts", lambda: cluster.call(*asked) == "physics|fast\n")
    wait_until("the end", lambda: clients.ended_states([first]) == {first: "FAILED"})
