"""The command line in a process that lacks the packages of the extra `data`."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import sys

class Missing:
    names = {"pyarrow", "zstandard", "tokenizers", "gigatoken", "datasets", "transformers", "httpx", "huggingface_hub"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from megatron_palimpsa.cli import main
sys.exit(main(sys.argv[1:]))
"""


def without(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )
