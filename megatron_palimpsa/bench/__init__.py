"""How fast a stage trains and what memory it takes, under one or several settings, on random tokens."""

from megatron_palimpsa.bench.cases import Case, read_cases
from megatron_palimpsa.bench.run import run_cases

__all__ = ["Case", "read_cases", "run_cases"]
