"""The model behind its wrappers, and parameter names that do not depend on the layout."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
        layer = _LAYER.match(name)
        if layer:
            number = model.decoder.layers[int(layer[1])].layer_number
            name = f"decoder.layers.{number - 1}.{name[layer.end() :]}"
        elif name == OUTPUT and model.share_embeddings_and_output_weights:
            name = EMBEDDING
        yield name, parameter
