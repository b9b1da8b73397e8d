"""Gradients of parameters that all tensor-parallel ranks hold whole."""

import torch
import torch.distributed as dist
from helpers.workers import Workers

from megatron_palimpsa.parallel.gradients import sum_marked_gradients


class Marked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, dtype in {"a": torch.float32, "b": torch.float32, "c": torch.float64, "plain": torch.float32}.items():
            parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
            parameter.main_grad = torch.full((3,), 1.0 + 10 * dist.get_rank(), dtype=dtype)
            parameter.sum_gradient_over_tp = name != "plain"
            self.register_parameter(name, parameter)
        self.frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.frozen.sum_gradient_over_tp = True


def summed() -> dict[str, list[float]]:
    model = Marked()
    buffers = {name: p.main_grad for name, p in model.named_parameters() if p.requires_grad}
    sum_marked_gradients([model], dist.group.WORLD)
    # In place: the optimizer reads the buffer that DDP made.
    return {name: buffer.tolist() for name, buffer in buffers.items()}


def marked_twice() -> str:
    model = Marked()
    model.b.sequence_parallel = True
    try:
        sum_marked_gradients([model], dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


def test_marked_gradients_are_summed_in_place(two_processes: Workers) -> None:
    results = two_processes.run(summed)
    for rank, result in enumerate(results):
        assert result["a"] == result["b"] == result["c"] == [12.0] * 3
        assert result["plain"] == [1.0 + 10 * rank] * 3


def test_gradient_that_megatron_sums_too_is_refused(two_processes: Workers) -> None:
    for message in two_processes.run(marked_twice):
        assert message.startswith("b: marked both")
