import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
import torch
from helpers.engine_state import state_of, weights_of
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.model import build_model, forward_loss
from megatron_palimpsa.training.batch import Batch

FP32_NAMES = {"A_log", "D", "dt_bias", "b_scale", "prior_log"}
KINDS = [(precision, distributed) for precision in ("fp32", "bf16") for distributed in (True, False)]


def always(loss: float, grad_norm: float) -> bool:
    return True


def stage(**sections: dict) -> StageConfig:
    """Three microbatches of very different numbers of tokens with a loss."""
    train = {"global_batch_tokens": 96, "tokens": 9600, **sections.pop("train", {})}
    return tiny_stage(model={"init_std": 0.2, **sections.pop("model", {})}, train=train, **sections)


def batches_of(config: StageConfig, first: int = 0) -> Iterator[Batch]:
    return (random_batch(config, seed, padding=9 * (seed % 3)) for seed in count(first))


def snapshot(engine: MegatronEngine) -> list[torch.Tensor]:
    return list(state_of(engine).values())


def plain_gradients(model: torch.nn.Module, batches: list[Batch]) -> float:
    """Autograd alone: gradients of the mean over all tokens with a loss, left in `grad`; the loss."""
    tokens = sum(batch.loss_mask.sum() for batch in batches)
    total = 0.0
    for batch in batches:
        loss = (forward_loss(model, batch) * batch.loss_mask).sum() / tokens
        loss.backward()
        total += loss.item()
    return total


@pytest.mark.parametrize("distributed", [True, False])
def test_steps_equal_plain_autograd_and_adamw(distributed: bool) -> None:
    config = stage(parallel={"distributed_optimizer": distributed}, optimizer={"lr": 1e-3, "clip_grad": 0.5})
    engine = MegatronEngine(config)
    model = build_model(config)
    decayed = [p for p in model.parameters() if p.requires_grad and not getattr(p, "no_weight_decay", False)]
    others = [p for p in model.parameters() if p.requires_grad and getattr(p, "no_weight_decay", False)]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    batches, reference = batches_of(config), batches_of(config)
    for step in range(1, 5):
        result = engine.train_step(batches, always)
        adamw.zero_grad()
        loss = plain_gradients(model, [next(reference) for _ in range(3)])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        for group in adamw.param_groups:
            group["lr"] = engine.learning_rate
        adamw.step()
        assert math.isclose(result.loss, loss, rel_tol=1e-6), step
        assert math.isclose(result.grad_norm, norm, rel_tol=1e-5), step
    for (name, parameter), other in zip(engine.chunks[0].named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=2e-5, msg=name)


def test_learning_rate_warms_up_and_falls_to_the_minimum_at_the_last_step() -> None:
    config = stage(
        train={"tokens": 96 * 8}, optimizer={"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2, "schedule": "linear"}
    )
    engine = MegatronEngine(config)
    rates = []
    for step, batches in enumerate([batches_of(config)] * 8):
        engine.train_step(batches, lambda loss, norm, step=step: step % 3 > 0)
        rates.append(engine.learning_rate)
    falling = [1e-2 - 9e-3 * passed / 6 for passed in range(1, 7)]
    assert rates == pytest.approx([5e-3, 1e-2, *falling])


@pytest.mark.parametrize(("precision", "distributed"), KINDS)
def test_dropped_step_changes_nothing(precision: str, distributed: bool) -> None:
    config = stage(train={"precision": precision}, parallel={"distributed_optimizer": distributed})
    engine = MegatronEngine(config)
    engine.train_step(batches_of(config), always)
    before = snapshot(engine)
    weight = engine.chunks[0].decoder.layers[0].mixer.D
    healthy = weight.detach().clone()
    seen: list[tuple[float, float]] = []

    def accept_finite(loss: float, grad_norm: float) -> bool:
        seen.append((loss, grad_norm))
        return math.isfinite(loss) and math.isfinite(grad_norm)

    weight.data.fill_(math.nan)
    result = engine.train_step(batches_of(config), accept_finite)
    weight.data.copy_(healthy)
    assert not result.applied
    assert all(math.isnan(value) for value in (*seen[0], result.loss, result.grad_norm))
    assert engine.optimizer_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
    assert engine.train_step(batches_of(config), accept_finite).applied
    # Frozen weights come first.
    assert not any(torch.equal(a, b) for a, b in zip(before[-3:], snapshot(engine)[-3:], strict=True))


@pytest.mark.parametrize(("precision", "distributed"), KINDS)
def test_weight_decay_reaches_matrices_only(precision: str, distributed: bool) -> None:
    config = stage(
        train={"precision": precision},
        parallel={"distributed_optimizer": distributed},
        optimizer={"lr": 0.1, "weight_decay": 0.5, "warmup_steps": 1},
    )
    engine = MegatronEngine(config)
    before = weights_of(engine)
    # Without any loss the gradient is zero, and AdamW does nothing but decay.
    silent = replace(random_batch(config, 0), loss_mask=torch.zeros(1, 32))
    engine.train_step(iter([silent] * 3), always)
    for name, weight in weights_of(engine).items():
        matrix = weight.dim() == 2
        assert torch.allclose(weight, before[name] * (0.95 if matrix else 1.0), rtol=1e-6, atol=0), name


@pytest.mark.parametrize("distributed", [True, False])
def test_marked_parameters_stay_fp32_in_bf16(distributed: bool) -> None:
    config = stage(train={"precision": "bf16"}, parallel={"distributed_optimizer": distributed})
    engine = MegatronEngine(config)
    result = engine.train_step(batches_of(config), always)
    assert result.applied
    for name, parameter in engine.chunks[0].named_parameters():
        expected = torch.float32 if name.rpartition(".")[2] in FP32_NAMES else torch.bfloat16
        assert parameter.dtype == expected, name
        if parameter.requires_grad:
            assert parameter.main_grad.dtype == torch.float32, name
    weights = weights_of(engine)
    for name, parameter in engine.chunks[0].named_parameters():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name].to(parameter.dtype), parameter), name
    assert any((weight != weight.bfloat16()).any() for weight in weights.values())


