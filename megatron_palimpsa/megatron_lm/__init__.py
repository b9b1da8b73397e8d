"""Palimpsa layers in Megatron-LM's own training loop (`megatron.training.pretrain`), without this package's trainer.

`--spec megatron_palimpsa.megatron_lm.spec stack_spec` builds the layers, `add_palimpsa_args` adds their settings to
Megatron's command line, and `prepare` refuses what they cannot do. docs/megatron_lm.md says how a run is changed.
"""

from megatron_palimpsa.megatron_lm.arguments import add_palimpsa_args, check_args
from megatron_palimpsa.megatron_lm.preparation import prepare

__all__ = ["add_palimpsa_args", "check_args", "prepare"]
