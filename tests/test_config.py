"""Strict stages: every wrong input is refused with its key, its value and what is allowed."""

import dataclasses

import pytest
import yaml

from megatron_palimpsa.config import (
    ConfigError,
    check_stage,
    load_stage,
    parse_count,
    save_resolved,
    to_dict,
)

STAGE = """
name: stage
output_dir: runs
model: {pattern: "MP", hidden_size: 32, vocab_size: 100, seq_length: 64, d_state: 8, headdim: 16, beta_rank: 4}
data: {train_blend: train.yaml, valid_blend: valid.yaml, tokenizer: tokenizer.model}
train: {tokens: 10K, global_batch_tokens: 256, precision: fp32}
optimizer: {lr: 1e-3, warmup_steps: 2}
"""


@pytest.fixture
def stage_file(tmp_path):
    path = tmp_path / "stage.yaml"
    path.write_text(STAGE)
    return path


def refusal(path, *overrides, world_size=1) -> str:
    with pytest.raises(ConfigError) as caught:
        check_stage(load_stage(path, list(overrides)), world_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("64Ki", 65536), ("1.5M", 1_500_000), ("10B", 10**10), ("2T", 2 * 10**12), (" 1K ", 1000)],
)
def test_count_suffixes(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "K", "-5", "1e6", "10 Q", "1,000"])
def test_other_counts_are_refused(text):
    with pytest.raises(ValueError, match="expected a count"):
        parse_count(text)


def test_defaults_derived_numbers_and_exponents_without_a_dot(stage_file):
    config = load_stage(stage_file)
    check_stage(config)
    assert config.optimizer.lr == 0.001
    assert (config.global_batch_size, config.total_steps) == (4, 40)  # 10,000 tokens end inside the 40th step
    assert (config.model.d_inner, config.model.nheads, config.model.padded_vocab_size) == (64, 4, 112)
    assert config.num_microbatches(2) == 2


def test_overrides_reach_into_sections_and_win(stage_file):
    config = load_stage(stage_file, ["train.micro_batch_size=2", "name=other", "logging.wandb_project=demo"])
    assert (config.train.micro_batch_size, config.name, config.logging.wandb_project) == (2, "other", "demo")


def test_a_pattern_may_begin_with_attention(stage_file):
    model = ["model.num_attention_heads=4", "model.ffn_hidden_size=64"]
    assert load_stage(stage_file, ["model.pattern=*-*-", *model]).model.layers == "*-*-"
    assert 'model.pattern="*\'- *"' in refusal(stage_file, "model.pattern=*'- *")


def test_base_is_merged_key_by_key_and_relative_to_its_file(tmp_path, stage_file):
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("base: ../stage.yaml\nname: child\noptimizer: {lr: 5.0e-4}\n")
    config = load_stage(child)
    assert (config.name, config.optimizer.lr, config.optimizer.warmup_steps) == ("child", 0.0005, 2)


