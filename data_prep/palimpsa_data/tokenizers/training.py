"""Training tokenizers; the same texts give the same bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable

import sentencepiece

from palimpsa_data.errors import DataError
from palimpsa_data.optional import optional_packages

_SMALLEST_JSON = 300  # 256 bytes, two control ids, 23 runs of spaces and some merges
_SPACE_RUNS = range(24, 1, -1)


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """A SentencePiece byte-pair model over code and prose: the content of a `.model` file.

    Bytes are the fallback, so every text can be encoded; whitespace is kept as it is, line breaks are symbols of their
    own. Ids: 0 unknown, 1 begin, 2 end (of a document), 3 padding.

    Raises:
        DataError: too little text for `vocab_size`.
    """
    lines = (line for text in texts for line in text.split("\n") if line.strip())
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=1 << 20,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"cannot train a tokenizer with {vocab_size} ids: {error}") from None
    return model.getvalue()


def train_json(texts: Iterable[str], vocab_size: int) -> bytes:
    """A GPT-NeoX type byte-level BPE (NFC, GPT-2's pre-splitting): the content of a `tokenizer.json`.

    Every text can be encoded. Ids: 0 `<|endoftext|>`, 1 `<|padding|>`; the last 23 are runs of 24 to 2 spaces.

    Raises:
        DataError: `vocab_size` below 300, or too little text for it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with optional_packages():
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if vocab_size < _SMALLEST_JSON:
        raise DataError(f"cannot train a tokenizer with {vocab_size} ids: at least {_SMALLEST_JSON} are needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_SPACE_RUNS),
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True, special=False) for count in _SPACE_RUNS])
    reached = tokenizer.get_vocab_size()
    if reached != vocab_size:
        raise DataError(f"cannot train a tokenizer with {vocab_size} ids: the text gives {reached}; use more text")
    return (tokenizer.to_str(pretty=True) + "\n").encode()
