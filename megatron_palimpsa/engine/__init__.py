"""Engines: one interface over Megatron and DeepSpeed."""
