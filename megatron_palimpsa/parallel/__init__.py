"""Process groups, Megatron on the CPU, and gradients of replicated parameters."""

from megatron_palimpsa.parallel.gradients import finalize_model_grads
from megatron_palimpsa.parallel.groups import destroy, initialize, is_alone, join, leave_layout, leaving

__all__ = ["destroy", "finalize_model_grads", "initialize", "is_alone", "join", "leave_layout", "leaving"]
