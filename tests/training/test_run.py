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
    assert "4 ranks: tp 2, pp 2, dp 1" in run.dry_run(config)
    with pytest.raises(ConfigError, match="does not divide the 1 ranks started"):
        run.train(config)


def test_under_a_launcher_its_own(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "8 ranks: tp 2, pp 2, dp 2" in run.dry_run(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="does not divide the 2 ranks started"):
        run.dry_run(config)
