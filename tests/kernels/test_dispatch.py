"""The choice between Triton and PyTorch."""

import logging
import subprocess
import sys
import types

import pytest
import torch
from palimpsa_kernels import chunk_ssd, chunked, dispatch, steps


@pytest.fixture(autouse=True)
def fresh_choice():
    dispatch.implementation.cache_clear()
    yield
    dispatch.implementation.cache_clear()


def test_the_package_does_not_import_triton():
    program = "import sys, palimpsa_kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_cuda_takes_triton_functions_where_they_exist(monkeypatch):
    module = types.SimpleNamespace(chunk_palimpsa=print)
    monkeypatch.setattr(dispatch, "triton_module", lambda: module)
    assert dispatch.implementation("chunk_palimpsa", "cuda") is print
    assert dispatch.implementation("palimpsa_step", "cuda") is steps.palimpsa_step
    assert dispatch.implementation("chunk_palimpsa", "cpu") is chunked.chunk_palimpsa


def test_cuda_runs_in_pytorch_without_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_module", lambda: None)
    assert dispatch.implementation("chunk_palimpsa", "cuda") is chunked.chunk_palimpsa


def test_a_missing_module_is_no_error(monkeypatch):
    monkeypatch.setattr(dispatch, "TRITON_MODULE", "palimpsa_kernels.no_such_module")
    assert dispatch.triton_module.__wrapped__() is None


def test_the_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="palimpsa_kernels"):
        for _ in range(3):
            chunk_ssd(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1))
    assert [record.getMessage() for record in caplog.records] == ["chunk_ssd on cpu runs in PyTorch"]
