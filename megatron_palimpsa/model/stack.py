"""Megatron's hybrid stack with the layer symbols `P`, `Q` and `L` and without Transformer Engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_palimpsa.model.mixer import Mixer
from megatron_palimpsa.model.mixer_d import MixerD
from megatron_palimpsa.model.mixer_m import MixerM
from megatron_palimpsa.model.mixer_parts import MixerOptions
from megatron_palimpsa.model.norm import RMSNorm
from megatron_palimpsa.model.recompute import dropping

MIXERS: dict[str, tuple[type[Mixer], bool]] = {
    "P": (MixerM, True),
    "M": (MixerM, False),
    "Q": (MixerD, True),
    "L": (MixerD, False),
}
"""The mixer of each symbol, and whether it has importance."""
NEW_SYMBOLS = {"PALIMPSA_M": "P", "PALIMPSA_D": "Q", "PALIMPSA_D_WITHOUT_IMPORTANCE": "L"}
"""Those that Megatron does not know, by the attribute of its `Symbols`."""


def register_symbols() -> None:
    """Make them layer symbols of Megatron's pattern parser; a second call changes nothing."""
    for name, symbol in NEW_SYMBOLS.items():
        setattr(Symbols, name, symbol)
        Symbols.VALID_LAYERS.add(symbol)


register_symbols()


class MixerLayer(MambaLayer):
    """A layer with one of the `MIXERS`: norm, mixer, residual."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaLayerSubmodules,
        layer_number: int,
        options: MixerOptions,
        symbols: Mapping[int, str],
        **kwargs: Any,
    ) -> None:
        module, importance = MIXERS[symbols[layer_number]]
        mixer = ModuleSpec(module=module, params={"options": options, "importance": importance})
        super().__init__(config, dataclasses.replace(submodules, mixer=mixer), layer_number, **kwargs)


class PalimpsaStack(HybridStack):
    """A pipeline stage's layers and, on the last stage, the final norm.

    Megatron's stack builds a layer by the symbol alone and knows only `M` of the `MIXERS`: it is shown `M` in place of
    all of them, and the entry for `M` finds the symbol by the number of the layer.

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
        mixer_layer = ModuleSpec(
            module=MixerLayer,
            params={"options": options, "symbols": dict(enumerate(layer_type_list, start=pp_layer_offset + 1))},
            submodules=submodules.mamba_layer.submodules,
        )
        super().__init__(
            config,
            dataclasses.replace(submodules, mamba_layer=mixer_layer),
            layer_type_list=[Symbols.MAMBA if symbol in MIXERS else symbol for symbol in layer_type_list],
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
