"""What the benchmarks do besides timing: rows that survive a cut, bars, errors by head, the slices of layers."""

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))
from bars import bar, scan_bars
from correctness import class_errors, reference_results
from palimpsa_kernels import chunked, ssd
from shapes import PALIMPSA_INPUTS, SSD_INPUTS, Shape, make_inputs
from table import Row, append_row, open_for_rows, plot, read_rows
from timing import positive

STAMP = {"card": "none", "versions": "torch 2 triton 3", "commit": "0", "kernel_files": "0123456789ab"}


def row(shape: str = "2.7B", tokens: int = 32768, kernel: str = "palimpsa", batch: int = 1, **figures) -> Row:
    known = {"forward_ms": 9.5, "forward_backward_ms": 40.0, "peak_gib": 3.0, "floor_fraction": None, "error": 1e-3}
    return Row(shape, batch, tokens, "classes", kernel, **(known | figures), **STAMP)


def test_rows_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    assert read_rows(path) == []
    rows = [row(), row(kernel="palimpsa step", tokens=1, forward_backward_ms=None, peak_gib=None, error=None)]
    for one in rows:
        append_row(path, one)
    assert read_rows(path) == rows


@pytest.mark.parametrize("cut", [1, 20])
def test_a_row_that_was_cut_off_is_measured_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.csv"
    for tokens in (2048, 4096):
        append_row(path, row(tokens=tokens))
    path.write_text(path.read_text()[:-cut])
    assert [r.tokens for r in read_rows(path)] == [2048]
    append_row(path, row(tokens=4096))
    assert [r.tokens for r in read_rows(path)] == [2048, 4096]


def test_another_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="another file"):
        read_rows(tmp_path / "rows.csv")


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for tokens in (2048, 4096):
        append_row(path, row(tokens=tokens))
    path.write_text(path.read_text().replace("4096", "4k"))
    with pytest.raises(ValueError, match=r"rows.csv, line 3: .*'4k'"):
        read_rows(path)


def test_a_file_that_is_no_text_is_refused_and_an_empty_one_taken(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="another file"):
        read_rows(path)
    path.write_text("")
    assert open_for_rows(path) == []
    append_row(path, row())
    assert read_rows(path) == [row()]


def test_an_output_that_cannot_be_written_shows_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_for_rows(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_for_rows(tmp_path / "file" / "rows.csv")


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "many", ""])
def test_numbers_on_the_command_line_are_positive(text: str) -> None:
    assert positive("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="no number from 1 on"):
        positive(text)


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "message"),
    [
        ("compiled.py", ["sm_75"], {}, "sm_75: not among the targets sm_80, sm_90, sm_100"),
        ("compiled.py", ["sm_90"], {"TRITON_INTERPRET": "1"}, "only without TRITON_INTERPRET=1"),
        ("first_call.py", [], {"CUDA_VISIBLE_DEVICES": ""}, "needs a CUDA device"),
        ("run.py", ["--lengths", "0"], {}, "'0' is no number from 1 on"),
        ("throughput.py", ["--tokens", "100"], {}, "--tokens 100 is no multiple of 64"),
        ("throughput.py", [], {"CUDA_VISIBLE_DEVICES": ""}, "needs a CUDA device"),
    ],
)
def test_scripts_end_with_one_clear_message(
    script: str, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    folder = Path(__file__).resolve().parents[2] / "kernels"
    surroundings = {**os.environ, "PYTHONPATH": str(folder), "TRITON_INTERPRET": "0"} | environment
    command = [sys.executable, str(folder / "benchmarks" / script), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=surroundings, check=False)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_compiling_without_triton_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
    script = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "compiled.py"
    path = {"PYTHONPATH": f"{tmp_path}:{script.parents[1]}"}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, **path}, check=False
    )
    assert run.returncode == 1
    assert "compiled.py needs torch, triton" in run.stderr
    assert "Traceback" not in run.stderr


def test_context_parallel_rows_go_to_a_csv_of_theirs_alone(tmp_path: Path) -> None:
    from context_parallel import COLUMNS, append, start_csv

    path = tmp_path / "new" / "rows.csv"
    for _ in range(2):
        start_csv(path)
        append(path, [dict.fromkeys(COLUMNS, 1)])
    assert path.read_text().split() == [",".join(COLUMNS), *[",".join("1" for _ in COLUMNS)] * 2]
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="another file"):
        start_csv(path)


