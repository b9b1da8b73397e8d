"""Weights of a model from unsplit tensors: drawn from the stage's seed, or given; the same under every layout.

Mixers start as state-spaces' Mamba2 does (A, dt, D, convolution, 1 / sqrt(layers) into the residual stream) and as
Palimpsa's authors add to it (beta, prior), with one difference: projections are normal with `init_std`, as Megatron
draws them, where state-spaces and Hugging Face keep torch's uniform default.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from megatron_palimpsa import launcher
from megatron_palimpsa.config import ModelConfig
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.tensor_parallel import full_shape, local_share

BETA_DOWN_STD = 0.02

Initializer = Callable[[Tensor, ModelConfig, torch.Generator], object]


def inverse_softplus(value: Tensor) -> Tensor:
    """The x with softplus(x) = value > 0."""
    return value + torch.log(-torch.expm1(-value))


def _ones(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    full.fill_(1.0)


def _zeros(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    full.zero_()


def _normal(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    full.normal_(0.0, model.init_std, generator=generator)


def _normal_into_residual(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    # Each layer of a pattern adds to the residual stream once: 1 / sqrt(layers), as state-spaces and Megatron's hybrid
    # models scale it (and not 1 / sqrt(2 * layers), which counts an attention and an MLP for each layer).
    full.normal_(0.0, model.init_std / math.sqrt(len(model.layers)), generator=generator)


def _convolution(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    # torch's default for a depthwise Conv1d, weight and bias.
    bound = 1 / math.sqrt(model.d_conv)
    full.uniform_(-bound, bound, generator=generator)


def _dt_bias(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    low, high = math.log(model.dt_min), math.log(model.dt_max)
    full.copy_(inverse_softplus(full.uniform_(low, high, generator=generator).exp()))


def _a_log(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    full.uniform_(model.a_min, model.a_max, generator=generator).log_()


def _beta_down(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    full.normal_(0.0, BETA_DOWN_STD, generator=generator)


def _beta_up(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    bound = model.beta_rank**-0.5
    full.uniform_(-bound, bound, generator=generator)


def _b_scale(full: Tensor, model: ModelConfig, generator: torch.Generator) -> None:
    if model.beta_scale_init == "scratch":
        full.fill_(1.0)
        return
    full.uniform_(0.1, 1.0, generator=generator)
    if model.beta_scale_init == "finetune-effective":
        full.copy_(inverse_softplus(full))


INITIALIZERS: dict[str, Initializer] = {
    "embedding.word_embeddings.weight": _normal,
    "output_layer.weight": _normal,
    "norm.weight": _ones,
    "linear_qkv.weight": _normal,
    "linear_proj.weight": _normal_into_residual,
    "linear_fc1.weight": _normal,
    "linear_fc2.weight": _normal_into_residual,
    **{f"mixer.{role}_weight": _normal for role in ("z", "x", "B", "C", "dt")},
    **{f"mixer.conv_{role}_{kind}": _convolution for role in ("x", "B", "C") for kind in ("weight", "bias")},
    **{f"mixer.{role}_weight": _normal for role in ("g", "v", "k", "q", "s")},
    **{f"mixer.conv_{role}_weight": _convolution for role in ("v", "k", "q")},
    "mixer.dt_bias": _dt_bias,
    "mixer.A_log": _a_log,
    "mixer.D": _ones,
    "self_attention.in_proj.weight": _normal,
    "self_attention.conv1d.weight": _convolution,
    "self_attention.dt_bias": _dt_bias,
    "self_attention.A_log": _a_log,
    "self_attention.out_proj.weight": _normal_into_residual,
    "mixer.beta_down_weight": _beta_down,
    "mixer.beta_up_weight": _beta_up,
    "mixer.b_scale": _b_scale,
    "mixer.prior_log": _zeros,
    "mixer.out_proj.weight": _normal_into_residual,
}
"""Ending of a parameter's name -> how the unsplit fp32 tensor is filled."""


def initializer_of(name: str) -> Initializer:
    """The initializer of a parameter by the ending of its name.

    Raises:
        KeyError: no or more than one ending fits.
    """
    fitting = [fill for ending, fill in INITIALIZERS.items() if name.endswith(ending)]
    if len(fitting) != 1:
        raise KeyError(f"{len(fitting)} initializers fit the parameter {name}")
    return fitting[0]


def drawn(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    """The unsplit initial value, float32 on the CPU, of the parameter with this global name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    full = torch.empty(shape)
    initializer_of(name)(full, config, generator)
    return full


def initialize_weights(model: HybridModel, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of this rank's part of the model, see `initialize_parameters`."""
    initialize_parameters(global_parameters(model), config, seed, model.tp_group)


def initialize_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: ModelConfig,
    seed: int,
    tp_group: torch.distributed.ProcessGroup,
) -> None:
    """Fill parameters given by their global names.

    The unsplit tensor is drawn on the CPU from a generator seeded with the parameter's global name, and this rank's
    share is taken: the weights depend on the seed alone and not on how many ranks hold them.
    """
    rank, size = tp_group.rank(), tp_group.size()

    @torch.no_grad()
    def draw(named: tuple[str, Tensor]) -> None:
        name, parameter = named
        full = drawn(name, full_shape(parameter, size), config, seed)
        parameter.copy_(local_share(full, parameter, rank, size))

    # A generator fills a tensor on one core, 0.2e9 numbers a second; each parameter has its own.
    with ThreadPoolExecutor(min(16, launcher.cores())) as pool:
        for _ in pool.map(draw, list(parameters)):
            pass


@torch.no_grad()
def load_full_weights(model: HybridModel, full: Mapping[str, Tensor]) -> None:
    """Copy this rank's share of unsplit weights, given by global names, into its parameters.

    Raises:
        KeyError: a parameter of this rank is not in `full`.
        ValueError: a shape differs.
    """
    for name, parameter in global_parameters(model):
        expected = full_shape(parameter, model.tp_group.size())
        if list(full[name].shape) != expected:
            raise ValueError(f"{name} has shape {list(full[name].shape)}, the model needs {expected}")
        parameter.copy_(local_share(full[name], parameter, model.tp_group.rank(), model.tp_group.size()))
