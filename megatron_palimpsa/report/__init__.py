"""What a series of finished stages did: table, pictures and generated lines from its run folders."""

from megatron_palimpsa.report.write import build

__all__ = ["build"]
