"""Megatron's hybrid stack with the layer symbol `P` and without Transformer Engine."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_palimpsa.model.mixer_m import MixerM
from megatron_palimpsa.model.mixer_parts import MixerOptions
from megatron_palimpsa.model.norm import RMSNorm
from megatron_palimpsa.model.recompute import dropping

PALIMPSA = "P"


def register_symbol() -> None:
    """Make `P` a layer symbol of Megatron's pattern parser; a second call changes nothing."""
    Symbols.PALIMPSA = PALIMPSA
    Symbols.VALID_LAYERS.add(PALIMPSA)


register_symbol()


class MixerLayer(MambaLayer):
    """A `P` or `M` layer: norm, mixer, residual."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaLayerSubmodules,
        layer_number: int,
        options: MixerOptions,
        importance_layers: frozenset[int],
        **kwargs: Any,
    ) -> None:
        mixer = ModuleSpec(module=MixerM, params={"options": options, "importance": layer_number in importance_layers})
        super().__init__(config, dataclasses.replace(submodules, mixer=mixer), layer_number, **kwargs)


class PalimpsaStack(HybridStack):
    """A pipeline stage's layers and, on the last stage, the final norm.

    Megatron's stack builds a layer by the symbol alone and knows nothing of `P`: it is shown `M` in its place, and
    the entry for `M` learns from the numbers of the layers which of them have importance.

    Args:
        options: of all mixers.
        recompute_cheap: activations that are cheap to form again are not kept for the backward pass (`recompute`).
        layer_type_list: this stage's symbols.
        pp_layer_offset: layers of the stages before.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        options: MixerOptions,
        layer_type_list: list[str],
        recompute_cheap: bool = False,
        pp_layer_offset: int = 0,
        **kwargs: Any,
    ) -> None:
        importance_layers = frozenset(
            pp_layer_offset + index for index, symbol in enumerate(layer_type_list, start=1) if symbol == PALIMPSA
        )
        mixer_layer = ModuleSpec(
            module=MixerLayer,
            params={"options": options, "importance_layers": importance_layers},
            submodules=submodules.mamba_layer.submodules,
        )
        super().__init__(
            config,
            dataclasses.replace(submodules, mamba_layer=mixer_layer),
            layer_type_list=[Symbols.MAMBA if symbol == PALIMPSA else symbol for symbol in layer_type_list],
            pp_layer_offset=pp_layer_offset,
            # Megatron's own would be Transformer Engine's.
            post_layer_norm=False,
            **kwargs,
        )
        self.recompute_cheap = recompute_cheap
        self.layer_type_list = layer_type_list
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As HybridStack's."""
        with dropping() if self.recompute_cheap else contextlib.nullcontext():
            return super().forward(*args, **kwargs)
