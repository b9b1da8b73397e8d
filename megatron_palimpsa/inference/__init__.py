"""A trained model on one process, for everything but training."""

from megatron_palimpsa.inference.opened import Opened, opened

__all__ = ["Opened", "opened"]
