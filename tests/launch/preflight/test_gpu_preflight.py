"""The pre-flight check's questions to GPUs, over NCCL."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from palimpsa_launch.preflight.allreduce import Team, measure
from palimpsa_launch.preflight.gpus import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_every_gpu_is_found_with_its_memory():
    found = gpus()
    assert len(found) == torch.cuda.device_count()
    for gpu in found:
        assert gpu["total_gb"] > 1
        assert 0 < gpu["free_gb"] <= gpu["total_gb"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bandwidth_of_two_gpus():
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    speed, problem = measure(Team("0-0", "localhost", store.port, 0, 2), 2, 256.0, 60)
    assert problem == ""
    print(f"bus bandwidth of two GPUs: {speed:.1f} GB/s")
    assert speed > 1
