"""Generation by the kernels of CUDA."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from helpers.models import randomise
from helpers.reference_model import relative_error
from helpers.single_process import single_process as single_process
from helpers.stages import tiny_stage

from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.build import packed_sequence
from megatron_palimpsa.model.decoding import decode, prefill
from megatron_palimpsa.model.generation import stream
from megatron_palimpsa.model.sampling import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (1100, 40, 1)


def model_of(precision):
    model = build_model(tiny_stage(model={"pattern": "PM*-P"}, train={"precision": precision})).cpu()
    randomise(model, scale=0.1)
    return model.eval().cuda()


def prompts() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 61, length) for length in LENGTHS]


@torch.no_grad()
def whole(model, ids) -> torch.Tensor:
    """Logits [V] behind the last id by the forward pass that training takes."""
    packed = packed_sequence(torch.tensor([0, len(ids)], dtype=torch.int32, device="cuda"))
    tokens = torch.tensor([ids], device="cuda")
    return model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=packed)[0, -1]


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-3), ("bf16", 5e-2)])
def test_a_batch_from_cached_states_gives_the_logits_of_whole_forward_passes(precision, bound):
    model = model_of(precision)
    rows = [prompt.tolist() for prompt in prompts()]
    logits, cache = prefill(model, prompts(), room=8)
    for token in range(8):
        for row, found in zip(rows, logits, strict=True):
            assert relative_error(found, whole(model, row)) < bound
            row.append(token)
        logits = decode(model, cache, torch.full((len(rows),), token, device="cuda"))


def test_the_host_waits_once_a_token():
    model = model_of("bf16")
    settings = {"max_new_tokens": 8, "sampling": Sampling(temperature=1.0, top_p=0.9)}
    list(stream(model, prompts(), **settings))
    steps = stream(model, prompts(), **settings)
    next(steps)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest = len(list(steps))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    assert (rest, len(waits)) == (7, 7)
