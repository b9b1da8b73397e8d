"""What the compiler makes of the shipped configurations, without a GPU: spills and instructions per state element.

The thresholds were written down beforehand: the counts of the version that was measured (docs/benchmarks.md), plus 3 %.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
MOST_INSTRUCTIONS = {
    ("readout", "sm_80"): 9.6,
    ("readout", "sm_90"): 9.6,
    ("readout", "sm_100"): 9.9,
    ("adjoint", "sm_80"): 29.5,
    ("adjoint", "sm_90"): 29.3,
    ("adjoint", "sm_100"): 24.1,
}
# Instructions on local memory; the adjoint kernel's lie outside of its elementwise loops.
MOST_SPILLED = {
    ("adjoint", "sm_80"): 70,
    ("adjoint", "sm_90"): 40,
    ("adjoint", "sm_100"): 40,
    ("incoming", "sm_80"): 280,
    ("incoming", "sm_90"): 70,
    ("ssd gradient", "sm_80"): 310,
    ("ssd gradient", "sm_90"): 40,
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_shipped_configurations(target: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "TRITON_INTERPRET": "0"}
    script = ROOT / "kernels" / "benchmarks" / "compiled.py"
    run = subprocess.run(
        [sys.executable, str(script), target], capture_output=True, text=True, env=environment, check=True
    )
    entries = [json.loads(line) for line in run.stdout.splitlines()]
    expected = {"readout", "adjoint", "incoming", "ssd gradient", "step", "conv gradient", "activation gradient"}
    assert expected | {"norm gradient"} <= {e["kernel"] for e in entries}
    wrong = [
        entry
        for entry in entries
        if entry["spilled"] > MOST_SPILLED.get((entry["kernel"], target), 0)
        or entry.get("instructions_per_element", 0) > MOST_INSTRUCTIONS.get((entry["kernel"], target), 0)
    ]
    assert not wrong, wrong
