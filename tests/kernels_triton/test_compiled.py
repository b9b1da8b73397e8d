"""What the compiler makes of the shipped configurations, without a GPU, against the limits of thresholds.toml."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))
from loops import used_as_bounds_alone

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
LIMITS = tomllib.loads((Path(__file__).parent / "thresholds.toml").read_text())
MEASURED_AS = {"per_element": "instructions_per_element"}


def beyond(entry: dict[str, str | float]) -> dict[str, str]:
    """What of a line of the compile report passes its limit."""
    limits = LIMITS[entry["kernel"]][entry["target"]]
    found = {name: entry[MEASURED_AS.get(name, name)] for name in limits}
    return {name: f"{found[name]} > {limit}" for name, limit in limits.items() if found[name] > limit}


@pytest.mark.parametrize(
    "target",
    ["sm_90", pytest.param("sm_80", marks=pytest.mark.long), pytest.param("sm_100", marks=pytest.mark.long)],
)
def test_shipped_configurations_keep_to_their_limits(target: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "TRITON_INTERPRET": "0"}
    script = ROOT / "kernels" / "benchmarks" / "compiled.py"
    run = subprocess.run(
        [sys.executable, str(script), target], stdout=subprocess.PIPE, text=True, env=environment, check=True
    )
    entries = [json.loads(line) for line in run.stdout.splitlines()]
    assert {entry["kernel"] for entry in entries} == LIMITS.keys()
    wrong = {entry["kernel"]: beyond(entry) for entry in entries if beyond(entry)}
    assert not wrong, wrong
    assert not [entry["kernel"] for entry in entries if entry["bounds_alone"]]
    assert [entry["tensor_cores"] for entry in entries if "tensor_cores" in entry] == [True, True]


def test_a_slower_kernel_passes_its_limits() -> None:
    limits = LIMITS["readout"]["sm_90"]
    entry = {"kernel": "readout", "target": "sm_90", **limits, "instructions_per_element": limits["per_element"]}
    assert not beyond(entry)
    assert set(beyond({**entry, "spilled": 2, "instructions_per_element": 2 * limits["per_element"]})) == {
        "spilled",
        "per_element",
    }


def test_every_limit_has_a_reason() -> None:
    assert all(len(kernel["reason"]) > 10 for kernel in LIMITS.values())


CARRIED = """
%sum:2 = scf.for %i = %c1 to %blocks step %c1 iter_args(%total = %zero, %begin = %c0) -> (f32, i32) : i32 {
  %end = arith.muli %i, %c16 : i32 loc("x.py")
  %length = arith.subi %end, %begin : i32
  %inner = scf.for %j = FIRST to LAST step %c1 iter_args(%part = %total) -> (f32) : i32 {
    %at = tt.addptr %pointer, PLACE : !tt.ptr<f32>, i32
    %x = tt.load %at : !tt.ptr<f32>
    %next = arith.addf %part, %x : f32
    scf.yield %next : f32
  }
  scf.yield %inner, %end : f32, i32
}
"""


@pytest.mark.parametrize(
    ("first", "last", "place", "found"),
    [
        ("%begin", "%end", "%j", ["%begin"]),
        ("%c0", "%length", "%j", ["%begin"]),
        ("%begin", "%end", "%length", []),
        ("%c0", "%length", "%begin", []),
        ("%c0", "%end", "%begin", []),
    ],
)
def test_a_value_that_only_bounds_use_is_found(first: str, last: str, place: str, found: list[str]) -> None:
    code = CARRIED.replace("FIRST", first).replace("LAST", last).replace("PLACE", place)
    assert used_as_bounds_alone(code) == found
