"""`generate`: text that continues prompts, by a trained model."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_palimpsa.commands.prep_job import count

if TYPE_CHECKING:
    from megatron_palimpsa.model.generation import Meter, Phase

Continue = Callable[[Sequence[str], int], Iterator[list[str | None]]]
"""Prompts and the number of the first -> what the text of each gains, step by step; None for those that have ended."""

logger = logging.getLogger(__name__)

_MOST_NEW_TOKENS = 2**20
_SECONDS_BETWEEN_LINES = 10.0


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue texts with a trained model",
        description="Continue a text, or those of a file, with a trained model. Standard output is the continuation "
        "alone, as it comes, or for --prompts one JSON object a prompt, in their order; standard error says speed and "
        "size of the state.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="MODEL",
        help="folder of a stage, of one of its checkpoints, or of an export",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to continue; standard input where it is left out"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one prompt a line, or .jsonl with the text of each line as "prompt"',
    )
    parser.add_argument(
        "--batch-size", type=count, default=8, metavar="N", help="prompts of --prompts at once (%(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=_token_count, default=128, metavar="N", help="at most so many (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest; 0: all")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the likeliest tokens of mass P (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (%(default)s)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="of the weights (the stage's)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="in place of the model's own")
    parser.set_defaults(command=_generate, output_is_text=True)


def _token_count(text: str) -> int:
    # Attention layers reserve their cache for as many at once.
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_NEW_TOKENS:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to {_MOST_NEW_TOKENS}, not {text}")
    return int(text)


def _generate(options: argparse.Namespace) -> int:
    from megatron_palimpsa.training.exit_codes import ExitCode

    try:
        _run(options)
    except KeyboardInterrupt:
        # Nothing was to be saved, and what was asked for is on the screen.
        return ExitCode.INTERRUPTED
    return ExitCode.COMPLETE


def _run(options: argparse.Namespace) -> None:
    from megatron_palimpsa.inference import opened
    from megatron_palimpsa.inference.text import stream_texts
    from megatron_palimpsa.model.generation import Meter
    from megatron_palimpsa.model.sampling import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    prompts = _prompts(options)
    meter = Meter()
    with opened(options.source, options.precision, options.tokenizer) as it:

        def go_on(batch: Sequence[str], first: int) -> Iterator[list[str | None]]:
            meter.on_prompt_tokens = _Progress("prompt tokens read")
            return stream_texts(
                it, batch, max_new_tokens=options.max_new_tokens, sampling=sampling, first_row=first, meter=meter
            )

        if options.prompts is None:
            _print_text(go_on(prompts, 0))
        else:
            _print_objects(prompts, options.batch_size, go_on)
    _log(meter)


def _prompts(options: argparse.Namespace) -> list[str]:
    from megatron_palimpsa.config import ConfigError
    from megatron_palimpsa.inference.prompts import read_prompts

    if options.prompts is not None:
        if options.prompt is not None:
            raise ConfigError("a prompt and --prompts exclude each other: give one of them")
        return read_prompts(options.prompts)
    try:
        # What is not UTF-8 arrives as lone surrogates or not at all.
        prompt = options.prompt if options.prompt is not None else sys.stdin.read() if sys.stdin else ""
        prompt.encode()
    except UnicodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text: {error}") from None
    return [prompt]


def _print_text(steps: Iterator[list[str | None]]) -> None:
    for (piece,) in steps:
        # Which kernel takes a single token is said when it first does: in the middle of the text.
        logging.getLogger("palimpsa_kernels").setLevel(logging.WARNING)
        if piece:
            print(piece, end="", flush=True)
    print(flush=True)


def _print_objects(prompts: list[str], batch_size: int, go_on: Continue) -> None:
    progress = _Progress("prompts continued")
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        for prompt, text in zip(batch, _whole(go_on(batch, first)), strict=True):
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)
        progress(first + len(batch), len(prompts))


def _whole(steps: Iterator[list[str | None]]) -> Iterator[str]:
    """The texts in their order, each as soon as it and those before it have ended."""
    texts: list[str] = []
    given = 0
    for pieces in steps:
        texts = [text + (piece or "") for text, piece in zip(texts or [""] * len(pieces), pieces, strict=True)]
        while given < len(texts) and pieces[given] is None:
            yield texts[given]
            given += 1
    yield from texts[given:]


class _Progress:
    """A line with the time left, where something takes long."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        from megatron_palimpsa.training.console import clock

        now = time.monotonic()
        if done < total and now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            left = (now - self._start) / done * (total - done)
            logger.info("%s of %s %s | %s left", f"{done:,}", f"{total:,}", self._what, clock(left))


def _log(meter: Meter) -> None:
    state = meter.state
    logger.info("prefill: %s | decode: %s", _speed(meter.prefill), _speed(meter.decode))
    logger.info(
        "state: %s bytes: content %s, importance %s, convolution %s, attention's keys and values %s%s",
        *(
            f"{size:,}"
            for size in (state.total, state.content, state.importance, state.convolution, state.keys_and_values)
        ),
        " (these alone grow with the length)" if state.keys_and_values else "",
    )


def _speed(phase: Phase) -> str:
    rate = phase.tokens / phase.seconds if phase.seconds else 0.0
    return f"{phase.tokens:,} tokens in {phase.seconds:.2f} s, {rate:,.1f} tokens/s"
