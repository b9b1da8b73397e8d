"""Examples against a reading of each by hand, and against the random numbers and probabilities they are made of."""

import itertools

import pytest
import torch

from megatron_palimpsa.experiments.mqar import examples
from megatron_palimpsa.experiments.mqar.examples import Shape, make_examples, shuffled

VOCAB, HALF = 64, 32
SHAPES = [
    Shape(VOCAB, 32, 8),
    Shape(VOCAB, 32, 8, filler="random"),
    Shape(VOCAB, 64, 3, power=0.5),
    Shape(8192, 128, 32),
]


def read_by_hand(tokens: list[int], pairs: int) -> dict[int, int]:
    """Key -> value, as they stand at the beginning."""
    return {tokens[2 * place]: tokens[2 * place + 1] for place in range(pairs)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_label_is_the_value_behind_its_key(shape: Shape) -> None:
    made = make_examples(shape, 3, torch.arange(40))
    half = shape.vocab_size // 2
    for tokens, queries, answers in zip(
        made.tokens.tolist(), made.queries.tolist(), made.answers.tolist(), strict=True
    ):
        assert len(tokens) == shape.length
        value_of = read_by_hand(tokens, shape.pairs)
        # No key or value twice, each in its half, token 0 neither.
        assert len(value_of) == len(set(value_of.values())) == shape.pairs
        assert all(0 < key < half for key in value_of)
        assert all(half <= value < shape.vocab_size for value in value_of.values())
        # Every key is asked for once, behind the pairs, at every second place at most.
        assert sorted(tokens[place] for place in queries) == sorted(value_of)
        assert all(place >= 2 * shape.pairs and place % 2 == 0 for place in queries)
        assert [value_of[tokens[place]] for place in queries] == answers
        between = set(range(2 * shape.pairs, shape.length)) - set(queries)
        assert len(between) == shape.length - 3 * shape.pairs
        if shape.filler == "blank":
            assert {tokens[place] for place in between} == {0}
        else:
            assert all(0 <= tokens[place] < shape.vocab_size for place in between)


def test_random_filler_takes_the_whole_vocabulary() -> None:
    made = make_examples(Shape(VOCAB, 64, 2, filler="random"), 0, torch.arange(100))
    behind = made.tokens[:, 5::2].flatten()
    assert torch.bincount(behind, minlength=VOCAB).min() > 0


@pytest.mark.parametrize("filler", ["blank", "random"])
def test_an_example_depends_on_seed_and_number_alone(filler, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(VOCAB, 32, 8, filler=filler)
    together = make_examples(shape, 5, torch.arange(50))
    monkeypatch.setattr(examples, "_AT_ONCE", 7)
    for again in (
        make_examples(shape, 5, torch.arange(50)),
        make_examples(shape, 5, torch.arange(50).flip(0)).batch(torch.arange(50).flip(0)),
    ):
        assert torch.equal(again.tokens, together.tokens)
        assert torch.equal(again.queries, together.queries)
        assert torch.equal(again.answers, together.answers)
    alone = make_examples(shape, 5, torch.tensor([41]))
    assert torch.equal(alone.tokens[0], together.tokens[41])
    assert not torch.equal(make_examples(shape, 6, torch.tensor([41])).tokens, alone.tokens)


def test_no_example_comes_twice_nor_in_training_and_test() -> None:
    shape = Shape(VOCAB, 32, 8)
    seeds = [of(seed) for seed in range(4) for of in (examples.train_seed, examples.test_seed)]
    assert len(set(seeds)) == len(seeds)
    rows = torch.cat([make_examples(shape, seed, torch.arange(200)).tokens for seed in seeds])
    assert len(rows.unique(dim=0)) == len(rows)


def test_lengths_share_no_pairs() -> None:
    """Else a lesson would begin with what the one before has taught by heart."""
    short, long = (make_examples(Shape(8192, length, 8), 0, torch.arange(50)) for length in (32, 64))
    same = (short.tokens[:, :16] == long.tokens[:, :16]).float().mean()
    assert same < 0.02


def test_random_numbers_are_splitmix64s() -> None:
    mask = (1 << 64) - 1

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    # The generator's first outputs from state 0, as published with it.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    numbers = examples._random("stream", torch.tensor([0, 9]), 3)
    digest = examples.hashlib.sha256(b"mqar/stream").digest()
    start = int.from_bytes(digest[:8], "little")
    expected = [
        [mix((start + 0x9E3779B97F4A7C15 * (row * 2**24 + column)) & mask) for column in range(3)] for row in (0, 9)
    ]
    assert [[number & mask for number in row] for row in numbers.tolist()] == expected


def test_gaps_are_drawn_one_after_another_by_the_power_law() -> None:
    """Frequencies of ordered pairs of places beside their exact probabilities."""
    shape, count = Shape(VOCAB, 14, 2, power=0.01), 20_000
    made = make_examples(shape, 0, torch.arange(count))
    places = (made.queries - 4) // 2
    weights = [(1 + place) ** (0.01 - 1) for place in range(5)]
    chi_square = 0.0
    for first, second in itertools.permutations(range(5), 2):
        probability = weights[first] / sum(weights) * weights[second] / (sum(weights) - weights[first])
        found = int(((places[:, 0] == first) & (places[:, 1] == second)).sum())
        chi_square += (found - count * probability) ** 2 / (count * probability)
    # 19 degrees of freedom: 43.8 is exceeded once in a thousand times.
    assert chi_square < 43.8


def test_keys_are_uniform() -> None:
    made = make_examples(Shape(VOCAB, 32, 8), 1, torch.arange(4000))
    counts = torch.bincount(made.tokens[:, :16:2].flatten(), minlength=HALF)[1:].double()
    expected = 4000 * 8 / (HALF - 1)
    # 30 degrees of freedom; drawn without replacement the sum is smaller still.
    assert float(((counts - expected) ** 2 / expected).sum()) < 59.7


def test_order_is_a_permutation_of_its_label() -> None:
    device = torch.device("cpu")
    order = shuffled(100, "a", device)
    assert torch.equal(order.sort().values, torch.arange(100))
    assert torch.equal(order, shuffled(100, "a", device))
    assert not torch.equal(order, shuffled(100, "b", device))
    assert not torch.equal(order, torch.arange(100))
