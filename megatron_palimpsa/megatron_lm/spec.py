"""The stack to name after `--spec`: layers for `P`, `M`, `*` and `-` with their settings from Megatron's arguments."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import get_args

from megatron_palimpsa.megatron_lm.arguments import mixer_options, model_config
from megatron_palimpsa.megatron_lm.preparation import prepare
from megatron_palimpsa.model.mixer_parts import MixerOptions
from megatron_palimpsa.model.naming import global_stack_parameters
from megatron_palimpsa.model.spec import hybrid_stack_spec
from megatron_palimpsa.model.stack import PalimpsaStack
from megatron_palimpsa.model.weights import initialize_parameters
from megatron_palimpsa.parallel import finalize_model_grads


class StackFromArgs(PalimpsaStack):
    """PalimpsaStack for Megatron's loop, which knows of no step of ours: everything is set up where it is built.

    Weights are those that our trainer draws from the same --seed, whatever the layout; embedding and output layer are
    Megatron's to draw. The gradients of parameters that all tensor-parallel ranks hold are summed where Megatron
    finishes its own, in `config.finalize_model_grads_func`.
    """

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, **kwargs: Any) -> None:
        args = get_args()
        prepare(args)
        _configure(config)
        super().__init__(config, submodules, options=mixer_options(args), **kwargs)
        initialize_parameters(global_stack_parameters(self), model_config(args), args.seed, self.tp_group)


def _configure(config: TransformerConfig) -> None:
    config.finalize_model_grads_func = finalize_model_grads
    if config.fp32_residual_connection:
        # The residual stream is what goes from stage to stage; Megatron takes the parameters' dtype for it.
        config.pipeline_dtype = torch.float32


stack_spec = ModuleSpec(module=StackFromArgs, submodules=hybrid_stack_spec(MixerOptions()).submodules)
