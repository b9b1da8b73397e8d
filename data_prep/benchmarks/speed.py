"""How fast and how large preparation is, beside the same tokenizer in memory, in one run.

    python data_prep/benchmarks/speed.py FOLDER [--megabytes 100] [--repeats 3] [--tokenizer tokenizer.json]

FOLDER keeps the inputs between calls. End to end is from parquet to fsynced .bin and .idx with their manifest, in one
process; loading the tokenizer, once a process, counts on neither side, and on both sides it has seen no text before
(gigatoken remembers words). Exit code 1 where a target is missed. Other work on the machine disturbs the wall time; the
CPU time is shown beside it, and the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pyarrow as pa
import pyarrow.parquet as pq
from corpus import parquet_file, texts_of, tokenizer_file
from palimpsa_data import tokenizers
from palimpsa_data.jobs import ShardWork, run_job
from palimpsa_data.plan import PrepJob, plan_of, save_plan
from palimpsa_data.progress import Counters
from palimpsa_data.sources import FineWebOptions, StackV2Options, TextOptions, find_inputs
from palimpsa_data.tokenizers.json_file import HuggingFaceTokenizer

TARGETS = {"gigatoken": 0.5, "huggingface": 0.9, "two processes": 1.8, "memory": 1.5}
_HUGGING_FACE_SHARE = 16  # of the text: it is some 40 times slower
_HUGE_DOCUMENT = 50 << 20
_FILES = 32
_PARTS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = options.tokenizer or tokenizer_file(options.folder)
    results: dict[str, Any] = {"load before": {"processes": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}}
    for kind in ("prose", "code"):
        for backend in ("gigatoken", "huggingface"):
            share = _HUGGING_FACE_SHARE if backend == "huggingface" else 1
            path = parquet_file(options.folder, kind, (options.megabytes << 20) // share)
            results[f"{kind} {backend}"] = _compare(options.folder, path, kind, backend, tokenizer, options.repeats)
    results["two processes"] = _two_processes(options.folder, options.megabytes << 20, tokenizer, options.repeats)
    results["huge document"] = {
        backend: _peak_memory(options.folder, _huge_file(options.folder), backend, tokenizer)
        for backend in ("gigatoken", "huggingface")
    }
    (options.folder / "speed.json").write_text(json.dumps(results, indent=2) + "\n")
    return _report(results)


def _compare(folder: Path, path: Path, kind: str, backend: str, tokenizer: Path, repeats: int) -> dict[str, Any]:
    """MB/s of text in memory and end to end, by wall and by CPU time; the two take turns."""
    paths = [path] if backend == "gigatoken" else _parts(path)
    sums = {"in memory": [0.0, 0.0], "end to end": [0.0, 0.0]}
    size = documents = 0
    for part in paths:
        texts = texts_of(part)
        size += sum(len(text.encode()) for text in texts)
        documents += len(texts)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sums}
        for _ in range(repeats):
            encode = _in_memory(backend, tokenizer)
            seconds["in memory"].append(_timed(lambda encode=encode, texts=texts: encode(texts)))
            shutil.rmtree(folder / "out", ignore_errors=True)
            work = _work(_job(kind, [part], folder / "out", tokenizer, backend))
            seconds["end to end"].append(_timed(lambda work=work: work(0, wait=False)))
        for name, times in seconds.items():
            sums[name] = [
                total + min(column) for total, column in zip(sums[name], zip(*times, strict=True), strict=True)
            ]
    result: dict[str, Any] = {"MB": round(size / 1e6, 1), "documents": documents}
    for name, (wall, cpu) in sums.items():
        result[name] = {"MB/s": round(size / wall / 1e6, 2), "MB/s of CPU time": round(size / cpu / 1e6, 2)}
    for place, unit in enumerate(("MB/s", "MB/s of CPU time")):
        result[f"ratio of {unit}"] = round(sums["in memory"][place] / sums["end to end"][place], 3)
    return result


def _parts(path: Path) -> list[Path]:
    """The file in a few parts, so that the two sides take turns often."""
    table = pq.read_table(path)
    rows = -(-len(table) // _PARTS)
    paths = [path.with_stem(f"{path.stem}-{number}") for number in range(_PARTS)]
    for number, part in enumerate(paths):
        pq.write_table(table.slice(number * rows, rows), part, compression="zstd")
    return paths


def _in_memory(backend: str, tokenizer: Path) -> Callable[[list[str]], object]:
    """The tokenizer's own fastest call on one thread, without any of our code around it."""
    reference = HuggingFaceTokenizer(tokenizer)
    if backend == "huggingface":
        return lambda texts: reference._encoder.encode_batch_fast(texts, add_special_tokens=False)
    import gigatoken

    encoder = gigatoken.Tokenizer.from_json(json.dumps(reference.settings))
    return lambda texts: encoder.encode_batch(texts, parallel=False)


