"""A node's facts: hashes that change with what they are of, and what cannot be found out."""

import shutil
import sys

import pytest
from helpers.runs import write_stage
from palimpsa_launch.preflight import facts as module
from palimpsa_launch.preflight.facts import code_sha256, data_sha256, node_facts
from palimpsa_launch.preflight.settings import Preflight
from palimpsa_launch.preflight.verdict import judge

from megatron_palimpsa.config import load_stage


@pytest.fixture
def stage_folder(tmp_path, tiny_data):
    (tmp_path / "stage" / "job").mkdir(parents=True)
    shutil.copytree(tiny_data, tmp_path / "data")
    recipe = write_stage(tmp_path, tmp_path / "data")
    recipe.replace(tmp_path / "stage" / "job" / "stage.yaml")
    return tmp_path / "stage"


def test_facts_of_this_machine(stage_folder, tmp_path):
    found = node_facts("node7", stage_folder, tmp_path, gpus=0, seconds=1)
    assert found["node"] == "node7"
    assert found["own_problems"] == found["shared_problems"] == []
    assert found["run_folder_gb"] == pytest.approx(shutil.disk_usage(tmp_path).free / 1e9, abs=1)
    assert found["packages"]["torch"]
    assert len(found["code"]) == len(found["data"]) == 64
    assert "gpus" not in found


def test_folder_of_the_node_that_is_not_there_is_said(stage_folder, tmp_path):
    found = node_facts("node7", stage_folder, tmp_path / "absent", gpus=0, seconds=1)
    assert "local_folder_gb" not in found
    assert "No such file" in found["own_problems"][0]
    assert "cannot be written to" in found["own_problems"][1]
    assert judge(["node7", "node8"], {"node7": found, "node8": found | {"own_problems": []}}, {}, 0, Preflight()).bad


def test_code_hash_sees_every_file_and_name(tmp_path):
    package = tmp_path / "package"
    (package / "sub").mkdir(parents=True)
    (package / "a.py").write_text("1")
    hashes = [code_sha256([package])]
    (package / "sub" / "untracked.py").write_text("2")
    hashes.append(code_sha256([package]))
    (package / "sub" / "untracked.py").rename(package / "sub" / "b.py")
    hashes.append(code_sha256([package]))
    (package / "a.py").write_text("3")
    hashes.append(code_sha256([package]))
    assert len(set(hashes)) == 4
    (package / "a.pyc").write_text("compiled")
    assert code_sha256([package]) == hashes[-1]


def test_our_four_packages_are_hashed():
    assert {folder.name for folder in module._package_folders()} == set(module._PACKAGES)


def test_data_hash_sees_weights_sets_and_shards(stage_folder, tmp_path):
    config = load_stage(stage_folder / "job" / "stage.yaml")
    hashes = [data_sha256(config)]
    blend = tmp_path / "data" / "train.yaml"
    blend.write_text(blend.read_text().replace("1.0", "2.0"))
    hashes.append(data_sha256(config))
    record = tmp_path / "data" / "train" / "set.json"
    record.write_text(record.read_text() + "\n")
    hashes.append(data_sha256(config))
    (shard,) = (tmp_path / "data" / "train").glob("*00001.bin")
    shard.write_bytes(shard.read_bytes()[:-2])
    hashes.append(data_sha256(config))
    assert len(set(hashes)) == 4


def test_missing_data_are_said(stage_folder, tmp_path):
    (tmp_path / "data" / "train" / "set.json").unlink()
    found = node_facts("node7", stage_folder, tmp_path, gpus=0, seconds=1)
    assert "data" not in found
    assert "set.json is missing" in found["shared_problems"][0]


def test_gpus_that_do_not_answer_are_said(stage_folder, tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho first >&2; echo 'RuntimeError: CUDA error' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    found = node_facts("node7", stage_folder, tmp_path, gpus=2, seconds=5)
    assert found["own_problems"] == ["GPUs: RuntimeError: CUDA error"]
    broken.write_text("#!/bin/sh\nexec sleep 20\n")
    found = node_facts("node7", stage_folder, tmp_path, gpus=2, seconds=0.2)
    assert "timed out" in found["own_problems"][0]
