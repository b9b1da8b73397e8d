"""Tiny prepared data, stage files over them, and processes that train on them."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from palimpsa_data import tokenizers
from palimpsa_data.sets import write_set
from palimpsa_data.shards import Encoded, ShardSpec, shard_stem, write_shard

VOCAB_SIZE = 320
SEQ_LENGTH = 32

STAGE: dict[str, Any] = {
    "model": {
        "pattern": "MP*-",
        "hidden_size": 16,
        "vocab_size": VOCAB_SIZE,
        "seq_length": SEQ_LENGTH,
        "d_state": 4,
        "headdim": 8,
        "beta_rank": 4,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
    },
    "train": {"tokens": 8 * 64, "global_batch_tokens": 64, "precision": "fp32", "eval_interval": 4, "eval_batches": 2},
    "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2},
    # Published before the next step: which one a killed run goes on from does not depend on how fast the disk is.
    "checkpoint": {"interval": 4, "async_save": False},
    "logging": {"interval": 1, "tensorboard": False},
}
"""8 steps of 2 sequences; checkpoints at 4 and 8."""


def make_data(folder: Path) -> Path:
    """A tokenizer and the blends `train.yaml` and `valid.yaml` of random words; -> folder."""
    generator = random.Random(5)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 6))) for _ in range(40)]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 40))) for _ in range(60)]
    (folder / "tokenizer.model").write_bytes(tokenizers.train_sentencepiece(texts, VOCAB_SIZE))
    tokenizer = tokenizers.load(folder / "tokenizer.model")
    for split, part in (("train", texts[:50]), ("valid", texts[50:])):
        spec = ShardSpec("0" * 64, tokenizer.sha256, split, tokenizer.vocab_size, loss_mask=False)
        stem = shard_stem(folder / split, split, 0, 1)
        documents = [Encoded(tokenizer.encode_document(text)) for text in part]
        manifest, _ = write_shard(stem, documents, spec, most_tokens=10**5)
        write_set(folder / split, split, tokenizer.info, {stem: manifest})
        (folder / f"{split}.yaml").write_text(yaml.safe_dump([{"set": split, "weight": 1.0}]))
    return folder


def write_stage(folder: Path, data: Path, name: str = "stage", **changes: Any) -> Path:
    """A stage file in `folder` whose runs go to `folder/runs`; `changes` are merged into STAGE's sections."""
    tree: dict[str, Any] = {"name": name, "output_dir": str(folder / "runs"), **STAGE}
    tree["data"] = {
        "train_blend": str(data / "train.yaml"),
        "valid_blend": str(data / "valid.yaml"),
        "tokenizer": str(data / "tokenizer.model"),
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(*arguments: str | Path, ranks: int = 1) -> subprocess.Popen[str]:
    """`megatron-palimpsa ARGUMENTS` in a process of its own (under torchrun for more ranks), one thread a rank."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "megatron_palimpsa", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(*arguments: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """`start` and wait for the end."""
    with start(*arguments, ranks=ranks) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train_in_new_process(*arguments: str | Path, **events: Any) -> int:
    """`megatron-palimpsa train ARGUMENTS` in a new process that need not import everything again; -> its exit code.

    A process that a signal ended gives minus the signal's number. `events`: see `Events`.
    """
    (code,) = train_on_ranks(*arguments, ranks=[Events(**events)])
    return code


@dataclass(frozen=True)
class Events:
    """What befalls one training process; steps count from 1 over the stage."""

    signals: dict[int, int] = field(default_factory=dict)
    """Step -> signal the process sends itself when the optimizer has taken it, before anything of it is written."""
    poison: tuple[int, ...] = ()
    """Steps whose gradients become NaN."""
    ruin: int | None = None
    """Step after which every trained weight is NaN."""
    output: Path | None = None
    """File that gets what the process prints."""


def train_on_ranks(*arguments: str | Path, ranks: list[Events]) -> list[int]:
    """As `train_in_new_process`, on as many ranks as there are events; -> their exit codes."""
    codes = run_ranks(_train, [str(item) for item in arguments], ranks, seconds=300)
    assert None not in codes, "a rank still ran after 300 s"
    return codes  # type: ignore[return-value]


def run_ranks(
    function: Callable[[list[str], dict[str, str], Any], None], arguments: list[str], ranks: list[Any], seconds: int
) -> list[int | None]:
    """`function(arguments, environment of a launcher, rank's own argument)` in a new process a rank.

    Returns their exit codes; None for a rank that had to be killed after so many seconds.
    """
    import torch

    # What Megatron imports may touch CUDA, after which no process may be forked.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["megatron_palimpsa.training.loop"])
    shared = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(ranks))]
    processes = [
        context.Process(target=function, args=(arguments, environment, own))
        for environment, own in zip(environments, ranks, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _train(arguments: list[str], environment: dict[str, str], events: Events) -> None:
    import torch

    from megatron_palimpsa.cli import main
    from megatron_palimpsa.training import loop

    os.environ.update(environment)
    torch.set_num_threads(1)
    if events.output is not None:
        with events.output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    build_engine = loop.build_engine

    def build_with_events(config):
        engine = build_engine(config)
        take_step = engine.train_step

        def train_step(batches, accept):
            step = engine.scheduler_state()["steps"] + 1
            handle = None
            if step in events.poison:
                handle = next(engine.chunks[0].parameters()).register_hook(lambda gradient: gradient * float("nan"))
            result = take_step(batches, accept)
            if handle is not None:
                handle.remove()
            if step == events.ruin:
                for parameter in filter(lambda parameter: parameter.requires_grad, engine.chunks[0].parameters()):
                    parameter.data.fill_(float("nan"))
            if step in events.signals:
                os.kill(os.getpid(), events.signals[step])
            return result

        engine.train_step = train_step
        return engine

    loop.build_engine = build_with_events
    sys.exit(main(["train", *arguments]))


def read_checkpoint(path: Path, scratch: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint by name, read with torch's own tools."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, scratch / "tensors.pt")
    content = torch.load(scratch / "tensors.pt", weights_only=True)
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
