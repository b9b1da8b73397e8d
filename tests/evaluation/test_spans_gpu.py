"""Packed scores on a GPU against each text by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from helpers.random_stage import write_random_stage
from helpers.runs import make_data

from megatron_palimpsa.evaluation.spans import Span, score_spans
from megatron_palimpsa.inference import opened

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_packed_scores_are_those_of_each_text_alone(
    tmp_path: Path, precision: Literal["fp32", "bf16"], tolerance: float
) -> None:
    (tmp_path / "data").mkdir()
    stage = write_random_stage(tmp_path, make_data(tmp_path / "data"))
    draw = np.random.default_rng(3)
    spans = [Span(draw.integers(320, size=length).astype(np.int32), 1) for length in (900, 5, 130, 2, 64)]
    with opened(stage, precision) as it:
        assert next(it.model.parameters()).is_cuda
        for span, found in zip(spans, score_spans(it.model, spans, 500), strict=True):
            ids = torch.from_numpy(span.ids).long().cuda()
            with torch.no_grad():
                logits = it.model(input_ids=ids[None, :-1], position_ids=None, attention_mask=None)[0].double()
            expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].cpu().numpy()
            np.testing.assert_allclose(found.log_probabilities, expected, rtol=0, atol=tolerance)
