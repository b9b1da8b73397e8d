"""Which ranks a dry run plans for."""

import pytest
from helpers.runs import write_stage

from megatron_palimpsa.config import ConfigError, load_stage
from megatron_palimpsa.training import run


@pytest.fixture
def config(tmp_path, tiny_data):
    return load_stage(write_stage(tmp_path, tiny_data, parallel={"tp": 2, "pp": 2}))


def test_without_a_launcher_as_many_as_the_layout_takes(config, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "4 ranks: tp 2, pp 2, cp 1, dp 1" in run.dry_run(config)
    with pytest.raises(ConfigError, match="does not divide the number of ranks, which is 1; torchrun"):
        run.train(config)


def test_for_as_many_as_are_asked_for_on_any_machine(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = run.dry_run(config, ranks=8)
    assert "8 ranks: tp 2, pp 2, cp 1, dp 2" in plan
    assert "the CUDA context and NCCL come on top" in plan
    with pytest.raises(ConfigError, match="does not divide the number of ranks, which is 6"):
        run.dry_run(config, ranks=6)


def test_under_a_launcher_its_own(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "8 ranks: tp 2, pp 2, cp 1, dp 2" in run.dry_run(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="does not divide the number of ranks, which is 2"):
        run.dry_run(config)


@pytest.mark.parametrize(
    ("rank", "size"), [("x", "1"), ("0", "0"), ("0", ""), ("0", "two"), ("1", "1"), ("-1", "2"), ("4", "4")]
)
def test_an_environment_that_no_launcher_makes_is_refused(config, monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    for command in (run.train, run.dry_run):
        with pytest.raises(ConfigError, match=f"RANK='{rank}' of WORLD_SIZE='{size}'"):
            command(config)


def test_ranks_without_a_meeting_place_are_refused(config, monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4 but lacks RANK, MASTER_ADDR, MASTER_PORT"):
        run.train(config)
