import pytest
import torch
from helpers.stages import random_batch, tiny_stage
from torch.utils.flop_counter import FlopCounterMode

from megatron_palimpsa.engine.flops import forward_flops_per_token, train_flops_per_token
from megatron_palimpsa.model import build_model, forward_loss


def test_products_are_those_that_torch_counts() -> None:
    config = tiny_stage(model={"pattern": "--"})
    model = build_model(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward_loss(model, random_batch(config, 0))
    assert counter.get_total_flops() == 32 * forward_flops_per_token(config.model)


@pytest.mark.parametrize(("pattern", "states"), [("M", 1), ("P", 2), ("L", 1), ("Q", 2)])
def test_layer_with_a_matrix_state_is_its_weights_and_its_scan(pattern: str, states: int) -> None:
    config = tiny_stage(model={"pattern": pattern})
    weights = dict(build_model(config).named_parameters())
    matrices = sum(p.numel() for name, p in weights.items() if p.dim() == 2)
    # 2 FLOPs a weight and token, convolutions included; the tied embedding is the output layer's product.
    scan = 5 * states * config.model.d_inner * config.model.d_state
    assert forward_flops_per_token(config.model) == 2 * matrices + scan


def test_attention_layer_is_its_weights_and_half_of_all_pairs() -> None:
    config = tiny_stage(model={"pattern": "*"})
    matrices = sum(p.numel() for p in build_model(config).parameters() if p.dim() == 2)
    # Token t attends to t of them, forming a score and adding a value for each head's channels.
    pairs = sum(range(1, config.model.seq_length + 1)) / config.model.seq_length
    assert forward_flops_per_token(config.model) == 2 * matrices + 2 * 2 * config.model.hidden_size * pairs


def test_whole_model_under_every_layout() -> None:
    layouts = [{"pattern": "MP*-PM"}, {"pattern": "MP*|-PM"}, {"pattern": "M|P*-PM"}]
    counts = {train_flops_per_token(tiny_stage(model=model).model) for model in layouts}
    assert len(counts) == 1
    assert counts.pop() == 3 * forward_flops_per_token(tiny_stage(model=layouts[0]).model)
