"""What a process pays before its kernels run: compiling, reading the cache, and new lengths.

usage: python kernels/benchmarks/first_call.py

Starts two processes with one empty cache of compiled kernels: the first compiles, the second finds them there. Each
takes forward and backward of both scans of the 2.7B shape at T = 4096, then lengths that it has not seen. Printed are
the seconds of the first call (importing the Triton kernels included; torch and the CUDA context are there before), and
how many kernels the new lengths compile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from bars import bar

TOKENS = 4096
NEW_LENGTHS = (4097, 1, 77, 512, 6000, 8192, 20000, 32768)


def kernels_in_memory() -> int:
    """Compiled kernels that this process holds, over all functions of the package."""
    import palimpsa_kernels.triton
    import torch
    from triton.runtime.jit import JITFunction

    device = torch.cuda.current_device()
    functions = {
        id(x): x
        for name, module in sys.modules.items()
        if name.startswith(palimpsa_kernels.triton.__name__)
        for x in vars(module).values()
        if isinstance(x, JITFunction)
    }
    return sum(len(function.device_caches[device][0]) for function in functions.values())


def measure() -> dict[str, float]:
    """Seconds of the first and of the second call, and kernels compiled for new lengths."""
    import torch
    from shapes import PALIMPSA_INPUTS, SHAPES, SSD_INPUTS, make_inputs

    inputs = {tokens: make_inputs(SHAPES["2.7B"], tokens, "classes") for tokens in (TOKENS, *NEW_LENGTHS)}
    torch.cuda.synchronize()

    def call(tokens: int) -> float:
        start = time.perf_counter()
        from palimpsa_kernels import chunk_palimpsa, chunk_ssd

        for scan, names in ((chunk_palimpsa, PALIMPSA_INPUTS), (chunk_ssd, SSD_INPUTS)):
            scan(*(inputs[tokens][name] for name in names)).sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds = {"first": call(TOKENS), "second": call(TOKENS)}
    compiled = kernels_in_memory()
    for tokens in NEW_LENGTHS:
        call(tokens)
    return seconds | {"kernels": compiled, "compiled for new lengths": kernels_in_memory() - compiled}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    is_child = parser.parse_args().child
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA device\n")
    if is_child:
        print(json.dumps(measure()))
        return
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for start in ("empty cache", "warm cache"):
            run = subprocess.run(
                [sys.executable, __file__, "--child"],
                env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            found.append(json.loads(run.stdout.splitlines()[-1]))
            figures = ", ".join(f"{name} {value:.3g}" for name, value in found[-1].items())
            print(f"{start}: seconds of calls and kernels: {figures}", flush=True)
    print(bar("first call of a process with a warm cache", found[1]["first"], 2, " s"))
    print(bar(f"kernels compiled for the lengths {NEW_LENGTHS}", found[1]["compiled for new lengths"], 0))


if __name__ == "__main__":
    main()
