"""What Megatron-LM has to be told once a process before it trains Palimpsa layers."""

from __future__ import annotations

import argparse
import functools
import importlib.util
from pathlib import Path
from typing import Any

from megatron.core.datasets import utils as dataset_utils
from megatron.training import training

from megatron_palimpsa.engine.flops import importance_flops_per_token, train_flops_per_token
from megatron_palimpsa.megatron_lm.arguments import check_args, model_config
from megatron_palimpsa.megatron_lm.optimizer_checkpoints import repair_optimizer_checkpoints
from megatron_palimpsa.model.stack import register_symbols


def prepare(args: argparse.Namespace) -> None:
    """Check the arguments and close the gaps in Megatron; a second call changes nothing.

    The stack calls it when it is built; an entry script calls it earlier, so that wrong arguments are refused before
    any GPU is touched.

    Raises:
        ConfigError: see `check_args`.
    """
    check_args(args)
    register_symbols()
    count_importance_flops()
    use_shipped_dataset_helpers()
    repair_optimizer_checkpoints()


def count_importance_flops() -> None:
    """Let Megatron's FLOPs, and so its throughput, count our layers.

    A `P` layer is its own `M` and what importance adds; with `Q` or `L` layers all of the model is counted as stages'.
    """
    megatrons = training.num_floating_point_operations
    if hasattr(megatrons, "__wrapped__"):
        return

    @functools.wraps(megatrons)
    def with_importance(
        args: argparse.Namespace,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> float:
        pattern = args.hybrid_layer_pattern or ""
        tokens = total_real_tokens_in_batch or batch_size * args.seq_length
        if set(pattern) & {"Q", "L"}:
            return tokens * train_flops_per_token(model_config(args))
        plain = argparse.Namespace(**{**vars(args), "hybrid_layer_pattern": pattern.replace("P", "M") or None})
        flops = megatrons(plain, batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch)
        if layers := pattern.count("P"):
            flops += 3 * tokens * layers * importance_flops_per_token(model_config(args))
        return flops

    training.num_floating_point_operations = with_importance


def use_shipped_dataset_helpers() -> None:
    """Megatron runs `make` for its data set helpers; the wheel brings them compiled, and no Makefile."""
    folder = Path(dataset_utils.__file__).parent
    if (folder / "Makefile").exists() or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return
    dataset_utils.compile_helpers = _nothing_to_compile


def _nothing_to_compile(*args: Any) -> None:
    pass
