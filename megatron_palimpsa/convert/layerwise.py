"""A model run layer by layer, each read from its checkpoint when its turn comes: one layer's weights are in memory."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_palimpsa.config import ModelConfig, ParallelConfig, StageConfig
from megatron_palimpsa.engine.boxes import Box, Shape
from megatron_palimpsa.engine.optimizer_state import Local, load_weights, locals_of
from megatron_palimpsa.model import build_model
from megatron_palimpsa.training.checkpoint_format import Reader

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NO_EVIDENCE = -1e3
"""A b_scale whose softplus is 0 in float32."""


@dataclass(frozen=True)
class Parameter:
    """Of a whole model."""

    shape: Shape
    trainable: bool
    """Whether an optimizer has moments for it."""


class LayerByLayer:
    """One layer of each letter that a model's pattern may have, with embedding, final norm and output layer.

    Process groups of this one process must exist (`parallel.initialize`).
    """

    def __init__(self, stage: StageConfig, letters: str) -> None:
        """`stage` gives the geometry; its pattern is of no account."""
        self._letters = "".join(dict.fromkeys(letters))
        stage = dataclasses.replace(
            stage,
            model=dataclasses.replace(stage.model, pattern=self._letters),
            parallel=ParallelConfig(distributed_optimizer=False),
            train=dataclasses.replace(stage.train, precision="fp32", recompute="none"),
        )
        self._model = build_model(stage).eval()
        self.device = next(self._model.parameters()).device
        self._of_layers: list[list[Local]] = [[] for _ in self._letters]
        self._around: list[Local] = []
        for local in locals_of([self._model]):
            layer = _LAYER.fullmatch(local.parts[0].key)
            (self._of_layers[int(layer[1])] if layer else self._around).append(local)

    def parameters(self, model: ModelConfig) -> dict[str, Parameter]:
        """Those of a model of these letters, by global name."""
        found = {local.parts[0].key: _described(local) for local in self._around}
        for index, letter in enumerate(model.layers):
            for local in self._of_layers[self._letters.index(letter)]:
                found[_of_layer(local.parts[0].key, index)] = _described(local)
        return found

    def load_around(self, reader: Reader) -> None:
        """Take embedding, final norm and output layer from a checkpoint."""
        load_weights([], self._around, reader.read)

    def load(self, reader: Reader, letter: str, index: int) -> None:
        """Take the layer of this letter from the checkpoint's layer `index`."""

        def read(box: Box, out: Tensor) -> None:
            reader.read(dataclasses.replace(box, key=_of_layer(box.key, index)), out)

        load_weights([], self._of_layers[self._letters.index(letter)], read)

    @torch.no_grad()
    def silence(self, letter: str) -> None:
        """Leave the layer of this letter its importance's computation, and set beta to 0 and the prior to 1."""
        mixer = self._model.decoder.layers[self._letters.index(letter)].mixer
        mixer.b_scale.fill_(_NO_EVIDENCE)
        mixer.prior_log.zero_()

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Ids [B, T] -> the residual stream [T, B, hidden]."""
        return self._model.embedding(input_ids=tokens.to(self.device), position_ids=None)

    @torch.no_grad()
    def apply(self, letter: str, hidden: Tensor) -> Tensor:
        """The residual stream [T, B, hidden] behind the layer of this letter; rows are documents."""
        out = self._model.decoder.layers[self._letters.index(letter)](hidden_states=hidden, attention_mask=None)
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream [T, B, hidden] -> logits of all ids of the vocabulary [T, B, vocabulary]."""
        model = self._model
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits, _ = model.output_layer(model.decoder.final_norm(hidden), weight=weight)
        return logits[..., : model.model_config.vocab_size].float()


def _of_layer(key: str, index: int) -> str:
    layer = _LAYER.fullmatch(key)
    assert layer is not None, key
    return f"decoder.layers.{index}.{layer[2]}"


def _described(local: Local) -> Parameter:
    return Parameter(local.parts[0].global_shape, local.parameter.requires_grad)