def test_resolved_file_reads_back_to_the_same_stage(tmp_path, stage_file):
    config = load_stage(stage_file, ["init_from.stage=before", "train.stop_at_tokens=2K"])
    save_resolved(config, tmp_path / "resolved.yaml")
    assert load_stage(tmp_path / "resolved.yaml") == config
    # Text that is a number in a recipe, if not to every reader of YAML.
    config = dataclasses.replace(config, name="1e3", output_dir="12e-1")
    save_resolved(config, tmp_path / "resolved.yaml")
    assert load_stage(tmp_path / "resolved.yaml") == config
    assert set(yaml.safe_load((tmp_path / "resolved.yaml").read_text())) == set(to_dict(config))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.tokenz=5", ["unknown key 'train.tokenz'", "global_batch_tokens"]),
        ("modell.pattern=M", ["unknown key 'modell'", "model"]),
        ("name.first=x", ["'name' is not a section"]),
        ("model.hidden_size=wide", ["model.hidden_size='wide'", "integer"]),
        ("model.hidden_size=2.5", ["model.hidden_size=2.5", "integer"]),
        ("model.tie_embeddings=1", ["model.tie_embeddings=1", "boolean"]),
        ("optimizer.lr=0", ["optimizer.lr=0", "greater than 0"]),
        ("optimizer.lr=.nan", ["optimizer.lr", "finite"]),
        ("train.tokens=many", ["train.tokens='many'", "expected a count"]),
        ("train.precision=fp64", ["train.precision='fp64'", "'bf16', 'fp16' or 'fp32'"]),
        ("checkpoint.keep=1", ["checkpoint.keep=1", "greater than or equal to 2"]),
        ("name=../up", ["name='../up'"]),
        ("data.train_blend=", ["data.train_blend=None", "string"]),
        ("train.tokens", ["expected section.key=value"]),
        ("model.pattern=MXP", ["model.pattern='MXP'", "unknown letter 'X'", "P (Palimpsa-M)"]),
        ("model.pattern='||'", ["holds no layer"]),
        ("model.headdim=24", ["model.headdim=24 does not divide", "64"]),
        ("model.ngroups=3", ["model.ngroups=3 does not divide the number of heads, which is 4"]),
        ("model.norm_groups=5", ["model.norm_groups=5 does not divide"]),
        ("model.pattern='M*'", ["model.num_attention_heads is missing"]),
        ("model.rope_theta=10000.0", ["model.rope_theta=10000 is of attention layers (*), the pattern has none"]),
        ("model.pattern='M-'", ["model.ffn_hidden_size is missing"]),
        ("parallel.sequence_parallel=true", ["parallel.sequence_parallel=true needs parallel.tp > 1"]),
        ("train.global_batch_tokens=100", ["train.global_batch_tokens=100 is not a multiple of 64"]),
        ("model.dt_min=0.5", ["model.dt_min=0.5 must be below model.dt_max=0.1"]),
        ("model.a_min=20.0", ["model.a_min=20.0 must be below model.a_max=16.0"]),
        ("optimizer.min_lr=0.1", ["optimizer.min_lr=0.1 is above optimizer.lr=0.001"]),
        ("optimizer.warmup_steps=40", ["optimizer.warmup_steps=40 leaves nothing of the stage's 40 steps"]),
    ],
)
def test_wrong_values_are_refused_by_name(stage_file, override, expected):
    message = refusal(stage_file, override)
    for part in expected:
        assert part in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["parallel.tp=3"], 3, "parallel.tp=3 does not divide the number of heads"),
        (
            ["parallel.tp=2", "parallel.pp=2"],
            2,
            "parallel.tp=2 * parallel.pp=2 * parallel.cp=1 does not divide the number of ranks",
        ),
        (["parallel.cp=3"], 3, "parallel.cp=3 does not divide model.seq_length, which is 64"),
        (
            ["parallel.cp=2"],
            3,
            "parallel.tp=1 * parallel.pp=1 * parallel.cp=2 does not divide the number of ranks",
        ),
        (["parallel.cp=32"], 32, "parallel.cp=32 leaves a rank 2 tokens of a microbatch, fewer than the 3"),
        (["parallel.pp=3"], 3, "parallel.pp=3 does not divide the 2 layers"),
        (["parallel.pp=2", "model.pattern='M|P|M'"], 2, "marks 3 pipeline stages (none may be empty), parallel.pp=2"),
        (["parallel.vpp=2"], 1, "parallel.vpp=2 needs parallel.pp > 1"),
        (["parallel.pp=2", "parallel.vpp=2"], 2, "parallel.pp=2 * parallel.vpp=2 does not divide the 2 layers"),
        (["parallel.pp=2", "parallel.vpp=2", "model.pattern='M|P|M'"], 2, "parallel.pp=2 * parallel.vpp=2 needs 4"),
        (["parallel.pp=2", "parallel.vpp=2", "model.pattern='M|P||M'"], 2, "none may be empty"),
        (
            ["parallel.pp=2", "parallel.vpp=2", "model.pattern=MPMP", "train.global_batch_tokens=192"],
            2,
            "train.global_batch_tokens=192 gives each rank 3 microbatches; "
            "with parallel.vpp=2 they must be a multiple of parallel.pp=2",
        ),
        (
            [],
            3,
            "train.global_batch_tokens=256 is not a multiple of 192 (train.micro_batch_size 1 * data-parallel size 3 "
            "* model.seq_length 64); with train.micro_batch_size=1 it may be 384, or split the ranks with parallel.tp",
        ),
        (["train.micro_batch_size=4"], 2, "model.seq_length 64); train.micro_batch_size=2 fits"),
    ],
)
def test_layouts_that_cannot_run_are_refused(stage_file, overrides, world_size, expected):
    assert expected in refusal(stage_file, *overrides, world_size=world_size)


