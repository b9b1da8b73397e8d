"""What Megatron and PyTorch do for one parameter after the other in each step, done for all of them at once.

For a model of a thousand parameters the loops cost the host more time than the step costs the GPU, which has to wait
for them: between the gradient norm and the next forward pass nothing else can run.
"""

from __future__ import annotations

from itertools import chain

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


@torch.no_grad()
def clip(optimizer: ChainedOptimizer, largest: float, norm: float) -> None:
    """Scale all gradients down so that their norm, which is `norm`, is `largest` at most."""
    factor = largest / (norm + 1e-6)
    gradients = [parameter.grad for parameter in optimizer.get_parameters() if parameter.grad is not None]
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)


def step_at_once(optimizer: ChainedOptimizer) -> None:
    """Have Megatron's optimizers take each step over all parameters at once.

    On CUDA Adam is PyTorch's fused kernel: a third of the passes over memory, and no memory of its own.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        groups = part.optimizer.param_groups
        if any(parameter.is_cuda for group in groups for parameter in group["params"]):
            for settings in (*groups, part.optimizer.defaults):
                settings["fused"] = True
        if isinstance(part, DistributedOptimizer):
            _keep_views(part)


def _keep_views(part: DistributedOptimizer) -> None:
    """Make the views of gradient and weight buffers once, of which Megatron makes four a parameter in each step."""
    models = chain(*part.model_float16_groups, *part.model_fp32_groups)
    mains = list(chain(*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups))
    gradients, weights = [], []
    for model, main in zip(models, mains, strict=True):
        places = part._get_model_param_range_map(model)
        owned, in_bucket = places["param"], places["gbuf_world_in_bucket"]
        gradient: Tensor = model.main_grad.view(-1)[owned.start : owned.end]
        assert gradient.dtype == torch.float32
        buffer, _, bucket = part.model_param_gbuf_map[model]
        gradients.append(gradient)
        weights.append(part.buffers[buffer].buckets[bucket].param_data.view(-1)[in_bucket.start : in_bucket.end])
        assert gradient.numel() == main.numel() == weights[-1].numel()

    def take_gradients() -> None:
        for main, gradient in zip(mains, gradients, strict=True):
            main.grad = gradient

    @torch.no_grad()
    def give_weights() -> None:
        if mains:
            torch._foreach_copy_(weights, mains)

    part._copy_model_grads_to_main_grads = take_gradients
    part._copy_main_params_to_model_params = give_weights