def _work(job: PrepJob) -> ShardWork:
    """What a process does with each shard, its tokenizer loaded."""
    tokenizer = tokenizers.load(job.tokenizer, backend=job.backend)
    plan = plan_of(job, tokenizer.info)
    save_plan(job.output, plan)
    return ShardWork(job, plan, tokenizer, Counters([0] * Counters.SIZE), lambda: None)


def _job(kind: str, paths: list[Path], output: Path, tokenizer: Path, backend: str) -> PrepJob:
    options = {"prose": FineWebOptions(), "code": StackV2Options(), "text": TextOptions()}[kind]
    inputs = find_inputs([str(path) for path in paths])
    return PrepJob(kind=kind, inputs=inputs, options=options, tokenizer=tokenizer, output=output, backend=backend)


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def _two_processes(folder: Path, size: int, tokenizer: Path, repeats: int) -> dict[str, Any]:
    """Wall seconds of several files with one process and with two, which have to be started.

    By CPU time: that of one process against half of what the two took together, which other work disturbs less.
    """
    path = parquet_file(folder, "prose", size)
    copies = [folder / f"copy-{number}.parquet" for number in range(_FILES)]
    for copy in copies:
        copy.unlink(missing_ok=True)
        copy.hardlink_to(path)
    seconds: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for _ in range(repeats):
        for processes, times in seconds.items():
            shutil.rmtree(folder / "out", ignore_errors=True)
            job = _job("prose", copies, folder / "out", tokenizer, "gigatoken")
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall, cpu = _timed(lambda job=job, processes=processes: run_job(job, processes=processes))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            children = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            times.append((wall, cpu if processes == 1 else children / 2))
    (one, one_cpu), (two, two_cpu) = (
        [min(column) for column in zip(*times, strict=True)] for times in seconds.values()
    )
    result = {"one, s": round(one, 2), "two, s": round(two, 2), "ratio": round(one / two, 3)}
    return result | {"ratio by CPU time": round(one_cpu / two_cpu, 3)}


def _huge_file(folder: Path) -> Path:
    """Ten thousand rows in one row group, the middle one of 50 MB, which Python holds as 200 MB for its last sign."""
    path = folder / "huge.parquet"
    if not path.exists():
        texts = texts_of(parquet_file(folder, "code", 100 << 20))
        huge = "\n".join(texts)[:_HUGE_DOCUMENT] + "\U0001f9ff"
        rows = (texts * 10)[:5000]
        pq.write_table(pa.table({"text": [*rows, huge, *rows]}), path, row_group_size=20_000)
    return path


def _peak_memory(folder: Path, path: Path, backend: str, tokenizer: Path) -> dict[str, Any]:
    """GiB that a process of its own needs for the file."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    shutil.rmtree(folder / "out", ignore_errors=True)
    job = _job("text", [path], folder / "out", tokenizer, backend)
    process = context.Process(target=_run_and_measure, args=(job, send))
    process.start()
    result = receive.recv()
    process.join()
    return result


def _run_and_measure(job: PrepJob, send: Any) -> None:
    result = run_job(job)
    (manifest,) = result.shards.values()
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    send.send(
        {
            "GiB": round(int(peak) / 2**20, 3),
            "text MB": round(manifest.text_bytes / 1e6, 1),
            "longest": manifest.longest,
        }
    )


def _report(results: dict[str, Any]) -> int:
    missed = []
    for name, result in results.items():
        print(f"{name}: {json.dumps(result)}")
        kind, _, backend = name.partition(" ")
        if kind in ("prose", "code") and result["ratio of MB/s"] < TARGETS[backend]:
            missed.append(f"{name}: {result['ratio of MB/s']} of in memory, target {TARGETS[backend]}")
    if results["two processes"]["ratio"] < TARGETS["two processes"]:
        missed.append(f"two processes: {results['two processes']['ratio']}, target {TARGETS['two processes']}")
    for backend, result in results["huge document"].items():
        if result["GiB"] > TARGETS["memory"]:
            missed.append(f"memory with {backend}: {result['GiB']} GiB, target {TARGETS['memory']}")
    for line in missed:
        print(f"MISSED {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
