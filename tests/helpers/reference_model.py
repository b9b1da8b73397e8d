"""Palimpsa-M, Mamba2 and Palimpsa-D in float64, token by token, from the equations and sharing nothing with ours.

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


def convolve(window: list[Tensor], weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The last tokens of `window`, oldest first; missing ones are zero."""
    width = weight.shape[1]
    total = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias
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


def mix_document_d(w: Weights, inputs: list[Tensor], model: ModelConfig, importance: bool) -> list[Tensor]:
    """`mix_document` of Palimpsa-D."""
    heads, K, V = model.nheads, model.d_state, model.headdim
    M = [torch.zeros(V, K, dtype=torch.float64) for _ in range(heads)]
    I = [torch.exp(w["prior_log"][head]).expand(V, K) for head in range(heads)] if importance else None
    seen: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    outputs = []
    for u in inputs:
        for part in seen:
            seen[part].append(w[f"{part}_weight"] @ u)
        q, k, v = (convolve(seen[part], w[f"conv_{part}_weight"]).reshape(heads, -1) for part in seen)
        dt = softplus(w["dt_weight"] @ u + w["dt_bias"])
        bs = 1 / (1 + torch.exp(-(w["s_weight"] @ u)))
        if importance:
            logits = (w["beta_up_weight"] @ (w["beta_down_weight"] @ u)).reshape(heads, V)
        gate = silu(w["g_weight"] @ u).reshape(heads, V)
        out = []
        for head in range(heads):
            unit_q, unit_k = q[head] / q[head].norm(), k[head] / k[head].norm()
            alpha = torch.exp(-dt[head] * torch.exp(w["A_log"][head]))
            M[head] = alpha * M[head] + torch.outer(v[head] * bs[head], unit_k)
            mean = M[head]
            if I is not None:
                prior = torch.exp(w["prior_log"][head])
                beta = torch.sigmoid(logits[head]) * softplus(w["b_scale"][head]) * bs[head]
                # What exceeds the prior decays.
                I[head] = prior + alpha * (I[head] - prior) + torch.outer(beta, unit_k**2)
                mean = M[head] / I[head]
            y = mean @ unit_q / math.sqrt(K) + w["D"][head] * v[head]
            out.append(rms_norm(y, w["norm.weight"], model.norm_eps) * gate[head])
        outputs.append(w["out_proj.weight"] @ torch.cat(out))
    return outputs


def mix_document_g(w: Weights, inputs: list[Tensor], model: ModelConfig) -> list[Tensor]:
    """One document through one Gated DeltaNet layer, M of a head [V, K]: what a key reads is replaced by beta."""
    heads, K, V = model.nheads, model.d_state, model.headdim
    sizes = [heads * K, heads * K, heads * V, heads * V, heads, heads]
    M = [torch.zeros(V, K, dtype=torch.float64) for _ in range(heads)]
    seen: list[Tensor] = []
    outputs = []
    for u in inputs:
        projected = w["in_proj.weight"] @ u
        *_, gate, beta, alpha = projected.split(sizes)
        seen.append(projected[: sum(sizes[:3])])
        q, k, v = convolve(seen, w["conv1d.weight"][:, 0]).split(sizes[:3])
        q, k, v, gate = (x.reshape(heads, -1) for x in (q, k, v, silu(gate)))
        decay = torch.exp(-torch.exp(w["A_log"]) * softplus(alpha + w["dt_bias"]))
        beta = torch.sigmoid(beta)
        out = []
        for head in range(heads):
            unit_q, unit_k = q[head] / q[head].norm(), k[head] / k[head].norm()
            M[head] = decay[head] * M[head]
            M[head] = M[head] + beta[head] * torch.outer(v[head] - M[head] @ unit_k, unit_k)
            y = M[head] @ unit_q / math.sqrt(K)
            out.append(rms_norm(y, w["out_norm.weight"], model.norm_eps) * gate[head])
        outputs.append(w["out_proj.weight"] @ torch.cat(out))
    return outputs


