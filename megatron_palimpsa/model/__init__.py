"""The model: Palimpsa-M, Palimpsa-D and Mamba2 layers in Megatron-Core's HybridModel."""

from megatron_palimpsa.model.build import build_model, forward_loss, run_layers
from megatron_palimpsa.model.statistics import memory_statistics, record_memory, recording

__all__ = ["build_model", "forward_loss", "memory_statistics", "record_memory", "recording", "run_layers"]
