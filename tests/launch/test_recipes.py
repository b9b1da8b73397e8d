"""The packaged recipes: as they are meant, within the memory of the GPUs they are for, in the README as they are."""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import pytest
from palimpsa_launch import chain, preparation, recipes, stages

from megatron_palimpsa import cli
from megatron_palimpsa.config import StageConfig, load_stage
from megatron_palimpsa.convert.layers import WITH_IMPORTANCE, Turn
from megatron_palimpsa.training import run
from megatron_palimpsa.training.console import short_count
from megatron_palimpsa.training.memory import estimate_memory
from megatron_palimpsa.training.parameters import count_parameters
from megatron_palimpsa.training.stages import Source, planned_source

ROOT = Path(__file__).parents[2]
EVALUATION = ROOT / "docs" / "evaluation.md"
H100 = 80 * 2**30
SIZES = ("170m", "760m")
OF_A_SIZE = (
    "palimpsa",
    "mamba2",
    "palimpsa-d",
    "palimpsa-d-no-importance",
    "gated-delta-net",
    "transformer",
    "pretrain-m",
    "fine-tune-m",
    "pretrain-d",
    "fine-tune-d",
)
STAGES = [
    *(f"{run}/stage-{number}" for run in ("2.7b", "2.7b-control") for number in (1, 2, 3)),
    *(f"{size}/{name}" for size in SIZES for name in OF_A_SIZE),
]


@pytest.fixture
def large_disk(monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**15))


def starts_from(config: StageConfig) -> str:
    return "random weights" if config.init_from is None else config.init_from.stage


def layers(config: StageConfig) -> str:
    pattern = config.model.layers
    return " + ".join(f"{pattern.count(letter)} {letter}" for letter in "MPLQG*-" if letter in pattern)


def memory(config: StageConfig, ranks: int) -> str:
    return f"{estimate_memory(config, ranks // config.parallel.replica_size).total / 1e9:.0f}"


