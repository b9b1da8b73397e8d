"""A model with its optimizer: one step on a batch of examples, accuracy on many, and everything as named tensors.

A step leaves nothing for the host to wait for: losses stay on the device until an epoch's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from megatron_palimpsa.experiments.mqar.config import SweepConfig, Training, stage_of
from megatron_palimpsa.experiments.mqar.examples import Examples
from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.statistics import record_memory

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def query_logits(model: HybridModel, examples: Examples) -> Tensor:
    """Logits at the queries alone [B, P, V], without those of the other three quarters of the tokens and more."""
    places = examples.queries.t().unsqueeze(-1)

    def select(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        (hidden,) = arguments  # [L, B, h] -> [P, B, h]
        return (hidden.gather(0, places.expand(-1, -1, hidden.shape[-1])),)

    handle = model.output_layer.register_forward_pre_hook(select)
    try:
        return model(input_ids=examples.tokens, position_ids=None, attention_mask=None)
    finally:
        handle.remove()


class Learner:
    """A run's model and AdamW; the optimizer steps fp32 copies of weights that the model holds in bf16.

    Args:
        config: of the sweep.
        lr: peak learning rate.
        seed: of the initial weights.
    """

    def __init__(self, config: SweepConfig, lr: float, seed: int) -> None:
        self._lr = lr
        self._settings: Training = config.train
        self.model = build_model(stage_of(config, lr, seed))
        self._weights = {
            name: parameter for name, parameter in global_parameters(self.model) if parameter.requires_grad
        }
        self._masters = {
            name: weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for name, weight in self._weights.items()
        }
        self._rounded = [
            (weight, self._masters[name]) for name, weight in self._weights.items() if self._masters[name] is not weight
        ]
        for _, master in self._rounded:
            master.grad = torch.zeros_like(master)
        self.begin_lesson()

    @property
    def device(self) -> torch.device:
        return next(iter(self._weights.values())).device

    def begin_lesson(self) -> None:
        """Moments start from zero."""
        decayed: list[Tensor] = []
        spared: list[Tensor] = []
        for name, weight in self._weights.items():
            group = spared if getattr(weight, "no_weight_decay", False) else decayed
            group.append(self._masters[name])
        settings = self._settings
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}],
            lr=self._lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=self.device.type == "cuda" or None,
        )

    def step(self, batch: Examples, fraction: float) -> Tensor:
        """One step with this fraction of the peak learning rate; -> the batch's mean loss, a scalar."""
        loss = _mean_loss(query_logits(self.model, batch), batch.answers)
        loss.backward()
        if self._rounded:
            # At once: one by one they would take the host longer than the GPU.
            weights, masters = zip(*self._rounded, strict=True)
            torch._foreach_copy_(_gradients(masters), _gradients(weights))
        if self._settings.clip_grad is not None:
            nn.utils.clip_grad_norm_(self._masters.values(), self._settings.clip_grad)
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * fraction
        self._optimizer.step()
        for weight in self._weights.values():
            weight.grad = None
        self._copy_to_model()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, examples: Examples, batch_size: int) -> tuple[float, float, dict[int, dict[str, float]]]:
        """-> accuracy and mean loss over all queries, and the memory statistics of the first batch by layer."""
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        memory: dict[int, dict[str, float]] = {}
        for numbers in torch.arange(len(examples), device=self.device).split(batch_size):
            batch = examples.batch(numbers)
            if memory:
                logits = query_logits(self.model, batch)
            else:
                with record_memory(self.model) as recorder:
                    logits = query_logits(self.model, batch)
                memory = recorder.result()
            right += (logits.argmax(dim=-1) == batch.answers).sum()
            loss += _mean_loss(logits, batch.answers).double() * batch.answers.numel()
        queries = examples.answers.numel()
        return int(right) / queries, float(loss) / queries, memory

    def state(self) -> dict[str, Tensor]:
        """fp32 weights and AdamW's moments by name."""
        tensors = {f"weights.{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            moments = self._optimizer.state.get(master, {})
            tensors |= {f"{kind}.{name}": moments[kind] for kind in _MOMENTS if kind in moments}
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], with_moments: bool) -> None:
        """Go on from what `state` gave; moments stay zero where a lesson begins.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype.
        """
        for name, master in self._masters.items():
            master.copy_(_stored(tensors, f"weights.{name}", master.shape))
        self._copy_to_model()
        self.begin_lesson()
        if not with_moments:
            return
        for name, master in self._masters.items():
            place = dict.fromkeys(_MOMENTS, master.device)
            if not self._optimizer.defaults["fused"]:
                place["step"] = torch.device("cpu")
            self._optimizer.state[master] = {
                kind: _stored(tensors, f"{kind}.{name}", master.shape if kind != "step" else torch.Size()).to(
                    place[kind], copy=True
                )
                for kind in _MOMENTS
            }

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        if self._rounded:
            torch._foreach_copy_([weight for weight, _ in self._rounded], [master for _, master in self._rounded])


def lr_fraction(step: int, steps: int, warmup_steps: int) -> float:
    """Share of the peak learning rate in step `step` from 0 of `steps`: linear warm-up, then a cosine down to zero."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))


def _stored(tensors: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype != torch.float32:
        raise ValueError(f"it has no {name} in fp32 of shape {list(shape)}")
    return tensor


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _mean_loss(logits: Tensor, answers: Tensor) -> Tensor:
    """fp32 negative log-likelihood of answers [B, P] under logits [B, P, V]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten())
