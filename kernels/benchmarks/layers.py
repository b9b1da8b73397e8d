"""One training step of an 8-layer slice of the 2.7B hybrid, 7 M + 1 P, against the same slice with 8 M, on one GPU.

usage: python kernels/benchmarks/layers.py [--tokens 32768] [--rounds 7] [--kernels own mamba_ssm]

Forward and backward in bf16 of the real layers (norm, mixer, residual in fp32) without embedding and head. Decays are
as layers are initialised; in a third slice the P layer's rates A are divided by LONGER, as of the layers with the
longest memory, which Palimpsa replaces. The slices take turns, and medians are compared. `--kernels` are values of
PALIMPSA_KERNELS: which SSD and convolution the layers run; the ratio that counts is that of the value with the fastest
8 M. Then follow peak memory and a profile of one step of each slice by part. Needs megatron_palimpsa with its
dependencies (megatron-core, pydantic, pyyaml).
"""

import argparse
import importlib.util
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bars import bar
from measured import kernel_hash
from palimpsa_kernels.activations import step_and_decay
from palimpsa_kernels.dispatch import VARIABLE
from timing import clear_gradients, peak_gib, positive, times_ms
from torch import Tensor, nn

from megatron_palimpsa import parallel
from megatron_palimpsa.bench.profile import kernels_of, part_of
from megatron_palimpsa.config import ParallelConfig, stage_from_dict
from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.build import packed_sequence

LONG = "7 M + 1 P, long memory"
SLICES = {"8 M": "MMMMMMMM", "7 M + 1 P": "MMMPMMMM", LONG: "MMMPMMMM"}
LONGER = 32
LIMIT, AIM = 1.18, 1.08


def build_slice(pattern: str, tokens: int, sizes: dict[str, object]) -> nn.Module:
    """The layers of a pattern, without final norm, on the current device."""
    tree = {
        "name": "slice",
        "output_dir": "runs",
        "model": {"pattern": pattern, "vocab_size": 64, "seq_length": tokens} | sizes,
        "data": {"train_blend": "none", "valid_blend": "none", "tokenizer": "none"},
        "train": {"tokens": tokens, "global_batch_tokens": tokens},
        "optimizer": {"lr": 1e-4},
    }
    decoder = build_model(stage_from_dict(tree, where="layers.py")).decoder
    decoder.post_layer_norm = False
    del decoder.final_norm
    return decoder


def lengthen_memory(decoder: nn.Module) -> None:
    """Divide the rates A of the layers with importance by LONGER."""
    with torch.no_grad():
        for layer in decoder.layers:
            if layer.mixer.importance:
                layer.mixer.A_log -= math.log(LONGER)


def median_windows(decoder: nn.Module, hidden: Tensor) -> list[float]:
    """Medians over heads and tokens of 1 / (1 - alpha), if `hidden` came to each layer with importance."""
    windows = []
    with torch.no_grad():
        for layer in decoder.layers:
            mixer = layer.mixer
            if mixer.importance:
                dt = F.linear(layer.norm(hidden), mixer.dt_weight)
                _, log_alpha = step_and_decay(dt, mixer.dt_bias, mixer.A_log)
                windows.append(float((-1 / torch.expm1(log_alpha)).flatten()[: 1 << 23].median()))
    return windows


def training_step(decoder: nn.Module, hidden: Tensor, adjoint: Tensor) -> Callable[[], None]:
    """Forward and backward over one document, gradients to the input and to every parameter."""
    parameters = list(decoder.parameters())
    offsets = torch.tensor([0, len(hidden)], dtype=torch.int32, device=hidden.device)

    def step() -> None:
        clear_gradients([hidden, *parameters])
        decoder(hidden, attention_mask=None, packed_seq_params=packed_sequence(offsets)).backward(adjoint)

    return step


