"""What the stack refuses on Megatron-LM's command line, before any process group or GPU."""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import megatron_lm
from helpers.stages import tiny_stage
from megatron.training import arguments as megatron_arguments
from megatron.training import training

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.engine import flops
from megatron_palimpsa.megatron_lm import check_args, prepare, pretrain
from megatron_palimpsa.megatron_lm.arguments import mixer_options, model_config

ROOT = Path(__file__).parents[2]
CONFIG = tiny_stage(optimizer={"lr": 1e-3, "schedule": "constant", "warmup_steps": 0}, train={"precision": "fp32"})
OURS = ("--palimpsa-d-conv", "3", "--palimpsa-norm-groups", "2", "--palimpsa-train-prior")


@pytest.fixture(scope="module")
def parsed() -> argparse.Namespace:
    return megatron_lm.parse(megatron_lm.arguments(CONFIG, *OURS))


@pytest.fixture
def args(parsed: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(parsed))


def test_settings_reach_the_model(args: argparse.Namespace) -> None:
    check_args(args)
    options = mixer_options(args)
    assert (options.d_conv, options.norm_groups, options.beta_rank, options.train_prior) == (3, 2, 4, True)
    model = model_config(args)
    for name in ("pattern", "hidden_size", "d_state", "headdim", "expand", "ngroups", "beta_rank", "tie_embeddings"):
        assert getattr(model, name) == getattr(CONFIG.model, name), name
    assert model.padded_vocab_size == CONFIG.model.padded_vocab_size


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl local"),
        ({"gradient_accumulation_fusion": True}, "--no-gradient-accumulation-fusion"),
        ({"normalization": "LayerNorm"}, "--normalization RMSNorm, not LayerNorm"),
        ({"add_bias_linear": True}, "--disable-bias-linear"),
        ({"position_embedding_type": "rope"}, "--position-embedding-type none, not rope"),
        ({"fp16": True}, "--fp16"),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"init_model_with_meta_device": True}, "--init-model-with-meta-device"),
        ({"use_cpu_initialization": True}, "--use-cpu-initialization"),
        ({"attention_dropout": 0.1}, "--attention-dropout 0, not 0.1"),
        ({"swiglu": False}, "--swiglu"),
        ({"mamba_num_heads": None}, "--mamba-num-heads is missing: 8 "),
        ({"mamba_num_heads": 9}, "--mamba-num-heads 9 .* not a multiple of --hidden-size 32"),
        ({"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size 3 does not divide --mamba-num-heads"),
        ({"mamba_num_groups": 3}, "--mamba-num-groups 3 does not divide --mamba-num-heads"),
        ({"palimpsa_norm_groups": 5}, "--palimpsa-norm-groups 5 does not divide .* 64"),
        ({"hybrid_layer_pattern": "MPG"}, "--hybrid-layer-pattern MPG: 'G'"),
        ({"hybrid_layer_pattern": None}, "--hybrid-layer-pattern is missing"),
        ({"spec": None}, r"--spec \(none\) builds no P layers"),
        ({"spec": ["some.module", "spec"]}, "--spec some.module spec builds no P layers"),
    ],
)
def test_what_cannot_work_is_refused_by_its_flag(
    args: argparse.Namespace, changed: dict[str, Any], message: str
) -> None:
    vars(args).update(changed)
    with pytest.raises(ConfigError, match=message):
        check_args(args)


def test_the_documented_command_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "megatron_lm.md").read_text().replace("\\\n", " ")
    command = shlex.split(
        next(line for line in page.splitlines() if "-m megatron_palimpsa.megatron_lm.pretrain" in line)
    )
    monkeypatch.setenv(*command[0].split("=", 1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(megatron_arguments, "get_device_arch_version", lambda: 9)
    arguments = command[command.index("megatron_palimpsa.megatron_lm.pretrain") + 1 :]
    check_args(megatron_lm.parse(arguments))


def test_missing_flags_are_named() -> None:
    with pytest.raises(ConfigError, match="extra_args_provider=add_palimpsa_args"):
        check_args(argparse.Namespace(hybrid_layer_pattern="P"))


def test_entry_ends_with_two_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *megatron_lm.arguments(CONFIG), "--normalization", "LayerNorm"])
    monkeypatch.setattr(pretrain, "pretrain", lambda *args: pytest.fail("started"))
    for gpu, message in ((False, "needs a GPU"), (True, "give --normalization RMSNorm")):
        if gpu:
            monkeypatch.setattr(pretrain, "require_gpu", lambda: None)
        else:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as ended:
            pretrain.main()
        megatron_lm.clear_globals()
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert "megatron_palimpsa: " in err
        assert message in err


def test_flops_count_importance(args: argparse.Namespace) -> None:
    """A P layer is Megatron's M layer and what our own count has a P layer do beyond an M layer."""
    prepare(args)

    def flops_of(pattern: str) -> float:
        args.hybrid_layer_pattern = pattern
        return training.num_floating_point_operations(args, 3)

    tokens = 3 * CONFIG.model.seq_length
    added = flops_of("PMP") - flops_of("MMM")
    palimpsa, mamba2 = (
        flops.train_flops_per_token(replace(CONFIG.model, pattern=pattern)) for pattern in ("PMP", "MMM")
    )
    assert added == pytest.approx(tokens * (palimpsa - mamba2))
    assert flops_of("MMM") > added > 0
