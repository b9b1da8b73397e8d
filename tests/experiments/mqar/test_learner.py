"""The model's logits, loss, optimizer groups and master weights against plain computations of the same."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.models import randomise
from helpers.mqar import write_recipe

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ParallelConfig
from megatron_palimpsa.experiments.mqar.config import SweepConfig, load_sweep
from megatron_palimpsa.experiments.mqar.examples import Examples, Shape, make_examples
from megatron_palimpsa.experiments.mqar.learner import Learner, lr_fraction, query_logits

EXAMPLES = make_examples(Shape(32, 16, 3, filler="random"), 0, torch.arange(6))


@pytest.fixture(scope="module", autouse=True)
def single_process():
    parallel.initialize(ParallelConfig(distributed_optimizer=False), seed=1)
    yield
    parallel.destroy()


def sweep(folder: Path, *overrides: str) -> SweepConfig:
    return load_sweep(write_recipe(folder), overrides)


def learner(config: SweepConfig, lr: float = 0.01) -> Learner:
    made = Learner(config, lr, seed=0)
    randomise(made.model)
    return made


def all_logits(model: torch.nn.Module, examples: Examples) -> torch.Tensor:
    return model(input_ids=examples.tokens, position_ids=None, attention_mask=None)


def test_query_logits_are_those_of_the_whole_sequence(tmp_path: Path) -> None:
    model = learner(sweep(tmp_path)).model
    whole = all_logits(model, EXAMPLES)
    rows = torch.arange(6)[:, None]
    torch.testing.assert_close(query_logits(model, EXAMPLES), whole[rows, EXAMPLES.queries], rtol=0, atol=1e-6)
    # Whatever follows sees all logits again.
    assert all_logits(model, EXAMPLES).shape == whole.shape == (6, 16, 32)


def test_a_step_is_adamws_on_the_loss_at_the_queries_alone(tmp_path: Path) -> None:
    config = sweep(tmp_path, "train.clip_grad=null", "train.weight_decay=0.5")
    ours, plain = learner(config), learner(config)
    labels = torch.full((6, 16), -100).scatter(1, EXAMPLES.queries, EXAMPLES.answers)
    logits = all_logits(plain.model, EXAMPLES)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected.backward()
    loss = ours.step(EXAMPLES, 0.5)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    spared = set()
    for (name, weight), (_, before) in zip(ours.model.named_parameters(), plain.model.named_parameters(), strict=True):
        if not weight.requires_grad:
            continue
        gradient = before.grad
        # AdamW's first step: the moments' corrections cancel, the gradient's sign is left but for eps.
        update = 0.005 * gradient / (gradient.abs() + 1e-8)
        without = before - update
        decayed = before * (1 - 0.005 * 0.5) - update
        settled = gradient.abs() > 1e-6
        if torch.allclose(weight[settled], without[settled], atol=1e-6):
            spared.add(name.rpartition(".")[2] if "norm" not in name else "norm")
        else:
            torch.testing.assert_close(weight[settled], decayed[settled], rtol=1e-5, atol=1e-6)
    biases = {"conv_x_bias", "conv_B_bias", "conv_C_bias"}
    assert spared == biases | {"dt_bias", "A_log", "D", "b_scale", "norm"}


def test_clipping_bounds_the_norm_of_all_gradients(tmp_path: Path) -> None:
    free, bound = (learner(sweep(tmp_path, f"train.clip_grad={limit}")) for limit in ("null", "1.0e-3"))
    norms = {}
    for name, made in (("free", free), ("bound", bound)):
        step = made._optimizer.step

        def look(name: str = name, made: Learner = made, step=step) -> None:
            norms[name] = torch.stack([p.grad.norm() for p in made._masters.values()]).norm()
            step()

        made._optimizer.step = look
        made.step(EXAMPLES, 1.0)
    assert norms["free"] > 0.01
    assert norms["bound"] == pytest.approx(1e-3, rel=1e-3)


def test_bf16_models_are_the_rounded_master_weights(tmp_path: Path) -> None:
    made = Learner(sweep(tmp_path, "train.precision=bf16"), 1e-4, seed=0)
    before = {name: tensor.clone() for name, tensor in made.state().items()}
    for _ in range(3):
        made.step(EXAMPLES, 1.0)
    after = made.state()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moved = 0
    for name, weight in made.model.named_parameters():
        if not weight.requires_grad:
            continue
        master = after[f"weights.{name}"]
        assert torch.equal(weight, master.to(weight.dtype))
        # Steps of 1e-4 that bf16 alone would lose for the most part.
        moved += int((master != before[f"weights.{name}"]).sum())
    total = sum(weight.numel() for weight in made.model.parameters() if weight.requires_grad)
    assert moved > 0.8 * total
    assert made.model.decoder.layers[0].mixer.A_log.dtype == torch.float32
    assert made.model.decoder.layers[0].mixer.x_weight.dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_saved_goes_on_as_if_never_stopped(tmp_path: Path, precision: str) -> None:
    config = sweep(tmp_path, f"train.precision={precision}")
    unbroken = learner(config)
    unbroken.step(EXAMPLES, 1.0)
    unbroken.step(EXAMPLES, 1.0)
    saved = {name: tensor.clone() for name, tensor in unbroken.state().items()}
    unbroken.step(EXAMPLES, 0.7)
    # The untrained prior is not saved: it is the same in every model of a sweep.
    resumed = learner(config)
    resumed.load(saved, with_moments=True)
    resumed.step(EXAMPLES, 0.7)
    fresh = learner(config)
    fresh.load(saved, with_moments=False)
    fresh.step(EXAMPLES, 0.7)
    expected = unbroken.state()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.state().items())
    assert not all(torch.equal(tensor, expected[name]) for name, tensor in fresh.state().items())


def test_accuracy_and_loss_count_queries_alone(tmp_path: Path) -> None:
    made = learner(sweep(tmp_path))
    for _ in range(30):
        made.step(EXAMPLES, 1.0)
    accuracy, loss, memory = made.evaluate(EXAMPLES, batch_size=4)
    logits = all_logits(made.model, EXAMPLES).detach()
    right, losses = 0, []
    for row in range(6):
        for place, answer in zip(EXAMPLES.queries[row].tolist(), EXAMPLES.answers[row].tolist(), strict=True):
            right += int(logits[row, place].argmax()) == answer
            losses.append(float(-logits[row, place].log_softmax(-1)[answer]))
    assert right > 0
    assert accuracy == right / 18
    assert loss == pytest.approx(sum(losses) / 18, rel=1e-5)
    assert memory.keys() == {1, 2}
    assert memory[1].keys() == {"window", "importance_ratio"}
    assert memory[2].keys() == {"window"}


def test_models_of_the_other_backbone_learn_too(tmp_path: Path) -> None:
    made = learner(sweep(tmp_path, "model.pattern=QL"))
    losses = [float(made.step(EXAMPLES, 1.0)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    _, _, memory = made.evaluate(EXAMPLES, batch_size=6)
    assert memory[1].keys() == {"window", "importance_ratio"}
    assert memory[2].keys() == {"window"}


def test_learning_rate_rises_and_falls_to_zero() -> None:
    fractions = [lr_fraction(step, 10, 2) for step in range(10)]
    assert fractions[:3] == [0.5, 1.0, 1.0]
    assert fractions == sorted(fractions[:2]) + sorted(fractions[2:], reverse=True)
    assert 0 < fractions[-1] < 0.05
    assert lr_fraction(5, 10, 0) == pytest.approx(0.5)