def table() -> str:
    header = "recipe", "starts from", "layers", "tokens", "sequence", "batch", "lr", "cp", "GB on 8 / 64"
    rows = [header, ("---", "---", "---", *("---:" for _ in header[3:]))]
    for name in STAGES:
        config = load_stage(stages.path(name))
        rows.append(
            (
                f"`{name}.yaml`",
                starts_from(config),
                layers(config),
                short_count(config.train.tokens),
                f"{config.model.seq_length:,}",
                f"{config.train.global_batch_tokens:,}",
                f"{config.optimizer.lr:.3g}",
                str(config.parallel.cp),
                f"{memory(config, 8)} / {memory(config, 64)}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_every_packaged_stage_is_in_a_list_here():
    folder = stages.path("2.7b/run").parent.parent
    found = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")}
    named = {
        name
        for name in found
        if name.rpartition("/")[2] not in ("base", "base-d", "run", "data", "layers", "base-model", "importance")
    }
    assert {name for name in named if not name.startswith(("demo/", "bench/", "mqar/", "position/"))} == set(STAGES)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", STAGES)
def test_each_stage_fits_its_gpus(name, ranks, large_disk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_stage(stages.path(name))
    source = None if config.init_from is None else Source(Path("runs/base"), "weights")
    plan = run.describe(config, ranks, planned_source=source, data_may_be_missing=True, gpu_memory=H100)
    assert f"{ranks} ranks: tp 1, pp 1" in plan
    assert "fits into a GPU of 85.9 GB" in plan
    assert ("\nevaluation     {python} -m megatron_palimpsa eval run {folder} " in plan) == (
        config.evaluation is not None
    )


@pytest.mark.parametrize("name", ["2.7b", "2.7b-control"])
def test_stages_of_a_run_follow_each_other(name):
    paths = recipes.find_recipes([f"{name}/run"])
    configs = [chain.load_recipe(path, []) for path in paths]
    chain.check_folders(paths, configs)
    trained = [config for config in configs if isinstance(config, StageConfig)]
    assert [config.name for config in trained] == ["stage-1", "stage-2", "stage-3"]
    assert starts_from(trained[0]) == "base"
    assert Path(f"runs/{name}/base") in preparation.outputs(configs[-4])
    for number in (1, 2):
        assert planned_source(trained[number], trained[:number]) is not None


def test_control_differs_in_its_layers_alone():
    for number in (1, 2, 3):
        ours, control = (load_stage(stages.path(f"{run}/stage-{number}")) for run in ("2.7b", "2.7b-control"))
        assert (ours.model.layers.count("P"), len(ours.model.layers)) == (8, 64)
        assert set(control.model.layers) == {"M"}
        assert ours.train == control.train
        assert ours.optimizer == control.optimizer
        assert ours.data == control.data


def test_data_of_the_2_7b_run_is_what_its_stages_read():
    config = preparation.load(stages.path("2.7b/data"), [])
    made = {preparation.words(command)[2] for command in config.then}
    sets = {preparation.words(command)[3 + i] for command in config.then for i in range(9) if _is_set(command, i)}
    outputs = {words[words.index("--output") + 1] for words in map(_words, config.arrays.values())}
    assert sets == outputs
    for number in (1, 2, 3):
        data = load_stage(stages.path(f"2.7b/stage-{number}")).data
        assert {data.train_blend, data.valid_blend} <= made


def test_layers_of_the_2_7b_run_are_measured_on_the_text_of_stage_1():
    first = load_stage(stages.path("2.7b/stage-1"))
    convert, select, turn = (
        preparation.words(command) for command in preparation.load(stages.path("2.7b/layers"), []).then
    )
    assert select[2] == turn[2] == convert[3]
    assert turn[3] == str(Path(first.output_dir) / starts_from(first))
    assert turn[turn.index("--pattern") + 1] == f"{select[select.index('--output') + 1]}/pattern.yaml"
    assert int(turn[turn.index("--beta-rank") + 1]) == first.model.beta_rank
    assert int(select[select.index("--layers") + 1]) == first.model.layers.count("P")
    assert select[select.index("--blend") + 1] == first.data.valid_blend
    assert select[select.index("--tokenizer") + 1] == first.data.tokenizer
    for number in (1, 2, 3):
        assert load_stage(stages.path(f"2.7b/stage-{number}")).init_from.pattern == "source"


@pytest.mark.parametrize("size", SIZES)
def test_fine_tunings_start_from_their_backbones_with_importance(size):
    paths = recipes.find_recipes([f"{size}/run"])
    configs = [chain.load_recipe(path, []) for path in paths]
    chain.check_folders(paths, configs)
    text, *pretrained, turning, tuned_m, tuned_d = configs
    assert isinstance(text, preparation.Preparation)
    for before, after, command, letters in zip(pretrained, (tuned_m, tuned_d), turning.then, ("MP", "LQ"), strict=True):
        source, output = map(Path, preparation.words(command)[2:4])
        assert (source, output) == (before.folder, Path(after.output_dir) / starts_from(after))
        assert planned_source(after, pretrained, preparation.outputs(turning)).checkpoint == output
        turn = Turn(WITH_IMPORTANCE, pattern=preparation.words(command)[5], defaults={"beta_scale_init": "finetune"})
        assert turn.of(before.model) == after.model
        assert before.model.layers == after.model.layers.replace(letters[1], letters[0])
        whole = load_stage(stages.path(f"{size}/palimpsa"))
        assert before.train.tokens + after.train.tokens == whole.train.tokens
        assert after.optimizer.lr == pytest.approx(before.optimizer.lr / 10)
        assert after.optimizer.warmup_steps == 200


@pytest.mark.parametrize("size", SIZES)
def test_text_of_a_size_is_what_its_stages_read(size):
    config = preparation.load(stages.path(f"{size}/data"), [])
    options = [cli.parse(words) for words in map(_words, config.arrays.values())]
    blends = [cli.parse(preparation.words(command)) for command in config.then]
    for name in OF_A_SIZE:
        data = load_stage(stages.path(f"{size}/{name}")).data
        assert [data.train_blend, data.valid_blend] == [str(blend.file) for blend in blends]
        assert {str(option.tokenizer) for option in options} == {data.tokenizer}
    assert [blend.sets for blend in blends] == [[[str(option.output)]] for option in options]


@pytest.mark.parametrize("size", SIZES)
def test_models_of_a_size_have_about_as_many_parameters(size):
    models = [load_stage(stages.path(f"{size}/{name}")).model for name in OF_A_SIZE]
    millions = [count_parameters(model) / 1e6 for model in models]
    assert millions == pytest.approx([float(size.removesuffix("m"))] * len(millions), rel=0.04)
    for model in models:
        assert model.nheads == 16
        if "-" in model.layers:
            assert model.ffn_hidden_size == -(-8 * model.hidden_size // 3 // 256) * 256


@pytest.mark.parametrize("size", SIZES)
def test_models_of_a_size_are_evaluated_on_the_papers_tasks(size):
    configs = {name: load_stage(stages.path(f"{size}/{name}")) for name in OF_A_SIZE}
    assert [name for name in OF_A_SIZE if configs[name].evaluation is None] == ["pretrain-m", "pretrain-d"]
    python, *words = chain.evaluation_command(configs["palimpsa"], Path("/runs/a stage"), "/a venv/bin/python3")
    assert (python, words[:2]) == ("/a venv/bin/python3", ["-m", "megatron_palimpsa"])
    chosen = cli.parse(words[2:])
    assert chosen.model == chosen.output.parent == Path("/runs/a stage")
    assert (chosen.tasks, chosen.limit, chosen.data) == (("paper",), None, Path("data/evaluation"))
    assert len({config.evaluation for config in configs.values()}) == 2


def test_models_of_the_loss_by_position_differ_in_importance_alone():
    paths = recipes.find_recipes(["position/run"])
    text, without, with_importance = configs = [chain.load_recipe(path, []) for path in paths]
    chain.check_folders(paths, configs)
    pattern = with_importance.model.pattern
    model = dataclasses.replace(with_importance.model, pattern=pattern.replace("P", "M"))
    assert "P" in pattern
    assert without == dataclasses.replace(with_importance, name=without.name, model=model)
    (command,) = text.then
    prepared = preparation.words(command)
    data = without.data
    assert {Path(file).parents[1] for file in (data.train_blend, data.valid_blend)} == {Path(prepared[-1])}
    assert Path(data.tokenizer).parent == Path(prepared[-1])
    # The command that the documents give compares them on their validation text.
    (line,) = re.findall(r"^    \S+ (eval nll runs/position/.*(?:\n        .*)*)", EVALUATION.read_text(), re.MULTILINE)
    chosen = cli.parse(shlex.split(line.replace("\\", "")))
    assert (chosen.a, chosen.b) == (without.folder, with_importance.folder)
    assert (chosen.blend, chosen.length) == (Path(data.valid_blend), without.model.seq_length)


def _words(array) -> list[str]:
    return preparation.words(array.command)


def _is_set(command: str, index: int) -> bool:
    words = preparation.words(command)
    return index + 3 < len(words) and words[index + 2] == "--set"


def test_missing_base_is_one_message(capsys, tmp_path, monkeypatch, large_disk):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "2.7b-control/stage-1", "--nproc", "8", "--dry-run"]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "init_from.stage='base': there is no stage folder runs/2.7b-control/base" in message


def test_readme_has_the_table_of_stages():
    assert table() in (ROOT / "README.md").read_text(), f"README.md lacks this table:\n{table()}"
