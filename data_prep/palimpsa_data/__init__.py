"""Text to verified Megatron indexed datasets: tokenizer, documents, shards with manifests, packing."""

from palimpsa_data.errors import DataError

__all__ = ["DataError"]
