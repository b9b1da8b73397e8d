"""The scans between their activations and the skip, from PyTorch operations, against the definition."""

import pytest
import torch
from helpers.mixing_cases import mixing_definition, mixing_errors, mixing_inputs, mixing_results
from palimpsa_kernels import HeadParameters, Importance, mixing, mixing_scan

CASES = {
    "rows": {"batch": 2, "states": 2},
    "packed": {"states": 4},
    "no initial state": {"initial": False},
    "mamba2": {"importance": False},
    "palimpsa-d": {"strength": True, "groups": 4},
    "palimpsa-d, without importance": {"strength": True, "importance": False},
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_definition(name):
    offsets = (0, 0, 5, 5, 11) if name == "packed" else None
    inputs = mixing_inputs(**CASES[name])
    expected = mixing_results(mixing_definition, inputs, dtype=torch.float64, offsets=offsets)
    wrong = {n: e for n, e in mixing_errors(mixing_results(mixing_scan, inputs, offsets=offsets), expected).items()
             if not e <= 1e-5}  # fmt: skip
    assert not wrong, wrong


@pytest.mark.parametrize("options", [{}, {"strength": True}, {"scale": 0.5}, {"importance": True}], ids=str)
def test_peers_are_asked_for_mamba2_alone(options, monkeypatch):
    inputs = mixing_inputs(initial=False)
    calls = []
    monkeypatch.setattr(mixing, "scan_implementation", calls.append)
    importance = Importance(inputs["logits"], inputs["b_scale"], inputs["prior"]) if "importance" in options else None
    options = {name: inputs["dt"] if name == "strength" else value for name, value in options.items()}
    heads = HeadParameters(inputs["dt_bias"], inputs["A_log"], inputs["D"])
    mixing_scan(*(inputs[n] for n in ("q", "k", "x", "dt")), heads, **options | {"importance": importance})
    assert [call.mamba2 for call in calls] == [not options]


def test_states_are_returned_only_when_asked_for():
    inputs = mixing_inputs(importance=False)
    heads = HeadParameters(inputs["dt_bias"], inputs["A_log"], inputs["D"])
    arguments = (inputs["q"], inputs["k"], inputs["x"], inputs["dt"], heads)
    assert mixing_scan(*arguments)[1] == ()
    assert [s.shape for s in mixing_scan(*arguments, output_final_state=True)[1]] == [(1, 4, 16, 16)]


def test_what_does_not_fit_is_named():
    inputs = mixing_inputs()
    heads = HeadParameters(inputs["dt_bias"], inputs["A_log"], inputs["D"])
    importance = Importance(inputs["logits"], inputs["b_scale"], inputs["prior"])
    arguments = (inputs["q"], inputs["k"], inputs["x"])
    with pytest.raises(ValueError, match=r"dt has shape"):
        mixing_scan(*arguments, inputs["dt"][..., :2], heads)
    with pytest.raises(ValueError, match=r"dt has dtype torch.float64, expected torch.float32$"):
        mixing_scan(*arguments, inputs["dt"].double(), heads)
    with pytest.raises(ValueError, match=r"strength has shape"):
        mixing_scan(*arguments, inputs["dt"], heads, strength=inputs["dt"][..., :2])
    with pytest.raises(ValueError, match=r"b_scale has shape"):
        mixing_scan(*arguments, inputs["dt"], heads, importance._replace(b_scale=inputs["D"][:2]))
    with pytest.raises(ValueError, match="A_log has dtype"):
        mixing_scan(*arguments, inputs["dt"], heads._replace(A_log=inputs["A_log"].bfloat16()))
    with pytest.raises(ValueError, match="prior must be positive"):
        mixing_scan(*arguments, inputs["dt"], heads, importance._replace(prior=-inputs["prior"]))
    with pytest.raises(ValueError, match="initial_state has 1 states"):
        mixing_scan(*arguments, inputs["dt"], heads, importance, initial_state=(inputs["M"],))
