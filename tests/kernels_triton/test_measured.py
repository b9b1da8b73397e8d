"""Entries of docs/benchmarks.md are named when the kernel files have changed since."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))
import measured
from measured import kernel_hash, stale_entries

ENTRIES = """# Benchmarks
## Old
Kernel files: `0123456789ab`
## New
Kernel files: {current}
## Without figures
"""


def test_a_change_of_a_kernel_file_makes_entries_stale(tmp_path: Path) -> None:
    file = tmp_path / "scan.py"
    file.write_text("one")
    before = kernel_hash(tmp_path)
    assert stale_entries(ENTRIES.format(current=before), kernel_hash(tmp_path)) == ["Old"]
    file.write_text("two")
    assert stale_entries(ENTRIES.format(current=before), kernel_hash(tmp_path)) == ["Old", "New"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no section states"),
        ("# Benchmarks\n## New\nKernel file: `0123456789ab`\n", "no section states"),
        (ENTRIES.format(current="0123456789a"), "New: 12 hex digits belong .* not '0123456789a'"),
        (ENTRIES.format(current="0123456789AB"), "New: 12 hex digits belong"),
        (ENTRIES.format(current=""), "New: 12 hex digits belong"),
    ],
)
def test_a_damaged_document_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stale_entries(text, "0123456789ab")


def test_a_missing_document_ends_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured, "DOCUMENT", tmp_path / "none.md")
    monkeypatch.setattr(sys, "argv", ["measured.py"])
    with pytest.raises(SystemExit) as end:
        measured.main()
    assert end.value.code == 2
    assert "docs/benchmarks.md: [Errno 2]" in capsys.readouterr().err


def test_the_repositorys_document_is_whole() -> None:
    run = subprocess.run([sys.executable, measured.__file__], capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stderr
