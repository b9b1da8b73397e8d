"""`prep merge|status|verify|blend|index|dump`: what is done with shards once they are written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_palimpsa.config import ConfigError

if TYPE_CHECKING:
    from palimpsa_data.blend import Part


def add(commands: argparse._SubParsersAction) -> None:
    """One command each."""
    _add_status(commands)
    _add_merge(commands)
    _add_verify(commands)
    _add_blend(commands)
    _add_index(commands)
    _add_dump(commands)


def _add_status(commands: argparse._SubParsersAction) -> None:
    status = commands.add_parser(
        "status",
        help="which shards of a job are there, in work or missing",
        description="Which shards of each job are there, in work (and where), damaged or missing. Exit code 0 when "
        "all are there, 75 while they are not.",
    )
    status.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a prep command's --output")
    status.set_defaults(command=_status)


def _add_merge(commands: argparse._SubParsersAction) -> None:
    merge = commands.add_parser(
        "merge",
        help="join a job's shards to a set, once all are there",
        description="Write each folder's set.json and report (text, JSON, picture of the lengths); prep commands do "
        "the same when they find all shards there at their end.",
    )
    merge.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a prep command's --output")
    merge.set_defaults(command=_merge)


def _add_verify(commands: argparse._SubParsersAction) -> None:
    verify = commands.add_parser(
        "verify",
        help="read every byte of sets and compare it with what was written",
        description="Read every byte of each set: checksums, sizes, indices, ids against the vocabulary, manifests "
        "against set.json, and what `prep index` wrote. Each shard that is not as it should be is a line; exit code 2 "
        "where there are any.",
    )
    verify.add_argument("folders", nargs="+", type=Path, metavar="SET", help="folder of a set")
    verify.add_argument("--tokenizer", type=Path, metavar="FILE", help="the tokenizer they are to have been made with")
    verify.set_defaults(command=_verify)


def _add_blend(commands: argparse._SubParsersAction) -> None:
    blend = commands.add_parser(
        "blend",
        help="write a blend file: sets, their shares of the tokens, their epochs",
        description="Write the YAML file that a stage's data.train_blend or data.valid_blend names.",
    )
    blend.add_argument("file", type=Path, metavar="FILE", help="the blend file to write")
    blend.add_argument(
        "--set",
        dest="sets",
        nargs="+",
        action="append",
        required=True,
        metavar=("FOLDER", "WEIGHT [EPOCHS]"),
        help="a set, its weight (share of the tokens, in proportion to the others'; its own tokens where it is left "
        "out) and how often it may be repeated at the most; once for each set",
    )
    blend.set_defaults(command=_blend)


def _add_index(commands: argparse._SubParsersAction) -> None:
    index = commands.add_parser(
        "index",
        help="build a stage's orders and packings once, for all ranks to map",
        description="Check a stage's data as training does, and write the orders and packings of all its epochs "
        "beside the sets, so that no rank has to build them.",
    )
    index.add_argument("config", type=Path, metavar="CONFIG", help="the stage's YAML file")
    index.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="as for train")
    index.set_defaults(command=_index)


def _add_dump(commands: argparse._SubParsersAction) -> None:
    dump = commands.add_parser(
        "dump",
        help="show a sample as text, with what is not trained on marked",
        description="Show document N of a set (needs --tokenizer), or packed sequence N of a stage as training gets "
        "it: every document of it, what is not trained on in double brackets.",
    )
    dump.add_argument("what", type=Path, metavar="SET_OR_CONFIG", help="folder of a set, or a stage's YAML file")
    dump.add_argument("number", type=_number, metavar="N", help="which one, from 0")
    dump.add_argument("--tokenizer", type=Path, metavar="FILE", help="of the set; a stage names its own")
    dump.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of the stage, as for train")
    dump.set_defaults(command=_dump)


def _status(arguments: argparse.Namespace) -> int:
    from palimpsa_data.merge import job_status

    from megatron_palimpsa.training.exit_codes import ExitCode

    states = [job_status(folder) for folder in arguments.folders]
    print("\n\n".join(state.text() for state in states))
    return ExitCode.COMPLETE if all(state.is_complete for state in states) else ExitCode.SAVED_AND_STOPPED


def _merge(arguments: argparse.Namespace) -> int:
    from palimpsa_data.merge import merge

    for folder in arguments.folders:
        _, report = merge(folder)
        print(report.text())
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from palimpsa_data.index import find_index_problems
    from palimpsa_data.sets import find_problems, read_set

    from megatron_palimpsa.training.exit_codes import ExitCode

    sha256 = _tokenizer_sha256(arguments.tokenizer)
    failed = 0
    for folder in arguments.folders:
        problems = find_problems(folder, sha256) or find_index_problems(folder)
        if not problems:
            info = read_set(folder)
            print(f"{folder}: intact, {len(info.shards)} shards, {info.documents:,} documents, {info.tokens:,} tokens")
        for problem in problems:
            print(problem)
        failed += len(problems)
    return ExitCode.WRONG_INPUT if failed else ExitCode.COMPLETE


def _tokenizer_sha256(path: Path | None) -> str | None:
    from palimpsa_data import tokenizers

    return None if path is None else tokenizers.load(path, backend="huggingface").sha256


def _blend(arguments: argparse.Namespace) -> int:
    from palimpsa_data.blend import write_blend

    shares = write_blend(arguments.file, [_part(words) for words in arguments.sets])
    for info, share in shares:
        print(f"{share:>8.2%}  {info.name}: {info.documents:,} documents, {info.tokens:,} tokens")
    return 0


def _part(words: list[str]) -> Part:
    from palimpsa_data.blend import Part

    folder, *numbers = words
    if len(numbers) > 2:
        raise ConfigError(f"--set {' '.join(words)}: takes FOLDER, WEIGHT and EPOCHS at the most")
    try:
        return Part(Path(folder), *map(float, numbers))
    except ValueError as error:
        raise ConfigError(f"--set {' '.join(words)}: {error}") from None


def _index(arguments: argparse.Namespace) -> int:
    from megatron_palimpsa.config import load_stage
    from megatron_palimpsa.training.data import StageData

    config = load_stage(arguments.config, arguments.overrides)
    for folder in StageData(config, write_index=True).prepare_index():
        size = sum(path.stat().st_size for path in folder.glob("*.npy"))
        print(f"{folder}: {size / 1e6:.1f} MB")
    return 0


def _dump(arguments: argparse.Namespace) -> int:
    from palimpsa_data import tokenizers
    from palimpsa_data.dump import dump_document

    if not arguments.what.is_dir():
        print(_dump_sequence(arguments))
        return 0
    if arguments.tokenizer is None or arguments.overrides:
        raise ConfigError(
            f"{arguments.what} is a set: it takes --tokenizer FILE, that it was made with, and no KEY=VALUE"
        )
    print(dump_document(arguments.what, arguments.number, tokenizers.load(arguments.tokenizer, backend="huggingface")))
    return 0


def _dump_sequence(arguments: argparse.Namespace) -> str:
    from megatron_palimpsa.config import load_stage
    from megatron_palimpsa.training.dump import dump_sequence

    if arguments.tokenizer is not None:
        raise ConfigError(f"{arguments.what} is a stage: its tokenizer is data.tokenizer, not --tokenizer")
    return dump_sequence(load_stage(arguments.what, arguments.overrides), arguments.number)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer from 0, not {text}")
    return int(text)
