"""What the plan says where a stage does not fit, and that it would fit then."""

from __future__ import annotations

import re
from typing import Any

import pytest
from palimpsa_launch import stages

from megatron_palimpsa.config import StageConfig, load_stage
from megatron_palimpsa.training import advice
from megatron_palimpsa.training.advice import USABLE, advise
from megatron_palimpsa.training.memory import estimate_memory
from megatron_palimpsa.training.plan import describe

GB = 10**9


def stage(*overrides: str) -> StageConfig:
    return load_stage(stages.path("bench/2.7b"), list(overrides))


LONG = ["model.seq_length=32768", "train.global_batch_tokens=256Ki"]


def test_what_is_advised_fits_by_the_estimate_of_that_configuration():
    config = stage(*LONG)
    assert estimate_memory(config, 1).total > 141 * GB
    ways = advise(config, 1, 141 * GB)
    assert any(way.startswith("train.recompute=full: ") for way in ways)
    assert any(way.startswith("parallel.cp=2: ") and way.endswith(" on 2 GPUs") for way in ways)
    assert any(way.startswith("parallel.tp=2 parallel.sequence_parallel=true: ") for way in ways)
    assert not any("selective:" in way for way in ways)
    for way in ways:
        keys, number = re.fullmatch(r"(.*): ([\d.]+) GB(?: on \d+ GPUs)?", way).groups()
        total = estimate_memory(stage(*LONG, *keys.split()), 1).total
        assert float(number) == pytest.approx(total / GB, abs=0.06)
        assert total <= USABLE * 141 * GB


def test_where_no_setting_alone_is_enough_several_are_taken_together():
    ways = advise(stage(*LONG, "train.micro_batch_size=2"), 1, 60 * GB)
    assert ways
    assert all("train.micro_batch_size=1 train.recompute=full" in way for way in ways)
    assert all("GPUs" in way for way in ways)


def test_a_replicated_optimizer_is_spread_over_the_ranks_there_are():
    overrides = ["parallel.distributed_optimizer=false", "train.recompute=full", "train.global_batch_tokens=32768"]
    (first, *_) = advise(stage(*overrides), 8, 45 * GB)
    assert first.startswith("parallel.distributed_optimizer=true: ")
    # One rank alone gains nothing by it.
    assert not any("distributed" in way for way in advise(stage(*overrides), 1, 45 * GB))


ZERO_1 = ["parallel.engine=deepspeed", "parallel.deepspeed.zero_stage=1", "train.global_batch_tokens=32768"]


def test_under_deepspeed_it_is_higher_stages_and_offload():
    config = stage(*ZERO_1)
    ways = advise(config, 8, 40 * GB)
    assert any(way.startswith("parallel.deepspeed.zero_stage=3: ") and way.endswith(" on 8 GPUs") for way in ways)
    assert not any("distributed_optimizer" in way for way in ways)
    for way in ways:
        keys, number = re.fullmatch(
            r"(.*): ([\d.]+) GB(?: and [\d.]+ GB of host memory)?(?: on \d+ GPUs)?", way
        ).groups()
        changed = stage(*ZERO_1, *keys.split())
        ranks = int(re.search(r"on (\d+) GPUs", way)[1])
        total = estimate_memory(changed, ranks // changed.parallel.replica_size).total
        assert float(number) == pytest.approx(total / GB, abs=0.06)
    # Spread over one rank, nothing is gained but by offload.
    alone = advise(config, 1, 60 * GB)
    assert alone[0].startswith("parallel.deepspeed.offload_optimizer=true: ")
    assert "of host memory" in alone[0]
    assert not any(way.startswith("parallel.deepspeed.zero_stage=3: ") for way in alone)


def test_under_deepspeed_a_smaller_bucket_comes_first():
    config = stage(*ZERO_1)
    needed = estimate_memory(config, 8).total
    ways = advise(config, 8, int((needed - 0.5 * GB) / 0.95))
    assert ways[0].startswith("parallel.deepspeed.reduce_bucket_size=50000000: ")
    lowered = stage(*ZERO_1, "parallel.deepspeed.reduce_bucket_size=50000000")
    assert not any("reduce_bucket_size" in way for way in advise(lowered, 8, 40 * GB))


def plan(memory: int | None, *overrides: str) -> str:
    return describe(stage(*overrides), 1, None, [], memory)


def test_the_plan_says_whether_it_fits_and_what_would():
    assert "fits into a GPU of 141 GB" in plan(141 * GB)
    tight = plan(60 * GB)
    assert "does not fit into a GPU of 60 GB, of which 95% are usable; it would with" in tight
    assert "parallel.cp=2: " in tight
    hopeless = plan(GB)
    assert "nor with full recomputation on eight times the GPUs" in hopeless
    assert "fit" not in plan(None)


def test_the_plan_names_buffers_and_host_memory_under_deepspeed_and_what_was_not_measured():
    text = plan(141 * GB, *ZERO_1, "parallel.deepspeed.offload_optimizer=true")
    assert "buffers 2.26 GB" in text
    assert "in host memory" in text
    assert "not measured with these settings of DeepSpeed yet" in text
    assert "fits into a GPU of 141 GB" in text
    assert "measured" not in plan(141 * GB)
    assert "measured" not in plan(141 * GB, *ZERO_1)
    assert "not measured with these settings of DeepSpeed yet" in plan(None, *ZERO_1, "parallel.deepspeed.zero_stage=0")


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 143771; echo 143771", 143771 * 2**20), ("echo no devices; exit 9", None), ("echo '[N/A]'", None)],
)
def test_the_drivers_tool_knows_the_memory(tmp_path, monkeypatch, script: str, expected: Any):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert advice.gpu_memory() == expected


def test_without_the_tool_it_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert advice.gpu_memory() is None
