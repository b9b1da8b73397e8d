"""A rank's output and exit code end up in files of its own."""

import os
import subprocess
import sys

import pytest
from helpers.runs import write_stage

from megatron_palimpsa import cli, launcher


def start_rank(folder, *arguments, rank="0"):
    environment = os.environ | {"RANK": rank, "WORLD_SIZE": "1" if rank == "0" else "4", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "palimpsa_launch.rank", str(folder), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_wrong_input_is_in_the_log_and_2_in_the_exit_file(tmp_path):
    answer = start_rank(tmp_path, "train", tmp_path / "absent.yaml", rank="3")
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", "")
    assert (tmp_path / "rank-3.exit").read_text() == "2\n"
    assert "cannot read the configuration" in (tmp_path / "rank-3.log").read_text()


@pytest.mark.parametrize(("launcher", "code"), [("torchrun", 0), ("another", 75)])
def test_stop_file_saves_and_ends_with_75_or_as_torchrun_takes_it(tmp_path, tiny_data, monkeypatch, launcher, code):
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("PALIMPSA_STOP_FILE", str(tmp_path / "STOP"))
    (tmp_path / "STOP").touch()
    assert start_rank(tmp_path, "train", write_stage(tmp_path, tiny_data)).returncode == code
    assert (tmp_path / "rank-0.exit").read_text() == "75\n"
    assert "stop file found: saved at step 0 of 8" in (tmp_path / "rank-0.log").read_text()


def test_code_is_noted_before_a_rank_ends_at_once(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(cli, "_others_may_wait", lambda: True)
    monkeypatch.setattr(launcher, "end_at_once", lambda code: calls.append(("ended", int(code))))
    cli.main(["train", str(tmp_path / "absent.yaml")], lambda code: calls.append(("noted", int(code))))
    assert calls == [("noted", 2), ("ended", 2)]
