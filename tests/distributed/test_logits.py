"""Tensor parallelism of the pretrained geometry, where the ranks are more than the groups of B and C."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.logits import logits
from helpers.stages import tiny_stage
from helpers.workers import Workers

from megatron_palimpsa import parallel
from megatron_palimpsa.config import StageConfig

# state-spaces/mamba2-2.7b, narrower: 8 of its 80 heads, 3 of its 64 layers, a smaller vocabulary.
GEOMETRY = {
    "hidden_size": 256,
    "d_state": 128,
    "headdim": 64,
    "expand": 2,
    "d_conv": 4,
    "beta_rank": 128,
    "vocab_size": 2000,
    "seq_length": 64,
}


@pytest.fixture(scope="module")
def eight_processes() -> Iterator[Workers]:
    workers = Workers(8)
    yield workers
    workers.close()


def stage(pattern: str, ngroups: int, tp: int, sequence_parallel: bool = False) -> StageConfig:
    return tiny_stage(
        tp,
        model={**GEOMETRY, "pattern": pattern, "ngroups": ngroups},
        parallel={"tp": tp, "sequence_parallel": sequence_parallel},
    )


@pytest.mark.parametrize(("pattern", "ngroups"), [("MMM", 1), ("MPM", 1), ("MPM", 2)])
def test_logits_are_the_same_under_any_tensor_parallelism(pattern: str, ngroups: int, eight_processes: Workers) -> None:
    expected = logits(stage(pattern, ngroups, 1))
    parallel.destroy()
    # Neither small nor all alike: each element counts.
    assert expected.shape == (64, 2000)
    assert np.abs(expected).max() > 1
    for tp, sequence_parallel in ((2, False), (4, True), (8, False)):
        for found in eight_processes.run_on(tp, logits, stage(pattern, ngroups, tp, sequence_parallel)):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=f"tp={tp}")
