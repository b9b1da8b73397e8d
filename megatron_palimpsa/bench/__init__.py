"""How fast a stage trains and what memory it takes, under one or several settings, on random tokens or its own data."""

from megatron_palimpsa.bench.cases import Case, read_cases
from megatron_palimpsa.bench.measure import Plan
from megatron_palimpsa.bench.run import run_cases

__all__ = ["Case", "Plan", "read_cases", "run_cases"]
