"""Entries of docs/benchmarks.md are named when the kernel files have changed since."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))
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
