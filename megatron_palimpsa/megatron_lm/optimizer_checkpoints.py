"""Megatron's optimizers repaired where their checkpoints go wrong with this model, or without Apex and TE.

The model keeps some parameters in fp32 beside bf16 ones, in one weight-decay group with norms and biases. Seen in
megatron-core 0.19.2, each of them in the tests of this module:

- The bf16 optimizer takes all of a group's parameters for bf16 ones and refuses to save.
- The distributed optimizer holds a group's fp32 parameters first, but the index by which it saves and loads states
  counts in the order of the gradient buffers. Loading writes into fp32 parameters that require gradients.
- With torch's AdamW (no Apex, no Transformer Engine) the distributed optimizer asserts on loading that there is a state
  already; a format without the step count (`fully_reshardable`) ends in a KeyError; and then all parameters share one
  tensor that counts the steps, so that AdamW counts an update once a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def repair_optimizer_checkpoints() -> None:
    """Replace the methods in question in this process; a second call changes nothing."""
    if hasattr(DistributedOptimizer.__init__, "__wrapped__"):
        return
    _wrap(Float16OptimizerWithFloat16Params, "sharded_state_dict", _with_fp32_parameters)
    _wrap(Float16OptimizerWithFloat16Params, "load_state_dict", _with_fp32_parameters)
    _wrap(DistributedOptimizer, "__init__", _in_the_optimizers_order)
    _wrap(DistributedOptimizer, "_set_main_param_and_optimizer_states", _without_step)
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _wrap(DistributedOptimizer, "state_dict", _never_empty)
        _wrap(DistributedOptimizer, "load_state_dict", _with_steps_of_their_own)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _with_fp32_parameters(
    self: Float16OptimizerWithFloat16Params, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if self.is_stub_optimizer:
        return method(self, *args, **kwargs)
    with _every_parameter_has_a_copy(self):
        return method(self, *args, **kwargs)


@contextmanager
def _every_parameter_has_a_copy(optimizer: Float16OptimizerWithFloat16Params) -> Iterator[None]:
    """Within it a parameter kept in fp32 counts as its own fp32 copy, and both lists have the optimizer's order."""
    halves, copies = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    original = {id(copy): half for half, copy in zip(chain(*halves), chain(*copies), strict=True)}
    optimizer.fp32_from_float16_groups = [group["params"] for group in optimizer.optimizer.param_groups]
    optimizer.float16_groups = [
        [original.get(id(copy), copy) for copy in group] for group in optimizer.fp32_from_float16_groups
    ]
    try:
        yield
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = halves, copies


def _in_the_optimizers_order(self: DistributedOptimizer, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    if self.is_stub_optimizer or self.ddp_config.use_megatron_fsdp:
        return
    place = {
        id(main): (group_index, order)
        for group_index, group in enumerate(self.optimizer.param_groups)
        for order, main in enumerate(group["params"])
    }
    in_place = self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    of_halves = self.shard_float16_groups if in_place else self.shard_fp32_from_float16_groups
    models = chain(*self.model_float16_groups, *self.model_fp32_groups)
    for model, main in zip(models, chain(*of_halves, *self.shard_fp32_groups), strict=True):
        self.model_param_group_index_map[model] = place[id(main)]


def _without_step(
    self: DistributedOptimizer, set_states: Callable[..., None], model_param: torch.Tensor, tensors: dict[str, Any]
) -> None:
    # What is no tensor is passed over: the count of steps comes with the parameter groups.
    with torch.no_grad():
        set_states(self, model_param, {**tensors, "step": None})


def _never_empty(self: DistributedOptimizer, state_dict: Callable[..., Any]) -> Any:
    state = self.optimizer.state
    for group in self.optimizer.param_groups:
        for main in group["params"]:
            if not state[main]:
                moments = {key: torch.zeros_like(main) for key in self.optimizer_state_keys}
                state[main] = {"step": torch.tensor(0.0), **moments}
    return state_dict(self)


def _with_steps_of_their_own(
    self: DistributedOptimizer, load_state_dict: Callable[..., None], loaded: dict[str, Any]
) -> None:
    load_state_dict(self, loaded)
    for state in self.optimizer.state.values():
        state["step"] = state["step"].clone()
