"""On GPUs: Megatron-LM's loop in bf16 with its kernels and NCCL, against this package's trainer on as many ranks.

Also a script, for machines with only torch, triton, numpy and what is carried along:
`python tests/megatron_lm/test_gpu.py [TP]`, with the roots of the packages and tests/ on PYTHONPATH, prints both runs.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers import megatron_lm
from helpers.stages import tiny_stage
from helpers.workers import Workers

from megatron_palimpsa.config import StageConfig

pytestmark = pytest.mark.gpu
STEPS = 8
BOUND = 5e-3
"""On each loss, absolute, of losses around 7, and on each gradient norm, relative: bf16 sums in another order."""


def stage(tp: int) -> StageConfig:
    return tiny_stage(
        tp,
        model={
            "pattern": "MPM*-PMM",
            "hidden_size": 256,
            "vocab_size": 1000,
            "seq_length": 512,
            "d_state": 64,
            "headdim": 64,
            "beta_rank": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 512,
        },
        train={"global_batch_tokens": 2048, "tokens": 2048 * STEPS, "precision": "bf16"},
        optimizer={"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
        parallel={"tp": tp, "sequence_parallel": tp > 1, "distributed_optimizer": True},
    )


def compare(tp: int) -> list[tuple[float, float, float, float]]:
    """A step's losses (Megatron's, the trainer's) and gradient norms (likewise) in each row, on this rank."""
    config = stage(tp)
    run = megatron_lm.train(config)
    steps = megatron_lm.trainers_steps(config)
    return [
        (loss, step.loss, norm, step.grad_norm)
        for loss, norm, step in zip(run.losses, run.grad_norms, steps, strict=True)
    ]


def on_ranks(tp: int) -> list[tuple[float, float, float, float]]:
    workers = Workers(tp)
    try:
        return workers.run(compare, tp)[0]
    finally:
        workers.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_losses_are_the_trainers(tp: int) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    rows = on_ranks(tp)
    assert len(rows) == STEPS
    assert rows[-1][0] < rows[0][0]
    for row in rows:
        assert within_bound(row), row


def within_bound(row: tuple[float, float, float, float]) -> bool:
    loss, expected_loss, norm, expected_norm = row
    return abs(loss - expected_loss) <= BOUND and abs(norm - expected_norm) <= BOUND * expected_norm


def main() -> int:
    failed = False
    sizes = [int(word) for word in sys.argv[1:]] or [1, 2]
    for tp in (size for size in sizes if size <= torch.cuda.device_count()):
        print(f"tp {tp}: step, Megatron-LM's loss, the trainer's, Megatron-LM's gradient norm, the trainer's")
        rows: list[Any] = on_ranks(tp)
        for number, row in enumerate(rows, start=1):
            print(f"{number:2d} {row[0]:.5f} {row[1]:.5f} {row[2]:.5f} {row[3]:.5f}")
        passed = all(within_bound(row) for row in rows)
        print(f"tp {tp}: {'within' if passed else 'BEYOND'} {BOUND}")
        failed |= not passed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
