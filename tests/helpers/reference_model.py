"""Palimpsa-M and Mamba2 models in float64, token by token, written from the equations and sharing nothing with ours.

Weights are unsplit tensors by global names.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from megatron_palimpsa.config import ModelConfig

Weights = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    grouped = x.reshape(groups, -1)
    return (grouped / torch.sqrt((grouped**2).mean(1, keepdim=True) + eps)).reshape(-1) * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def convolve(window: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """The last tokens of `window`, oldest first; missing ones are zero."""
    width = weight.shape[1]
    total = bias
    for back in range(min(width, len(window))):
        total = total + weight[:, width - 1 - back] * window[-1 - back]
    return silu(total)


def mix_document(w: Weights, inputs: list[Tensor], model: ModelConfig, importance: bool) -> list[Tensor]:
    """One document through one mixer; `w` holds the mixer's weights by their own names."""
    heads, groups, K, V = model.nheads, model.ngroups, model.d_state, model.headdim
    M = [torch.zeros(V, K, dtype=torch.float64) for _ in range(heads)]
    above_prior = [torch.zeros(V, K, dtype=torch.float64) for _ in range(heads)]
    seen: dict[str, list[Tensor]] = {"x": [], "B": [], "C": []}
    outputs = []
    for u in inputs:
        for part in seen:
            seen[part].append(w[f"{part}_weight"] @ u)
        x, B, C = (convolve(seen[part], w[f"conv_{part}_weight"], w[f"conv_{part}_bias"]) for part in seen)
        dt = softplus(w["dt_weight"] @ u + w["dt_bias"])
        gate = torch.sigmoid(w["beta_up_weight"] @ (w["beta_down_weight"] @ u)) if importance else None
        y = []
        for head in range(heads):
            group, channels = head // (heads // groups), slice(head * V, (head + 1) * V)
            k, q = (part[group * K : (group + 1) * K] for part in (B, C))
            alpha = torch.exp(-dt[head] * torch.exp(w["A_log"][head]))
            M[head] = alpha * M[head] + torch.outer(x[channels] * dt[head], k)
            memory = M[head]
            if gate is not None:
                beta = gate[channels] * softplus(w["b_scale"][head]) * dt[head]
                above_prior[head] = alpha * above_prior[head] + torch.outer(beta, k**2)
                memory = memory / (torch.exp(w["prior_log"][head]) + above_prior[head])
            y.append(memory @ q + w["D"][head] * x[channels])
        gated = torch.cat(y) * silu(w["z_weight"] @ u)
        norm_groups = model.norm_groups or groups
        outputs.append(w["out_proj.weight"] @ rms_norm(gated, w["norm.weight"], model.norm_eps, norm_groups))
    return outputs


def hidden_states(weights: Weights, model: ModelConfig, document: list[int]) -> list[Tensor]:
    """The residual stream of one document behind all layers (`P` and `M` only)."""
    stream = [weights["embedding.word_embeddings.weight"][token] for token in document]
    for layer, symbol in enumerate(model.layers):
        prefix = f"decoder.layers.{layer}."
        own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        mixer = {name.removeprefix("mixer."): w for name, w in own.items() if name.startswith("mixer.")}
        normed = [rms_norm(h, own["norm.weight"], model.norm_eps) for h in stream]
        mixed = mix_document(mixer, normed, model, importance=symbol == "P")
        stream = [h + m for h, m in zip(stream, mixed, strict=True)]
    return stream


def losses(weights: Weights, model: ModelConfig, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Negative log-likelihood of the labels of the tokens inside documents, [cu_seqlens[-1]]."""
    head = weights["embedding.word_embeddings.weight" if model.tie_embeddings else "output_layer.weight"]
    result = []
    offsets = cu_seqlens.tolist()
    for start, end in itertools.pairwise(offsets):
        document = tokens[0, start:end].tolist()
        for position, h in enumerate(hidden_states(weights, model, document), start=start):
            logits = head @ rms_norm(h, weights["decoder.final_norm.weight"], model.norm_eps)
            largest = logits.max()
            log_sum = largest + torch.log(torch.exp(logits - largest).sum())
            result.append(log_sum - logits[labels[0, position]])
    return torch.stack(result)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64."""
    norm = float(expected.double().norm())
    difference = float((actual.double() - expected.double()).norm())
    return difference / norm if norm else math.inf if difference else 0.0
