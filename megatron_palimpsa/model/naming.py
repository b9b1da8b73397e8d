"""The model behind its wrappers, and parameter names that do not depend on the layout."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import nn

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def unwrap(model: nn.Module) -> HybridModel:
    """The HybridModel itself, or the one inside the wrappers (data parallelism, engines) around it."""
    return next(module for module in model.modules() if isinstance(module, HybridModel))


def global_parameters(model: HybridModel) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters by the names that they have in an unsplit model.

    Layers are counted from 0 over all pipeline stages, and the last stage's copy of tied embeddings goes by the name
    of the embedding.
    """
    for name, parameter in model.named_parameters():
        if name == OUTPUT and model.share_embeddings_and_output_weights:
            name = EMBEDDING
        yield _global_name(name, model.decoder), parameter


def global_stack_parameters(stack: HybridStack) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of the layers and the final norm alone, by the same names."""
    for name, parameter in stack.named_parameters():
        yield _global_name(f"decoder.{name}", stack), parameter


def _global_name(name: str, stack: HybridStack) -> str:
    layer = _LAYER.match(name)
    if layer is None:
        return name
    return f"decoder.layers.{stack.layers[int(layer[1])].layer_number - 1}.{name[layer.end() :]}"
