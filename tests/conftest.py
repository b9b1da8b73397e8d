"""Fixtures that tests of several parts share."""

import os
import signal

import pytest
import torch
from helpers.runs import make_data
from hypothesis import settings

# Without a CUDA device Triton's kernels run under its interpreter, chosen before any test module imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts what runs in the background with SIGINT ignored, and so it would be in processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a shared machine an example may take any time.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Folder of a tiny tokenizer and the blends train.yaml and valid.yaml."""
    return make_data(tmp_path_factory.mktemp("tiny_data"))
