"""The console line."""

import logging

import pytest

from megatron_palimpsa.training.console import Console, clock, peak_flops, short_count


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (999, "999"), (12345, "12.3K"), (2.7e9, "2.7B"), (1.5e13, "15T")]
)
def test_short_counts(value, text):
    assert short_count(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (3725.4, "1:02:05"), (90000, "25:00:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("name", "flops"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Radeon", None)],
)
def test_peak_by_device_name(name, flops):
    assert peak_flops(name) == flops


def test_train_line_on_a_gpu(caplog):
    caplog.set_level(logging.INFO)
    Console(100, 1000, flops_per_token=6e9, peak=1e15).train(10, 3.25, 2e-4, 0.812, 50_000.0, 2)
    assert caplog.messages == [
        "step 10/100 | loss 3.2500 | lr 2.00e-04 | grad norm 0.812 | 50K tokens/s | MFU 30.0 % | 2 skipped"
        " | 0:00:02 left"
    ]


def test_train_line_on_a_cpu_and_with_every_step_refused(caplog):
    caplog.set_level(logging.INFO)
    Console(100, 1000, flops_per_token=6e9, peak=None).train(10, None, 2e-4, 0.812, 50.0, 0)
    assert caplog.messages == ["step 10/100 | loss - | lr 2.00e-04 | grad norm 0.812 | 50 tokens/s | 0:30:00 left"]
