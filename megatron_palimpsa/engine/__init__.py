"""Engines: one interface over Megatron (and, later, DeepSpeed)."""