@pytest.mark.parametrize(("precision", "distributed"), KINDS)
def test_dt_starts_in_its_range_behind_all_wrappers(precision: str, distributed: bool) -> None:
    config = stage(train={"precision": precision}, parallel={"distributed_optimizer": distributed})
    engine = MegatronEngine(config)
    for values in (dict(engine.chunks[0].named_parameters()), weights_of(engine)):
        biases = [value for name, value in values.items() if name.endswith("dt_bias")]
        assert len(biases) == 3
        dt = torch.nn.functional.softplus(torch.cat(biases))
        assert config.model.dt_min * (1 - 1e-5) <= dt.min() < dt.max() <= config.model.dt_max * (1 + 1e-5)


def test_bf16_follows_fp32() -> None:
    results = {}
    for precision in ("fp32", "bf16"):
        config = stage(train={"precision": precision}, optimizer={"lr": 1e-3})
        engine = MegatronEngine(config)
        batches = batches_of(config)
        results[precision] = [engine.train_step(batches, always) for _ in range(4)]
    for bf16, fp32 in zip(results["bf16"], results["fp32"], strict=True):
        assert math.isclose(bf16.loss, fp32.loss, rel_tol=5e-3)
        assert math.isclose(bf16.grad_norm, fp32.grad_norm, rel_tol=5e-2)


def test_recomputation_changes_no_bit() -> None:
    runs = []
    for recompute in ("none", "full"):
        config = stage(train={"recompute": recompute})
        engine = MegatronEngine(config)
        batches = batches_of(config)
        runs.append([engine.train_step(batches, always) for _ in range(3)])
    assert runs[0] == runs[1]


def test_evaluation_gives_every_token_its_loss_and_leaves_training_alone() -> None:
    config = stage()
    runs = []
    for evaluates in (False, True):
        engine = MegatronEngine(config)
        batches = batches_of(config)
        engine.train_step(batches, always)
        if evaluates:
            held_out = [random_batch(config, 70 + index, padding=5 * index) for index in range(3)]
            losses, mean = engine.evaluate(held_out)
            assert losses.shape == (3, 32)
            assert losses.dtype == torch.float32
            with torch.no_grad():
                direct = torch.cat([forward_loss(engine.chunks[0], batch) for batch in held_out])
            mask = torch.cat([batch.loss_mask for batch in held_out])
            assert torch.equal(losses, direct)
            assert math.isclose(mean, (direct.double() * mask).sum() / mask.sum(), rel_tol=1e-9)
        runs.append(engine.train_step(batches, always))
    assert runs[0] == runs[1]


def test_counts_tied_parameters_once() -> None:
    tied, untied = (MegatronEngine(stage(model={"tie_embeddings": tie})).num_parameters for tie in (True, False))
    assert untied - tied == 64 * 32
    config = stage(model={"pattern": "-"})
    assert MegatronEngine(config).num_parameters == 64 * 32 + 32 + 3 * 32 * 64 + 32
