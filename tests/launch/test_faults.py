"""Training on a real SLURM over 2 nodes x 2 processes, through faults, ends with the weights of a run without any."""

import time

import pytest
from helpers.chains import (
    PATIENCE,
    FaultyChain,
    Unbroken,
    assert_same,
    weights,
    write_chain,
    write_demo,
    write_preparation,
)
from helpers.mini_slurm import mini_slurm, reason_to_skip, wait_until

from megatron_palimpsa import cli

pytestmark = pytest.mark.timeout(1800)  # several starts of four ranks, on a machine that may be busy

# Jobs of the partition `low` make way for those of `high`, with time to save.
_PREEMPTION = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


@pytest.fixture(scope="module")
def cluster():
    if reason := reason_to_skip():
        pytest.skip(reason)
    with mini_slurm(nodes=3, extra=_PREEMPTION) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def unbroken(tiny_data, tmp_path_factory):
    """Weights of the tiny stage by the number of ranks."""
    folders = {ranks: tmp_path_factory.mktemp(f"unbroken-{ranks}") for ranks in (2, 4)}
    runs = {ranks: Unbroken(write_chain(folder, tiny_data, 1), ranks) for ranks, folder in folders.items()}
    return lambda ranks: runs[ranks].weights("stage-1")


@pytest.fixture
def submit(cluster, tmp_path, monkeypatch):
    """Make and submit a chain."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))

    def make(recipes, plan, **settings):
        chain = FaultyChain(tmp_path, cluster, recipes, plan, **settings)
        chain.submit()
        return chain

    return make


@pytest.fixture
def start(submit, tmp_path, tiny_data):
    """One tiny stage."""

    def make(plan, train=None, **settings):
        return submit(write_chain(tmp_path, tiny_data, 1, **(train or {})), {"stage-1": plan}, **settings)

    return make


@pytest.fixture
def tell(capsys):
    def show(chain, stage, step, fault):
        with capsys.disabled():
            print(f"\n{fault}: {chain.seconds_lost(stage, step):.1f} s lost", flush=True)

    return show


def test_killed_rank(start, unbroken, tell):
    chain = start({6: ("kill", 1)}, processes=1)
    chain.wait_for("stage-1", "COMPLETED")
    assert "attempt 1 from step 4" in chain.log("stage-1")
    assert_same(weights(chain.run, "stage-1"), unbroken(chain.ranks))
    tell(chain, "stage-1", 6, "kill -9 of a rank")


@pytest.mark.long
def test_the_demo_by_one_submit_through_time_limit_cancel_kill_lost_node_and_requeue(
    submit, tell, cluster, tmp_path, tmp_path_factory
):
    data = tmp_path / "data"
    recipes = write_demo(tmp_path, data)
    first, second, third = (recipe.stem for recipe in recipes)
    plan = {
        first: {4: ("wait", 0)},
        second: {4: ("wait", 0)},
        third: {2: ("kill", 3), 4: ("wait", 1), 6: ("wait", 0)},
    }
    chain = submit([write_preparation(tmp_path, data), *recipes], plan)
    chain.wait_at(first, 4)
    cluster.call("scancel", "--batch", "--signal=USR1", chain.job_id(first))
    wait_until("the stop file", lambda: list((chain.run / first / "logs").glob("*/STOP")), PATIENCE)
    chain.go_on(first, 4)

    chain.wait_at(second, 4)
    assert chain.state(first) == "COMPLETED"
    cluster.call("scancel", chain.job_id(second))
    chain.go_on(second, 4)
    chain.wait_for(second, "CANCELLED")
    chain.wait_for(third, "CANCELLED")
    assert cli.main(["resume", str(chain.run)]) == 0

    chain.wait_at(third, 4)
    node = cluster.call("scontrol", "show", "hostnames", cluster.node_of(chain.job_id(third))).split()[-1]
    cluster.kill_node(node)
    try:
        chain.wait_at(third, 6)
        cluster.call("scontrol", "requeue", chain.job_id(third))
        chain.wait_for(third, "COMPLETED")
    finally:
        cluster.start_node(node)
    faults = {
        (first, 4): "time limit",
        (second, 4): "scancel and resume",
        (third, 2): "kill -9 of a rank before the first checkpoint",
        (third, 4): "lost node",
        (third, 6): "scontrol requeue",
    }
    for (stage, step), fault in faults.items():
        tell(chain, stage, step, fault)
    unbroken = Unbroken(write_demo(tmp_path_factory.mktemp("unbroken"), data), chain.ranks)
    for recipe in recipes:
        assert_same(weights(chain.run, recipe.stem), unbroken.weights(recipe.stem))


@pytest.mark.long
def test_hang_is_ended_by_the_watchdog_with_the_stacks_of_all_ranks(start, unbroken, tell):
    chain = start({6: ("hang", 1)}, train={"watchdog_seconds": 60.0})
    chain.wait_for("stage-1", "COMPLETED")
    logs = chain.rank_logs("stage-1", 0)
    assert all("Timeout (" in log and "in train_step" in log for log in logs)
    assert "in _befall" in logs[1]
    assert not any("in _befall" in log for log in (logs[0], *logs[2:]))
    assert "it hung: the watchdog ended the ranks" in chain.log("stage-1")
    tell(chain, "stage-1", 6, "hang, watchdog after 60 s")
    assert_same(weights(chain.run, "stage-1"), unbroken(chain.ranks))


@pytest.mark.long
def test_preempted_job_saves_in_its_grace_time_and_goes_on(start, cluster, tell):
    chain = start({3: ("wait", 0)}, job={"partition": "low"})
    chain.wait_at("stage-1", 3)
    other = cluster.call(
        "sbatch", "--parsable", "-phigh", "-N3", "--exclusive", "-o/dev/null", "--wrap=sleep 1"
    ).strip()
    wait_until(
        "the preemption", lambda: "PreemptTime=2" in cluster.call("scontrol", "show", "job", chain.job_id("stage-1"))
    )
    time.sleep(35)  # torchrun gives ranks 30 s, where it listens
    chain.go_on("stage-1", 3)
    wait_until("the other job", lambda: cluster.state(other) == "COMPLETED", PATIENCE)
    chain.wait_for("stage-1", "COMPLETED")
    assert "attempt 1 from step 3" in chain.log("stage-1")  # no checkpoint of the interval's
    tell(chain, "stage-1", 3, "preemption")


@pytest.mark.long
def test_bad_node_is_named_excluded_and_replaced(start, cluster, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    # In the name space of that node alone.
    cluster.call("srun", "--nodelist=node2", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(local))
    try:
        chain = start({}, job={"preflight": {"local_folder_gb": 0.1}, "local_folder": str(local)})
        chain.wait_for("stage-1", "COMPLETED")
    finally:
        cluster.call("srun", "--nodelist=node2", "umount", str(local))
    log = chain.log("stage-1")
    assert "pre-flight: node2: 0.001 GB free under" in log
    assert "requeued without node2" in log
    assert "attempt 1 from step 0: node1 node3" in log
    assert "pre-flight: all well" in log
    assert not list(local.iterdir())