def rotate(x: Tensor, place: int, theta: float) -> Tensor:
    """Pairs (i, i + D / 2) as complex numbers, turned."""
    half = len(x) // 2
    turn = torch.polar(
        torch.ones(half, dtype=torch.float64), place * theta ** (-2 * torch.arange(half) / len(x)).double()
    )
    turned = torch.complex(x[:half], x[half:]) * turn
    return torch.cat([turned.real, turned.imag])


def attend_document(w: Weights, inputs: list[Tensor], model: ModelConfig) -> list[Tensor]:
    """One document through one attention layer; each group's rows are its heads' queries, its key and its value."""
    heads = model.num_attention_heads or 1
    groups, D = model.num_query_groups or heads, model.hidden_size // heads
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(groups)]
    outputs = []
    for place, u in enumerate(inputs):
        out = []
        for group, rows in enumerate((w["linear_qkv.weight"] @ u).chunk(groups)):
            *queries, key, value = rows.split(D)
            if model.rope_theta is not None:
                *queries, key = (rotate(x, place, model.rope_theta) for x in (*queries, key))
            seen[group].append((key, value))
            for query in queries:
                scores = torch.stack([query @ k / math.sqrt(D) for k, _ in seen[group]])
                weights = torch.exp(scores - scores.max())
                out.append(sum(a * v for a, (_, v) in zip(weights, seen[group], strict=True)) / weights.sum())
        outputs.append(w["linear_proj.weight"] @ torch.cat(out))
    return outputs


def gated_mlp(w: Weights, inputs: list[Tensor]) -> list[Tensor]:
    """The tokens through one gated MLP; gate and up projection lie behind one another."""
    projected = [w["linear_fc1.weight"] @ u for u in inputs]
    return [w["linear_fc2.weight"] @ (silu(gate) * up) for gate, up in (p.chunk(2) for p in projected)]


def hidden_states(weights: Weights, model: ModelConfig, document: list[int]) -> list[Tensor]:
    """The residual stream of one document behind all layers."""
    stream = [weights["embedding.word_embeddings.weight"][token] for token in document]
    for layer, symbol in enumerate(model.layers):
        prefix = f"decoder.layers.{layer}."
        own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        module, norm = {
            "-": ("mlp.", "pre_mlp_layernorm"),
            "*": ("self_attention.", "input_layernorm"),
            "G": ("self_attention.", "input_layernorm"),
        }.get(symbol, ("mixer.", "norm"))
        inside = {name.removeprefix(module): w for name, w in own.items() if name.startswith(module)}
        normed = [rms_norm(h, own[f"{norm}.weight"], model.norm_eps) for h in stream]
        if symbol == "-":
            mixed = gated_mlp(inside, normed)
        elif symbol == "*":
            mixed = attend_document(inside, normed, model)
        elif symbol == "G":
            mixed = mix_document_g(inside, normed, model)
        else:
            mix = mix_document if symbol in "PM" else mix_document_d
            mixed = mix(inside, normed, model, importance=symbol in "PQ")
        stream = [h + m for h, m in zip(stream, mixed, strict=True)]
    return stream


def logits(weights: Weights, model: ModelConfig, document: list[int]) -> list[Tensor]:
    """Of each of a document's tokens, over all rows of the embedding."""
    head = weights["embedding.word_embeddings.weight" if model.tie_embeddings else "output_layer.weight"]
    final_norm = weights["decoder.final_norm.weight"]
    return [head @ rms_norm(h, final_norm, model.norm_eps) for h in hidden_states(weights, model, document)]


def losses(weights: Weights, model: ModelConfig, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Negative log-likelihood of the labels of the tokens inside documents, [cu_seqlens[-1]]."""
    result = []
    offsets = cu_seqlens.tolist()
    for start, end in itertools.pairwise(offsets):
        document = tokens[0, start:end].tolist()
        for position, of_token in enumerate(logits(weights, model, document), start=start):
            largest = of_token.max()
            log_sum = largest + torch.log(torch.exp(of_token - largest).sum())
            result.append(log_sum - of_token[labels[0, position]])
    return torch.stack(result)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64."""
    norm = float(expected.double().norm())
    difference = float((actual.double() - expected.double()).norm())
    return difference / norm if norm else math.inf if difference else 0.0
