"""Parts of a row that hand states over compute what one scan of the row does: outputs and every gradient, by head."""

from collections.abc import Iterator

import pytest
import torch
from helpers.mixing_cases import mixing_definition, mixing_errors, mixing_inputs, mixing_results
from helpers.row_parts import run_parts

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, PARTS = 12, 3
PER_TOKEN = ("q", "k", "x", "dt", "strength", "logits")
ROWS = {
    "documents cross the borders": (0, 3, 7, 12),
    "a document over all parts, others around it": (0, 1, 11, 12),
    "a document ends on a border, then padding": (0, 8, 10),
}
BOUND = {"dA_log": 1e-4}  # a sum that cancels: one scan of the whole row is off by 4e-5
INPUTS = ("q", "k", "x", "dt", "strength", "logits", "dt_bias", "A_log", "D", "b_scale", "prior")


class Context:
    """What autograd gives a function: a backward pass runs in the thread of its forward one, on a GPU too."""

    needs_input_grad = (True,) * 11
    saved_tensors: tuple = ()

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def set_materialize_grads(self, value):
        pass


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several chunks in each part."""
    from palimpsa_kernels.triton import palimpsa, ssd

    monkeypatch.setattr(palimpsa, "default_chunk_size", lambda tokens, heads: 2)
    monkeypatch.setattr(ssd, "CHUNK", 16)
    # A matrix of that size, which must not be there before or stay.
    ssd.strictly_lower.cache_clear()
    yield
    ssd.strictly_lower.cache_clear()


@pytest.mark.parametrize(
    ("importance", "strength"),
    [(True, False), (False, False), (True, True), (False, True)],
    ids=["palimpsa", "mamba2", "palimpsa-d", "palimpsa-d, without importance"],
)
@pytest.mark.parametrize("name", ROWS)
def test_parts_of_a_row(name: str, importance: bool, strength: bool, short_chunks: None) -> None:
    from palimpsa_kernels.triton.mixing import MixingScan

    ids = mixing_inputs(initial=False, importance=importance, strength=strength, tokens=TOKENS, heads=2, groups=1)
    scale = ids["q"].shape[-1] ** -0.5 if strength else 1.0

    def definition(*given, **options):
        return mixing_definition(*given, **options)[0], ()

    expected = mixing_results(definition, ids, dtype=torch.float64, offsets=ROWS[name])
    seed = torch.randn(ids["x"].shape, generator=torch.Generator().manual_seed(1))  # of `mixing_results`

    def work(carry, batch, tokens):
        given = {n: (x[:, tokens] if n in PER_TOKEN else x).to(DEVICE) for n, x in ids.items()}
        context = Context()
        y, *_ = MixingScan.forward(
            context, *(given.get(n) for n in INPUTS), None, None, batch.cu_seqlens.to(DEVICE), scale, False, carry
        )
        gradients = MixingScan.backward(context, seed[:, tokens].to(DEVICE), None, None)
        return {"y": y, **{f"d{n}": g for n, g in zip(INPUTS, gradients, strict=False) if n in ids}}

    results = [{n: t.double().cpu() for n, t in r.items()} for r in run_parts(ROWS[name], TOKENS, PARTS, work)]
    joined = {
        n: torch.cat([r[n] for r in results], 1) if n.removeprefix("d") in (*PER_TOKEN, "y") else
        sum(r[n] for r in results)
        for n in results[0]
    }  # fmt: skip
    wrong = {n: e for n, e in mixing_errors(joined, expected).items() if not e <= BOUND.get(n, 1e-5)}
    assert not wrong, wrong
