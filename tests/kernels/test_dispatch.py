"""The choice between Triton and PyTorch."""

import importlib.util
import logging
import subprocess
import sys
import types

import pytest
import torch
from palimpsa_kernels import chunk_ssd, chunked, dispatch, peers, steps

CALL = peers.Call("cuda", torch.bfloat16, packed=False, states=False, long_addresses=False, key_dim=128)
CONVOLUTION = CALL._replace(width=4, channels=5120)


@pytest.fixture(autouse=True)
def fresh_choice():
    cached = dispatch.implementation, dispatch._chosen_peer, dispatch.say_once
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def packages(monkeypatch):
    """Fake packages of the peers, as modules that record how they are called; and no Triton of our own."""
    calls = []

    def record(name, function):
        def recorded(*arguments, **options):
            calls.append((name, arguments, options))
            return function(*arguments)

        return recorded

    modules = {
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": record("mamba_ssm", lambda x, *_: x + 1)},
        "causal_conv1d": {"causal_conv1d_fn": record("causal_conv1d", lambda x, *_: x + 2)},
        "fla.modules.causal_conv1d": {"causal_conv1d": record("fla", lambda x, *_: (x + 3, None))},
    }
    for name, members in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = types.ModuleType(path)
            module.__spec__ = importlib.util.spec_from_loader(path, None)
            monkeypatch.setitem(sys.modules, path, module)
        vars(sys.modules[name]).update(members)
    monkeypatch.setattr(dispatch, "triton_module", lambda: None)
    return calls


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


def choose(monkeypatch, setting, function="mamba2_scan", call=CALL):
    monkeypatch.setenv(dispatch.VARIABLE, setting)
    return dispatch.chosen_peer(function, call)


def test_auto_takes_our_own_and_says_why(monkeypatch, packages, caplog):
    with caplog.at_level(logging.INFO, logger="palimpsa_kernels"):
        for packed in (False, True, False):
            assert dispatch.chosen_peer("mamba2_scan", CALL._replace(packed=packed)) is None
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert message.startswith("mamba2_scan on cuda runs in our own kernels (mamba_ssm is installed, but its gradients")


def test_auto_takes_a_peer_that_is_preferred(monkeypatch, packages):
    monkeypatch.setitem(dispatch.AUTO, "mamba2_scan", ("mamba_ssm",))
    assert dispatch.chosen_peer("mamba2_scan", CALL) is not None
    assert dispatch.chosen_peer("mamba2_scan", CALL._replace(device_type="cpu")) is None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (CALL._replace(dtype=torch.float32), "bf16"),
        (CALL._replace(dtype=torch.float16), "bf16"),
        (CALL._replace(states=True), "states"),
        (CALL._replace(long_addresses=True), "2^31"),
        (CALL._replace(key_dim=512), "K up to 256"),
    ],
)
def test_mamba_ssm_runs_where_it_is_right(monkeypatch, packages, caplog, call, reason):
    assert choose(monkeypatch, "mamba_ssm") is not None
    with caplog.at_level(logging.INFO, logger="palimpsa_kernels"):
        assert choose(monkeypatch, "mamba_ssm", call=call) is None
    assert caplog.records[-1].getMessage().startswith("mamba2_scan on cuda runs in our own kernels (mamba_ssm takes")
    assert reason in caplog.text


def test_what_is_not_mamba2_never_runs_in_a_peer(monkeypatch, packages):
    monkeypatch.setenv(dispatch.VARIABLE, "mamba_ssm")
    assert dispatch.scan_implementation(CALL._replace(mamba2=False)) is None
    assert dispatch.scan_implementation(CALL) is not None


