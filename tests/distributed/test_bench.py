"""`bench` on two ranks: one process group, split anew for each case."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.runs import run, write_stage
from helpers.stages import tiny_stage
from torch.distributed import distributed_c10d

from megatron_palimpsa import parallel
from megatron_palimpsa.bench.measure import Measurement, Plan, measure
from megatron_palimpsa.config import StageConfig

TRAIN = {"global_batch_tokens": 128, "tokens": 12800}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "distributed_optimizer": False},
    *({"engine": "deepspeed", "deepspeed": {"zero_stage": stage}} for stage in (0, 1, 2, 3)),
]


def measure_all(configs: list[StageConfig]) -> list[Measurement]:
    measured = []
    for config in configs:
        before = bytes_of_tensors()
        measured.append(measure(config, Plan(1, 1)))
        # Over NCCL every group holds memory: none may be left for the next case, and nothing of the model.
        assert set(distributed_c10d._world.pg_map) == {dist.group.WORLD}
        assert bytes_of_tensors() - before < 4 * measured[-1].parameters
    return measured


def bytes_of_tensors() -> int:
    """Of all storages that Python still knows a tensor of."""
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_every_layout_trains_on_the_same_tokens(two_processes):
    configs = [tiny_stage(2, train=TRAIN, model={"pattern": "MP"}, parallel=layout) for layout in LAYOUTS]
    first, second = two_processes.run(measure_all, configs)
    alone = measure(tiny_stage(train=TRAIN, model={"pattern": "MP"}), Plan(1, 1))
    parallel.destroy()
    assert [case.loss for case in first] == [case.loss for case in second]
    for case in first:
        assert case.loss == pytest.approx(alone.loss, rel=1e-5)
        assert case.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
        assert (case.parameters, case.flops_per_token) == (alone.parameters, alone.flops_per_token)


@pytest.mark.long
def test_under_torchrun_one_rank_reports(tmp_path):
    stage = write_stage(tmp_path, tmp_path / "nothing")
    output = tmp_path / "out.jsonl"
    cases = ["--case", "dp", "--case", "tp:parallel.tp=2"]
    done = run("bench", stage, *cases, "--warmup", "1", "--steps", "1", "--output", output, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens/s") == 1
    assert len(output.read_text().splitlines()) == 2