@pytest.mark.parametrize(
    ("pattern", "stages"),
    [
        ("MP*-", ["MP*-"]),
        ("MP|*-", ["MP*-"]),
        ("MP*-", ["MP", "*-"]),
        ("M|P*-", ["M", "P*-"]),
        ("MPMPMP", ["MP"] * 3),
        ("M|P*|-|P", ["M", "P*", "-", "P"]),
    ],
)
def test_pipeline_stages_are_those_marked_or_even(stage_file, pattern, stages):
    model = dataclasses.replace(load_stage(stage_file).model, pattern=pattern)
    assert model.stages(len(stages)) == stages


def test_every_mistake_of_a_file_is_named_at_once(stage_file):
    message = refusal(stage_file, "train.tokenz=5", "model.hidden_size=wide")
    assert "tokenz" in message
    assert "hidden_size" in message


def test_missing_sections_and_files(tmp_path):
    (tmp_path / "empty.yaml").write_text("name: a\noutput_dir: b\n")
    assert "model is missing" in refusal(tmp_path / "empty.yaml")
    assert "cannot read the configuration" in refusal(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "expected a mapping of sections, found list" in refusal(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("name: [\n")
    assert "not valid YAML" in refusal(tmp_path / "broken.yaml")
    (tmp_path / "date.yaml").write_text(STAGE + "seed: 2020-01-01\n")
    assert "seed='2020-01-01'" in refusal(tmp_path / "date.yaml")
    (tmp_path / "control.yaml").write_text("name: \0\n")
    assert "not valid YAML" in refusal(tmp_path / "control.yaml")
    (tmp_path / "nested.yaml").write_text("[" * 10**4)
    assert "not valid YAML" in refusal(tmp_path / "nested.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.tokens=" + "9" * 400 + "K", "train.tokens"),
        ("train.tokens=" + "9" * 400, "train.tokens"),
        ("seed=" + "9" * 5000, "not valid YAML"),
        (f"seed={2**63}", "seed="),
        ("seed=!!int x", "not valid YAML"),
        ("seed=!!timestamp x", "not valid YAML"),
        ("seed=&a [*a]", "Circular reference"),
        ("seed=\ud800", "not valid YAML"),
        ("logging.wandb_project=a/b", "logging.wandb_project"),
        ('data.tokenizer="a\\0b"', "holds a NUL"),
    ],
)
def test_values_that_python_cannot_convert_are_refused(stage_file, override, expected):
    assert expected in refusal(stage_file, override)


def test_large_counts_are_exact(stage_file):
    config = load_stage(stage_file, ["train.tokens=9007199254740993", "train.global_batch_tokens=1"])
    assert config.total_steps == 2**53 + 1
    assert parse_count("9007199254740993") == 2**53 + 1


def test_a_date_is_a_name(stage_file):
    assert load_stage(stage_file, ["name=2026-11-29"]).name == "2026-11-29"


def test_base_circle(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    assert "base files form a circle" in refusal(tmp_path / "a.yaml")


def test_duplicate_key_names_the_key_and_the_file(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text(STAGE + "seed: 1\nseed: 2\n")
    message = refusal(path)
    assert "'seed' is given twice" in message
    assert "twice.yaml" in message


def test_stages_are_frozen(stage_file):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_stage(stage_file).seed = 5