def test_mamba_ssm_is_called_without_its_compiled_mamba1(monkeypatch, packages):
    heads = peers_heads(4)
    x = torch.randn(1, 9, 4, 8)
    q = torch.randn(1, 9, 2, 16)
    offsets = torch.tensor([0, 0, 3, 7], dtype=torch.int32)
    y, states = peers.load_mamba_ssm()(
        q, q + 1, x, torch.zeros(1, 9, 4), heads, None, cu_seqlens=offsets, initial_state=None, output_final_state=False
    )
    assert torch.equal(y, x + 1)
    assert states == ()
    assert peers.COMPILED_MAMBA1 not in sys.modules
    (_, (given, step, rate, k, query, chunk), options), *_ = packages
    assert given is x
    assert query is q
    assert torch.equal(k, q + 1)
    assert chunk == 256
    assert torch.equal(options["D"], heads.D)
    assert options["seq_idx"].tolist() == [[1, 1, 1, 2, 2, 2, 2, -1, -1]]
    assert options["seq_idx"].dtype == torch.int32
    torch.testing.assert_close(step[:, :7], torch.full((1, 7, 4), 1.3132617))  # softplus(1)
    assert torch.equal(step[:, 7:], torch.zeros(1, 2, 4))
    torch.testing.assert_close(rate, torch.full((4,), -2.0))


def peers_heads(count):
    from palimpsa_kernels import HeadParameters

    return HeadParameters(torch.ones(count), torch.full((count,), 2.0).log(), torch.arange(count) / 4)


@pytest.mark.parametrize(
    ("setting", "call", "taken"),
    [
        ("causal_conv1d,fla", CONVOLUTION, 2.0),
        ("fla,causal_conv1d", CONVOLUTION, 3.0),
        ("fla,causal_conv1d", CONVOLUTION._replace(packed=True), 2.0),
        ("causal_conv1d,fla", CONVOLUTION._replace(width=5), 3.0),
        ("causal_conv1d,fla", CONVOLUTION._replace(channels=12), 3.0),
        ("causal_conv1d,fla", CONVOLUTION._replace(states=True), None),
        ("fla", CONVOLUTION._replace(packed=True), None),
        ("mamba_ssm", CONVOLUTION, None),
        ("own", CONVOLUTION, None),
        ("auto", CONVOLUTION, None),
    ],
)
def test_the_convolution_runs_in_the_first_peer_that_takes_it(monkeypatch, packages, setting, call, taken):
    peer = choose(monkeypatch, setting, "causal_conv1d", call)
    if taken is None:
        assert peer is None
        return
    x = torch.randn(1, 6, 8)
    y = peer(x, None, None, activation="silu", cu_seqlens=None, initial_state=None, output_final_state=False)
    assert torch.equal(y, x + taken)


def test_a_setting_that_names_nothing_known_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="'flash' is none of auto, own, causal_conv1d, fla, mamba_ssm"):
        choose(monkeypatch, "flash")


def test_a_package_that_is_asked_for_and_missing_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    with pytest.raises(ValueError, match="PALIMPSA_KERNELS is 'mamba_ssm', but mamba_ssm cannot be imported"):
        choose(monkeypatch, "mamba_ssm")


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("own", None),
        ("mamba_ssm,fla", None),
        ("flash", "is none of"),
        ("fla,x", "'x' is none of"),
        ("own,fla", "own stands alone"),
        ("fla,auto", "auto stands alone"),
        ("", "'' is none of"),
    ],
)
def test_a_setting_is_checked_before_anything_runs(monkeypatch, packages, setting, error):
    monkeypatch.setenv(dispatch.VARIABLE, setting)
    if error is None:
        dispatch.check_setting()
        return
    with pytest.raises(ValueError, match=error):
        dispatch.check_setting()


def test_facts_of_a_call():
    x = torch.empty(1, 2**20, 4096, device="meta", dtype=torch.bfloat16)
    assert peers.facts(x, None, False).long_addresses
    assert not peers.facts(x[:, : 2**18], None, False).long_addresses
    assert peers.facts(x, torch.zeros(2), True, key_dim=3) == peers.Call(
        "meta", torch.bfloat16, True, True, True, key_dim=3
    )
