"""A stage of Palimpsa-D and MLP layers, from random weights through a kill to its end."""

import signal

import torch
from helpers.runs import read_checkpoint, train_in_new_process, write_stage

from megatron_palimpsa.training.exit_codes import ExitCode
from megatron_palimpsa.training.metrics import read_records
from megatron_palimpsa.training.run_folder import RunFolder

MODEL = {"pattern": "Q-Q-", "headdim": 8, "d_state": 4}


def test_a_killed_run_ends_as_an_unbroken_one_and_learns(tmp_path, tiny_data):
    whole, cut = (write_stage(tmp_path, tiny_data, name, model=MODEL) for name in ("whole", "cut"))
    assert train_in_new_process(whole) == ExitCode.COMPLETE
    assert train_in_new_process(cut, signals={6: signal.SIGKILL}) == -signal.SIGKILL
    assert train_in_new_process(cut) == ExitCode.COMPLETE

    folders = [RunFolder(tmp_path / "runs" / name) for name in ("whole", "cut")]
    expected, found = (read_checkpoint(folder.checkpoints / "step-8", tmp_path) for folder in folders)
    assert "decoder.layers.2.mixer.conv_q_weight" in expected
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []

    records = read_records(folders[1].metrics)
    assert [record["step"] for record in records if record["kind"] == "resume"] == [4]
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "valid"}
    assert losses[8] < losses[0] - 0.5
    memory = [record["memory"] for record in records if record["kind"] == "valid"][-1]
    assert {layer: sorted(values) for layer, values in memory.items()} == {
        layer: ["importance_ratio", "window"] for layer in ("1", "3")
    }
