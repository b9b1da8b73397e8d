"""Weights & Biases without a network: the mode, the run id, the missing package."""

import importlib.util

import pytest
from helpers.stages import tiny_stage

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.training import wandb_log
from megatron_palimpsa.training.wandb_log import WandbLog, check_usable, choose_mode, run_id


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_mode_follows_the_key(monkeypatch, tmp_path):
    assert choose_mode() == "offline"
    (tmp_path / "netrc").write_text("machine other.example login user password word\n")
    assert choose_mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password word\n")
    assert choose_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert choose_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert choose_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode() == "disabled"


def test_id_is_made_once(tmp_path):
    assert run_id(tmp_path) == run_id(tmp_path)


def test_missing_package_is_said_plainly(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_usable(tiny_stage())
    with pytest.raises(ConfigError, match=r"logging.wandb_project='demo' needs the package wandb: pip install"):
        check_usable(tiny_stage(logging={"wandb_project": "demo"}))


def test_offline_runs_of_a_resumed_stage_share_their_id(tmp_path):
    for step in (1, 2):
        log = WandbLog(tiny_stage(logging={"wandb_project": "demo"}), tmp_path)
        log.write("train", step=step, loss=1.0)
        log.close()
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{run_id(tmp_path)}.wandb"}


def test_a_mode_that_is_none_is_refused(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match=r"WANDB_MODE='nonsense' .* must be one of online, offline"):
        check_usable(tiny_stage(logging={"wandb_project": "demo"}))


def test_a_server_that_does_not_answer_leaves_the_run_offline(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_log, "_PATIENCE", 2.0)
    log = WandbLog(tiny_stage(logging={"wandb_project": "demo"}), tmp_path)
    log.write("train", step=1, loss=1.0)
    log.close()
    assert "it is logged offline" in caplog.text
    assert list((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id(tmp_path)}.wandb"))