def test_a_picture_of_shapes_and_kernels(tmp_path: Path) -> None:
    plot([row(tokens=t, kernel=k) for t in (2048, 4096) for k in ("palimpsa", "ssd")], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000


def test_only_rows_of_the_same_kernels_spare_a_measurement() -> None:
    assert dataclasses.replace(row(), commit="1", forward_ms=1.0).key == row().key
    assert dataclasses.replace(row(), kernel_files="other").key != row().key


def test_bars_are_met_missed_or_not_measured() -> None:
    assert bar("speed", 0.8, 0.8, at_least=True) == "bar speed >= 0.8: 0.8, met"
    assert bar("time", 10.01, 10, " ms") == "bar time <= 10 ms: 10 ms, missed"
    rows = [
        row(),
        row(tokens=131072, forward_backward_ms=180.0),
        row(shape="2.7B, 1 of 8 GPUs", forward_backward_ms=6.0),
        row(kernel="ssd", forward_backward_ms=6.0, error=6e-3),
        row(kernel="mamba_ssm ssd", forward_backward_ms=5.8, error=0.5),
        row(kernel="palimpsa step", tokens=1, forward_ms=0.02, forward_backward_ms=None),
        row(kernel="copy of as many bytes", tokens=1, forward_ms=0.01, forward_backward_ms=None),
    ]
    lines = dict(line.removeprefix("bar ").split(": ", 1) for line in scan_bars(rows, "classes"))
    ends = {name: text.rsplit(" ", 1)[-1] for name, text in lines.items()}
    of = {start: end for start in lines for end in [ends[start]]}
    assert of["2.7B, T = 32768, forward <= 10 ms"] == "met"
    assert of["2.7B, T = 32768, forward + backward (aim) <= 20 ms"] == "missed"
    assert of["2.7B, T = 4096, forward + backward <= 6 ms"] == "measured"
    assert of["2.7B, per token at T = 131072 over that at 32768 <= 1.1"] == "missed"  # 1.125
    assert of["H = 10, per-head speed over that of H = 80, T = 32768 >= 0.8"] == "met"  # 0.833
    assert of["2.7B, T = 32768, our SSD forward + backward over mamba_ssm's <= 1.1"] == "met"
    assert of["2.7B, decode step of batch 1 over a copy <= 1.5"] == "missed"
    assert of["error of bf16 inputs, every output, gradient and head <= 0.005"] == "missed"
    assert not any("missed" in line for line in scan_bars(rows, "weak"))


@pytest.mark.parametrize("importance", [True, False], ids=["palimpsa", "ssd"])
def test_a_scan_that_is_wrong_in_one_head_shows(importance: bool) -> None:
    shape = Shape(2, 4, 1, 16, 16)
    scan = chunked.chunk_palimpsa if importance else ssd.chunk_ssd
    inputs = make_inputs(shape, 530, "classes", "cpu")
    inputs = {name: inputs[name] for name in (PALIMPSA_INPUTS if importance else SSD_INPUTS)}
    expected = reference_results(scan, inputs)
    right = class_errors(scan, expected, inputs, shape, "classes")
    assert right.keys() == {"weak", "medium", "strong", "mixed", "shared"}
    assert all(error < 5e-3 for error, _ in right.values())

    def wrong_head(*arguments: torch.Tensor) -> torch.Tensor:
        y = scan(*arguments)
        return torch.cat([y[:, :, :2], 1.02 * y[:, :, 2:3], y[:, :, 3:]], 2)

    wrong = class_errors(wrong_head, expected, inputs, shape, "classes")
    assert wrong["strong"][0] > 5e-3
    assert wrong["weak"] == right["weak"]


def test_the_first_tokens_are_the_same_for_every_length() -> None:
    short, long = (make_inputs(Shape(1, 4, 1, 16, 16), tokens, "classes", "cpu") for tokens in (512, 700))
    for name in SSD_INPUTS:
        assert torch.equal(long[name][:, :512], short[name]), name


def test_slices_of_layers_take_a_training_step() -> None:
    from layers import SLICES, build_slice, part_of, training_step

    from megatron_palimpsa import parallel
    from megatron_palimpsa.config import ParallelConfig

    parallel.initialize(ParallelConfig(), seed=1)
    sizes = {"hidden_size": 32, "d_state": 8, "headdim": 8, "beta_rank": 4}
    for pattern in SLICES.values():
        decoder = build_slice(pattern, 16, sizes)
        assert [layer.mixer.importance for layer in decoder.layers] == [symbol == "P" for symbol in pattern]
        hidden = torch.randn(16, 1, 32, requires_grad=True)
        training_step(decoder, hidden, torch.ones_like(hidden))()
        trained = [p for p in decoder.parameters() if p.requires_grad]
        assert hidden.grad is not None
        assert all(p.grad is not None for p in trained)
    parallel.destroy()
    names = {
        "adjoint_kernel": "scan",
        "conv_gradient_kernel": "conv",
        "nvjet_hsh_128x256": "matmul",
        "elementwise": "other",
    }
    assert {name: part_of(name) for name in names} == names


def test_steps_of_the_throughput_are_the_recurrences(monkeypatch: pytest.MonkeyPatch) -> None:
    import throughput

    monkeypatch.setattr(
        throughput, "empty_states", lambda batch, size: tuple(torch.zeros(batch, 1, size, size) for _ in range(2))
    )
    inputs = {name: x.detach() for name, x in make_inputs(Shape(2, 1, 1, 8, 8), 16, "weak", "cpu").items()}
    for name in ("palimpsa", "ssd"):
        recurrence = throughput.recurrences()[name]
        own = {n: inputs[n] for n in recurrence.inputs}
        assert throughput.error(recurrence, own, 8) < throughput.BOUND, name
