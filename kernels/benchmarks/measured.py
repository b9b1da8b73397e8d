"""What a benchmark entry measured: the kernel files' hash, and the entries of docs/benchmarks.md that are out of date.

usage: python kernels/benchmarks/measured.py
Names every entry whose hash is not that of the kernel files as they are now, and then exits with 1; with 2 where the
document cannot be read, states a hash that is none, or states no hash at all.
"""

import argparse
import hashlib
import re
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
    """Titles of the sections (`## title`) that state `Kernel files: <hash>` with another hash than the current one.

    Raises:
        ValueError: something else than 12 hex digits stands behind `Kernel files:`, or no section states a hash.
    """
    stale, found = [], False
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title = section.splitlines()[0].strip()
        stated = re.findall(r"Kernel files:[ `]*([^\s`,;]*)", section)
        for entry in stated:
            if not re.fullmatch(r"[0-9a-f]{12}", entry):
                raise ValueError(f"{title}: 12 hex digits belong behind 'Kernel files:', not {entry!r}")
        found |= bool(stated)
        if any(entry != current for entry in stated):
            stale.append(title)
    if not found:
        raise ValueError("no section states what it measured as 'Kernel files: `<12 hex digits>`'")
    return stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    try:
        stale = stale_entries(DOCUMENT.read_text(), kernel_hash())
    except (OSError, ValueError) as error:
        parser.exit(2, f"docs/benchmarks.md: {error}\n")
    for title in stale:
        print(f"docs/benchmarks.md, {title}: measured with other kernel files than the present {kernel_hash()}")
    parser.exit(1 if stale else 0)


if __name__ == "__main__":
    main()
