"""What a benchmark entry measured: the kernel files' hash, and the entries of docs/benchmarks.md that are out of date.

usage: python kernels/benchmarks/measured.py
Names every entry whose hash is not that of the kernel files as they are now, and then exits with 1.
"""

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels" / "palimpsa_kernels" / "triton"
DOCUMENT = ROOT / "docs" / "benchmarks.md"


def kernel_hash(folder: Path = KERNELS) -> str:
    """First 12 hex digits of the SHA-256 over the names and contents of the folder's Python files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def stale_entries(text: str, current: str) -> list[str]:
    """Titles of the sections (`## title`) that state `Kernel files: <hash>` with another hash than the current one."""
    stale = []
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        stated = re.findall(r"Kernel files: `?([0-9a-f]{12})", section)
        if any(entry != current for entry in stated):
            stale.append(section.splitlines()[0].strip())
    return stale


if __name__ == "__main__":
    stale = stale_entries(DOCUMENT.read_text(), kernel_hash())
    for title in stale:
        print(f"docs/benchmarks.md, {title}: measured with other kernel files than the present {kernel_hash()}")
    sys.exit(1 if stale else 0)
