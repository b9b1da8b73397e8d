"""A surgery where the layers run on a GPU: both kinds' Triton kernels agree without importance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.published_mamba2 import random_mamba2, save_as_state_spaces

from megatron_palimpsa import cli

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_importance_0_is_mamba2(tmp_path: Path) -> None:
    model = random_mamba2(n_groups=1, vocab_size=64, tie_word_embeddings=True, num_hidden_layers=4)
    save_as_state_spaces(model, tmp_path / "source", 61)
    assert cli.main(["convert", "mamba2", str(tmp_path / "source"), str(tmp_path / "base")]) == 0
    layers = ["--layers", "2,4"]
    assert cli.main(["convert", "palimpsa", str(tmp_path / "base"), str(tmp_path / "new"), *layers]) == 0
    report = json.loads((tmp_path / "new" / "conversion.json").read_text())
    assert report["farthest_step"] <= 1e-5
    assert report["importance"]["largest"] > 1e-3
