"""Stages as Hugging Face folders: the trainer's logits, the same weights back, or one message and nothing written."""

from __future__ import annotations

import ast
import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference_model
from helpers.published_mamba2 import random_mamba2, save_as_state_spaces
from helpers.runs import read_checkpoint, run_ranks, train_in_new_process, write_stage
from helpers.saved_stages import train_and_save, trainer_logits
from helpers.stages import tiny_stage
from palimpsa_data import tokenizers
from palimpsa_data.tokenizers.probes import PROBES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_palimpsa import cli
from megatron_palimpsa.config import load_stage
from megatron_palimpsa.config.reading import read_tree
from megatron_palimpsa.convert import stage_folder
from megatron_palimpsa.export import settings, shards, write
from megatron_palimpsa.inference import opened
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training.checkpoint_format import INDEX, read_metadata

IDS = torch.randint(61, (2, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Trained by `train`, with data and a SentencePiece tokenizer; its vocabulary of 330 ids is padded to 336."""
    folder = tmp_path_factory.mktemp("stage")
    assert train_in_new_process(write_stage(folder, tiny_data, model={"vocab_size": 330})) == 0
    return folder / "runs" / "stage"


@pytest.fixture(scope="module")
def exported(stage: Path) -> Path:
    output = stage.parents[1] / "exported"
    assert cli.main(["export", str(stage), str(output), "--dtype", "fp32"]) == 0
    return output


def logits(folder: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits


def weights(stage: Path, scratch: Path) -> dict[str, Tensor]:
    (checkpoint,) = (stage / "checkpoints").glob("step-*")
    found = read_checkpoint(checkpoint, scratch)
    return {name: value for name, value in found.items() if not name.startswith(("optimizer.", "rng."))}


@pytest.mark.parametrize(
    "model",
    [
        {"tie_embeddings": True, "rope_theta": 100.0},
        {"tie_embeddings": False, "pattern": "P-M*P", "ngroups": 2, "norm_groups": 1, "num_query_groups": None},
        {"pattern": "Q-L*", "headdim": 16, "rope_theta": 100.0},
    ],
)
def test_logits_are_the_trainer_s_and_the_equations_and_weights_come_back(
    tmp_path: Path, monkeypatch, model: dict[str, Any]
) -> None:
    data = {"train_blend": "", "valid_blend": "", "tokenizer": ""}
    stage = train_and_save(tiny_stage(output_dir=str(tmp_path), model=model, data=data))
    monkeypatch.setattr(shards, "MOST_BYTES", 20_000)
    assert cli.main(["export", str(stage), str(tmp_path / "exported")]) == 0
    assert len(list((tmp_path / "exported").glob("model-*-of-*.safetensors"))) > 2
    wanted = trainer_logits(stage, IDS)
    assert wanted.std() > 0.5
    torch.testing.assert_close(logits(tmp_path / "exported", IDS), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(trainer_logits(tmp_path / "exported", IDS), wanted)
    assert cli.main(["convert", "verify", str(stage), str(tmp_path / "exported"), "--tokens", "40"]) == 0

    assert cli.main(["convert", "huggingface", str(tmp_path / "exported"), str(tmp_path / "back")]) == 0
    before, after = weights(stage, tmp_path), weights(tmp_path / "back", tmp_path)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    double = {name: value.double() for name, value in before.items()}
    of_equations = reference_model.logits(double, load_stage(stage / "config.yaml").model, IDS[0, :12].tolist())
    for ours, theirs in zip(of_equations, logits(tmp_path / "exported", IDS[:1, :12])[0], strict=True):
        torch.testing.assert_close(ours[:61].float(), theirs, atol=1e-5, rtol=1e-5)
    section = read_tree(tmp_path / "back" / "model.yaml")["model"]
    train_and_save(
        tiny_stage(output_dir=str(tmp_path), name="on", model=section, data=data, init_from={"stage": "back"}), steps=1
    )


def test_from_a_published_mamba2_over_training_to_transformers(tmp_path: Path) -> None:
    save_as_state_spaces(random_mamba2(n_groups=1, vocab_size=64, tie_word_embeddings=True), tmp_path / "source", 61)
    assert cli.main(["convert", "mamba2", str(tmp_path / "source"), str(tmp_path / "base")]) == 0
    assert cli.main(["convert", "verify", str(tmp_path / "source"), str(tmp_path / "base"), "--tokens", "40"]) == 0
    section = read_tree(tmp_path / "base" / "model.yaml")["model"] | {"seq_length": 32}
    data = {"train_blend": "", "valid_blend": "", "tokenizer": ""}
    stage = train_and_save(
        tiny_stage(output_dir=str(tmp_path), model=section, data=data, init_from={"stage": "base"}), steps=5
    )
    assert cli.main(["export", str(stage), str(tmp_path / "exported")]) == 0
    wanted = trainer_logits(stage, IDS)
    torch.testing.assert_close(logits(tmp_path / "exported", IDS), wanted, atol=1e-5, rtol=1e-5)
    assert (wanted - trainer_logits(tmp_path / "base", IDS)).abs().max() > 0.1
    assert cli.main(["convert", "verify", str(stage), str(tmp_path / "exported")]) == 0


ALONE = """
import json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron_palimpsa", "palimpsa_kernels", "palimpsa_data", "megatron"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.modules["palimpsa_kernels"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, text = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=True)
inputs = tokenizer([text, text[:5]], padding=True, return_tensors="pt")
with torch.no_grad():
    row = model(**inputs).logits[0]
made = model.generate(**inputs, max_new_tokens=6, do_sample=False)
print(json.dumps({"ids": inputs["input_ids"][0].tolist(), "logits": row.tolist(), "made": made[0].tolist()}))
"""


@pytest.mark.long
def test_a_process_without_this_project_loads_the_folder(stage: Path, exported: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = run_alone(ALONE, str(exported), "ab cd\nef", environment=environment)
    with opened(stage) as it:
        assert it.tokenizer is not None
        ids = it.tokenizer.encode("ab cd\nef").tolist()
        assert result["ids"] == ids
        with torch.no_grad():
            wanted = it.model(input_ids=torch.tensor([ids]), position_ids=None, attention_mask=None)[0, :, :330]
    torch.testing.assert_close(torch.tensor(result["logits"]), wanted, atol=1e-5, rtol=1e-5)
    assert result["made"][: len(ids)] == ids
    assert result["made"][len(ids)] == int(wanted[-1].argmax())


def test_the_copied_code_needs_torch_and_transformers_alone(exported: Path) -> None:
    sources = list(exported.glob("*.py"))
    assert len(sources) == 8
    allowed = {*sys.stdlib_module_names, "torch", "transformers"}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {name.name.partition(".")[0] for name in node.names} <= allowed, path.name
            elif isinstance(node, ast.ImportFrom):
                there = (exported / f"{node.module}.py").is_file()
                assert there if node.level else str(node.module).partition(".")[0] in allowed, path.name


def run_alone(code: str, *arguments: str, environment: dict[str, str]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_an_export_opens_as_its_stage_does(stage: Path, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "a name of one's own")
    with opened(stage) as it:
        wanted = {name: parameter.clone() for name, parameter in it.model.named_parameters()}
    with opened(tmp_path / "a name of one's own") as it:
        assert it.tokenizer is not None
        assert it.tokenizer.vocab_size == 320
        assert it.config.train.precision == "fp32"
        for name, parameter in it.model.named_parameters():
            assert torch.equal(parameter, wanted[name]), name


def test_bf16_rounds_all_but_what_stays_fp32(stage: Path, exported: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(stage / "checkpoints" / "step-8"), str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(exported).state_dict().items():
        kept = name.endswith(("A_log", "D", "dt_bias", "b_scale", "prior_log"))
        assert rounded[name].dtype == (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(rounded[name], value.to(rounded[name].dtype)), name
    assert cli.main(["convert", "verify", str(stage), str(tmp_path / "bf16")]) == 0


def test_large_tensors_go_through_in_stretches(stage: Path, exported: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stage_folder, "AT_ONCE", 50)
    assert cli.main(["export", str(stage), str(tmp_path / "again"), "--dtype", "fp32"]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_the_tokenizer_gives_the_ids_of_training(exported: Path, tiny_data: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.padding_side) == (2, 3, "left")
    assert (exported / "training_tokenizer.model").read_bytes() == (tiny_data / "tokenizer.model").read_bytes()
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizers.train_json(["abc abd " * 50, "\u00e9\u4e2d\u6587 def(x): return"] * 50, 300))
    for file in (tiny_data / "tokenizer.model", path):
        loaded = write.load_tokenizer(file, 330)
        write.write_tokenizer(loaded, tmp_path / file.suffix)
        saved = AutoTokenizer.from_pretrained(tmp_path / file.suffix)
        for text in PROBES:
            assert saved(text)["input_ids"] == loaded.encode(text).tolist(), text
            assert saved.decode(saved(text)["input_ids"], skip_special_tokens=True) == loaded.decode(
                loaded.encode(text)
            )


def test_the_model_card_says_what_the_run_recorded_and_no_more(stage: Path, exported: Path, tmp_path: Path) -> None:
    card = (exported / "README.md").read_text()
    for fact in (
        "| pattern | `MP*-` |",
        "| parameters | 12,160 |",
        "| trained | 8 steps, 512 tokens of this stage |",
        "| data | train (100.0%) |",
    ):
        assert fact in card
    losses = {}
    for line in (stage / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses[record["kind"]] = record.get("loss")
    assert f"| training loss | {losses['train']:.4f} at step 8 |" in card
    assert f"| validation loss | {losses['valid']:.4f} at step 8 |" in card
    assert "commit" not in card
    submission = {"git_commit": "0123abc", "git_changed": False}
    shutil.copytree(stage, tmp_path / "stage")
    (tmp_path / "stage" / "job").mkdir()
    (tmp_path / "stage" / "job" / "submission.json").write_text(json.dumps(submission))
    assert cli.main(["export", str(tmp_path / "stage" / "checkpoints" / "step-4"), str(tmp_path / "step-4")]) == 0
    card = (tmp_path / "step-4" / "README.md").read_text()
    assert "| code | git commit 0123abc |" in card
    assert "4 steps, 256 tokens" in card


def test_what_the_run_recorded_comes_back_out_of_a_stage_made_of_the_export(exported: Path, tmp_path: Path) -> None:
    def there_and_back(folder: Path, stage: Path, output: Path) -> str:
        assert cli.main(["convert", "huggingface", str(folder), str(stage)]) == 0
        assert cli.main(["export", str(stage), str(output)]) == 0
        return (output / "README.md").read_text()

    card = there_and_back(exported, tmp_path / "stage", tmp_path / "exported")
    assert "| trained | 8 steps, 512 tokens of this stage |" in card
    assert card == (exported / "README.md").read_text()
    for name in ("provenance.json", "checksums.json"):
        (tmp_path / "exported" / name).unlink()
    card = there_and_back(tmp_path / "exported", tmp_path / "other", tmp_path / "unknown")
    assert not any(word in card for word in ("trained |", "loss", "data |"))
    assert not (tmp_path / "unknown" / "provenance.json").exists()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def resave(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "checksums.json").unlink()


def other_tokenizer(folder: Path) -> None:
    path = folder / "training_tokenizer.model"
    texts = ["".join(chr(ord("a") + (i * j) % 26) for i in range(30)) + " " for j in range(1, 400)]
    path.write_bytes(tokenizers.train_sentencepiece(texts, 360))
    (folder / "checksums.json").unlink()


def with_other_provenance(folder: Path) -> None:
    (folder / "provenance.json").write_text('{"trained": 8}')
    (folder / "checksums.json").unlink()


_BETA = "backbone.layers.1.mixer.beta_up.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda it: flip_a_bit(it / "model.safetensors"), "model.safetensors: damaged, or changed since the export"),
        (lambda it: (it / "model.safetensors").unlink(), "model.safetensors: cannot be read: No such file"),
        (lambda it: (it / "checksums.json").write_text("[1]"), "checksums.json: cannot be read"),
        (lambda it: change_json(it / "checksums.json", **{"../x": {"sha256": ""}}), "'../x' is no name of a file in"),
        (lambda it: (it / "config.json").unlink(), "config.json: cannot be read"),
        (lambda it: change_json(it / "config.json", model_type="mamba2"), "model_type='mamba2' is not palimpsa_hybrid"),
        (lambda it: change_json(it / "config.json", pattern="MG*-"), "layers of the kind G"),
        (lambda it: change_json(it / "config.json", state_size="4"), "d_state='4'"),
        (lambda it: flip_a_bit(it / "tokenizer_config.json"), "tokenizer_config.json: damaged, or changed since"),
        (lambda it: (it / "provenance.json").unlink(), "provenance.json: cannot be read: No such file"),
        (with_other_provenance, "provenance.json: holds something else than text by name"),
        (lambda it: resave(it, lambda tensors: tensors.pop(_BETA)), f"{_BETA} is missing"),
        (lambda it: resave(it, lambda tensors: tensors.update(more=torch.ones(2))), "more is not known"),
        (lambda it: resave(it, lambda tensors: tensors[_BETA].fill_(torch.nan)), f"{_BETA} holds something else"),
        (lambda it: resave(it, lambda tensors: tensors.update({_BETA: torch.ones(32, 5)})), f"{_BETA} is [32, 5]"),
        (other_tokenizer, "a tokenizer of 360 ids, the model knows 330 of them"),
    ],
)
def test_what_cannot_be_taken_back_is_one_message(exported: Path, tmp_path: Path, capsys, damage, message: str) -> None:
    shutil.copytree(exported, tmp_path / "folder")
    damage(tmp_path / "folder")
    capsys.readouterr()
    assert cli.main(["convert", "huggingface", str(tmp_path / "folder"), str(tmp_path / "back")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def other_data_tokenizer(stage: Path) -> None:
    config = stage / "config.yaml"
    texts = [f"{number} words unlike those of the data" for number in range(300)]
    (stage / "other.model").write_bytes(tokenizers.train_sentencepiece(texts, 300))
    tree = read_tree(config)
    tree["data"]["tokenizer"] = str(stage / "other.model")
    config.write_text(json.dumps(tree))


def a_pattern_with_g(stage: Path) -> None:
    config = stage / "config.yaml"
    config.write_text(config.read_text().replace("pattern: MP*-", "pattern: MG*-"))


def lose_a_tensor(stage: Path) -> None:
    # As if another program had written the checkpoint: whole by its checksums.
    path = stage / "checkpoints" / "step-8"
    metadata = read_metadata(path)
    del metadata.state_dict_metadata["decoder.layers.1.mixer.b_scale"]
    (path / INDEX).write_bytes(pickle.dumps(metadata))
    state = json.loads((path / files.STATE).read_text())
    records = {
        name: files.FileRecord((path / name).stat().st_size, files._sha256(path / name))
        for name in json.loads((path / files.MANIFEST).read_text())
    }
    files.seal(path, state, records)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda it: (it / "config.yaml").unlink(), "holds no stage"),
        (lambda it: [flip_a_bit(path) for path in it.glob("checkpoints/step-*/__0_0.distcp")], "no intact checkpoint"),
        (a_pattern_with_g, "layers of the kind G"),
        (other_data_tokenizer, "not the tokenizer of the data"),
        (lose_a_tensor, "decoder.layers.1.mixer.b_scale is missing"),
    ],
)
def test_what_cannot_be_exported_is_one_message(stage: Path, tmp_path: Path, capsys, damage, message: str) -> None:
    shutil.copytree(stage, tmp_path / "stage")
    damage(tmp_path / "stage")
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "stage"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert all("is damaged" in line for line in error[:-1])
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_a_setting_that_config_json_does_not_say_is_refused(stage: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delitem(settings._NAMES, "d_state")
    assert cli.main(["export", str(stage), str(tmp_path / "out")]) == 2
    assert "model.d_state is 4 in the stage and 128 as exported" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_there_and_a_tokenizer_that_is_not(stage: Path, exported: Path, tmp_path: Path, capsys) -> None:
    assert cli.main(["export", str(stage), str(exported)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert cli.main(["export", str(stage), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "no.model")]) == 2
    assert "cannot read the tokenizer" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write, "_write_settings", full)
    assert cli.main(["export", str(stage), str(tmp_path / "out")]) == 1
    assert not list(tmp_path.iterdir())


def _export_and_die(arguments: list[str], environment: dict[str, str], own: Any) -> None:
    def die(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    write.model_card = die
    cli.main(arguments)


def test_a_kill_leaves_nothing_under_the_name_and_the_next_export_cleans_up(stage: Path, tmp_path: Path) -> None:
    arguments = ["export", str(stage), str(tmp_path / "out")]
    assert run_ranks(_export_and_die, arguments, [None], seconds=300) == [-signal.SIGKILL]
    assert [path.name for path in tmp_path.iterdir()] == [".out.converting"]
    assert cli.main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_without_transformers_the_message_says_what_to_install(
    stage: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("megatron_palimpsa.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["export", str(stage), str(tmp_path / "out")]) == 2
    assert "pip install -e '.[hf]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
