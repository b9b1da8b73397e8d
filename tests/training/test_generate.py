"""Text from a stage folder."""

import io
from pathlib import Path

import pytest
import torch
from helpers.runs import read_checkpoint, train_in_new_process, write_stage
from palimpsa_data import tokenizers

from megatron_palimpsa import cli, parallel
from megatron_palimpsa.config import load_stage
from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.generation import generate
from megatron_palimpsa.training.generate import generate_text


@pytest.fixture(scope="module")
def stage_folder(tmp_path_factory, tiny_data):
    folder = tmp_path_factory.mktemp("generate")
    assert train_in_new_process(write_stage(folder, tiny_data, optimizer={"lr": 0.1})) == 0
    return folder / "runs" / "stage"


def test_text_is_that_of_the_checkpoints_weights(stage_folder, tmp_path):
    config = load_stage(stage_folder / "config.yaml")
    tokenizer = tokenizers.load(Path(config.data.tokenizer))
    weights = read_checkpoint(stage_folder / "checkpoints" / "step-8", tmp_path)
    parallel.initialize(config.parallel, seed=1)
    try:
        model = build_model(config)
        initial = generate(model, tokenizer.encode("abc").tolist(), max_new_tokens=12)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        expected = generate(model, tokenizer.encode("abc").tolist(), max_new_tokens=12, stop_ids=(tokenizer.eod_id,))
    finally:
        parallel.destroy()
    assert expected != initial
    assert generate_text(stage_folder, "abc", max_new_tokens=12) == tokenizer.decode(expected)


def test_sampling_depends_on_the_seed_alone(stage_folder):
    texts = [generate_text(stage_folder, "abc", max_new_tokens=12, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_command_reads_the_prompt_from_its_argument(stage_folder, capsys):
    assert cli.main(["generate", str(stage_folder), "abc", "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out == generate_text(stage_folder, "abc", max_new_tokens=12) + "\n"


def test_ids_that_the_tokenizer_lacks_are_never_chosen(tmp_path, tiny_data):
    path = write_stage(tmp_path, tiny_data, model={"vocab_size": 1000}, optimizer={"lr": 1e-6, "min_lr": 0.0})
    assert train_in_new_process(path, "train.stop_at_step=1") == 75
    text = generate_text(tmp_path / "runs" / "stage", "abc", max_new_tokens=64, temperature=10.0)
    assert text  # of 64 ids drawn evenly from 1000, all of them below 320


@pytest.mark.parametrize("prompt", ["a\udcff", None])
def test_a_prompt_that_is_not_text_is_wrong_input(stage_folder, capsys, monkeypatch, prompt):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert cli.main(["generate", str(stage_folder), *([] if prompt is None else [prompt])]) == 2
    assert "the prompt is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "x", "1e3", "99999999999999999999"])
def test_impossible_numbers_of_tokens_are_refused(stage_folder, capsys, count):
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", str(stage_folder), "abc", "--max-new-tokens", count])
    assert caught.value.code == 2
    assert "must be an integer from 1 to 1048576" in capsys.readouterr().err


def test_unusable_settings_are_wrong_input(stage_folder, capsys):
    assert cli.main(["generate", str(stage_folder), "", "--max-new-tokens", "1"]) == 2
    assert cli.main(["generate", str(stage_folder), "abc", "--top-p", "2"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
