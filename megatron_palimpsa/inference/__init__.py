"""A trained model on one process, for everything but training."""

from megatron_palimpsa.inference.opened import Opened, load_tokenizer, opened, settings_of

__all__ = ["Opened", "load_tokenizer", "opened", "settings_of"]
