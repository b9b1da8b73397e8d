"""Tokenizers: `tokenizer.json` (gigatoken or Hugging Face) and SentencePiece `.model` files behind one interface.

Text can never turn into a control id: special tokens are not matched in text, so `</s>` or `<|endoftext|>` in a
document are ordinary characters.
"""

from palimpsa_data.tokenizers.base import Tokenizer
from palimpsa_data.tokenizers.loading import BACKENDS, load
from palimpsa_data.tokenizers.pieces import UncuttableError
from palimpsa_data.tokenizers.training import train_json, train_sentencepiece

__all__ = ["BACKENDS", "Tokenizer", "UncuttableError", "load", "train_json", "train_sentencepiece"]
