"""What is drawn from logits."""

from __future__ import annotations

import pytest
import torch

from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.model.sampling import Draws, Sampling, choose

PROBABILITIES = [0.1, 0.5, 0.05, 0.35]


def drawn(sampling: Sampling, rows: int, times: int = 1) -> torch.Tensor:
    """Ids [times, rows] from the same logits everywhere."""
    logits = torch.tensor(PROBABILITIES).log().expand(rows, -1)
    draws = Draws(sampling.seed, range(rows))
    return torch.stack([choose(logits, sampling, draws) for _ in range(times)])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "allowed"),
    [
        (0.0, 0, 1.0, {1}),
        (1.0, 0, 1.0, {0, 1, 2, 3}),
        (1.0, 2, 1.0, {1, 3}),
        (1.0, 9, 1.0, {0, 1, 2, 3}),
        (1.0, 0, 0.6, {1, 3}),
        (1.0, 0, 0.4, {1}),
        (1e-4, 0, 1.0, {1}),
        (5e-324, 0, 1.0, {1}),
        (1.0, 0, 1e-300, {1}),
    ],
)
def test_choice_is_limited_to_the_most_probable(temperature, top_k, top_p, allowed):
    assert set(drawn(Sampling(temperature, top_k, top_p), 300).flatten().tolist()) == allowed


@pytest.mark.parametrize(("settings", "weights"), [({}, PROBABILITIES), ({"top_k": 2}, [0, 0.5, 0, 0.35])])
def test_ids_come_as_often_as_they_are_probable(settings, weights):
    for temperature in (1.0, 0.5):
        ids = drawn(Sampling(temperature, **settings, seed=1), 4000).flatten()
        expected = torch.tensor(weights) ** (1 / temperature)
        share = ids.bincount(minlength=4) / len(ids)
        # Four standard deviations.
        torch.testing.assert_close(share, expected / expected.sum(), atol=0.032, rtol=0)


def test_rows_draw_by_the_seed_and_their_number_alone():
    sampling = Sampling(temperature=1.0, seed=5)
    eight = drawn(sampling, 8, times=16)
    assert torch.equal(drawn(sampling, 3, times=16), eight[:, :3])
    assert len(set(map(tuple, eight.T.tolist()))) == 8
    assert not torch.equal(drawn(Sampling(temperature=1.0, seed=6), 8, times=16), eight)


def test_a_draw_at_the_very_end_is_an_id_that_may_be_drawn():
    class AtTheEnd(Draws):
        def next(self):
            return torch.ones(1, dtype=torch.float64)

    logits = torch.tensor([PROBABILITIES]).log()
    assert choose(logits, Sampling(temperature=1.0), AtTheEnd(0, [0])).tolist() == [2]
    assert choose(logits, Sampling(temperature=1.0, top_p=0.6), AtTheEnd(0, [0])).tolist() == [3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"seed": 2**64}, "seed of the sampling"),
    ],
)
def test_settings_out_of_their_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)