def with_kernels(setting: str, step: Callable[[], None]) -> Callable[[], None]:
    """The step under a value of PALIMPSA_KERNELS, which is read at each call."""

    def run() -> None:
        os.environ[VARIABLE] = setting
        step()

    return run


def profile(step: Callable[[], None]) -> tuple[dict[str, float], list[tuple[float, str]]]:
    """Milliseconds on the device by part, and of the kernels that take longest."""
    kernels: dict[str, float] = defaultdict(float)
    for name, start, end in kernels_of(step)[0]:
        kernels[name] += 1e3 * (end - start)
    parts: dict[str, float] = defaultdict(float)
    for name, time in kernels.items():
        parts[part_of(name)] += time
    return dict(parts), sorted(((time, name) for name, time in kernels.items()), reverse=True)[:14]


def importable(setting: str) -> bool:
    """Whether the packages that a value of PALIMPSA_KERNELS names are installed."""
    names = [] if setting in ("own", "auto") else setting.split(",")
    return all(importlib.util.find_spec(name) is not None for name in names)


def compare(tokens: int, rounds: int, settings: list[str], sizes: dict[str, object]) -> None:
    """Measure and print everything."""
    slices = {name: build_slice(pattern, tokens, sizes) for name, pattern in SLICES.items()}
    lengthen_memory(slices[LONG])
    config: Any = next(iter(slices.values())).config
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (tokens, 1, config.hidden_size)
    dtype = torch.float32 if config.fp32_residual_connection else torch.bfloat16
    hidden = torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()
    adjoint = torch.randn(shape, device="cuda", generator=generator).to(dtype) / tokens
    for name, decoder in slices.items():
        for window in median_windows(decoder, hidden):
            print(f"{name}: median window of the P layer {window:.0f} tokens", flush=True)
    steps = {name: training_step(decoder, hidden, adjoint) for name, decoder in slices.items()}
    runs = {(setting, name): with_kernels(setting, step) for setting in settings for name, step in steps.items()}
    taken = times_ms(list(runs.values()), budget_ms=0, least=rounds)
    medians = {key: statistics.median(times) for key, times in zip(runs, taken, strict=True)}
    ratios = {key: median / medians[key[0], "8 M"] for key, median in medians.items()}
    for (setting, name), median in medians.items():
        print(f"{VARIABLE}={setting}: {name} {median:.1f} ms, ratio {ratios[setting, name]:.3f}", flush=True)
    fastest = min(settings, key=lambda setting: medians[setting, "8 M"])
    for name in slices:
        run = runs[fastest, name]
        print(f"{name}, {fastest}: peak {peak_gib(run):.2f} GiB beyond weights and gradients")
        parts, longest = profile(run)
        whole = sum(parts.values())
        print("  " + ", ".join(f"{part} {ms:.1f} ms ({ms / whole:.0%})" for part, ms in sorted(parts.items())))
        for ms, kernel in longest:
            print(f"  {ms:8.2f} ms  {part_of(kernel):5s} {kernel[:90]}")
    for name in list(slices)[1:]:
        for limit, kind in ((LIMIT, ""), (AIM, " (aim)")):
            print(bar(f"{name} over 8 M, T = {tokens}, {fastest}{kind}", ratios[fastest, name], limit))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=32768)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--hidden-size", type=positive, default=2560)
    parser.add_argument("--kernels", nargs="+", default=["own", "mamba_ssm"], help=f"values of {VARIABLE}")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA device\n")
    settings = [setting for setting in arguments.kernels if importable(setting)]
    for setting in arguments.kernels:
        if setting not in settings:
            print(f"{setting} is left out: not installed", flush=True)
    if not settings:
        parser.exit(2, f"none of {', '.join(arguments.kernels)} is installed\n")
    parallel.initialize(ParallelConfig(), seed=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernel files {kernel_hash()}", flush=True)
    compare(arguments.tokens, arguments.rounds, settings, {"hidden_size": arguments.hidden_size})
    parallel.destroy()


if __name__ == "__main__":
    main()
