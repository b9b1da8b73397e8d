"""The bars that the kernels are held to, each against measured rows: `bar ... met` or `missed`."""

from collections.abc import Callable, Iterable, Iterator

from table import Row

DECODE_BATCHES = (1, 16, 64, 256)


def bar(name: str, value: float | None, limit: float, unit: str = "", *, at_least: bool = False) -> str:
    """One line that says whether a measured value keeps to a limit."""
    sign = ">=" if at_least else "<="
    if value is None:
        return f"bar {name} {sign} {limit:g}{unit}: not measured"
    met = value >= limit if at_least else value <= limit
    return f"bar {name} {sign} {limit:g}{unit}: {value:.3g}{unit}, {'met' if met else 'missed'}"


def scan_bars(rows: Iterable[Row], decays: str) -> Iterator[str]:
    """Lines of every bar of the scans and of the decode step, for rows of one version of the kernels."""
    found = {(r.shape, r.tokens, r.kernel, r.batch): r for r in rows if r.decays == decays}

    def get(shape: str, tokens: int, kernel: str, read: Callable[[Row], float | None], batch: int = 1) -> float | None:
        row = found.get((shape, tokens, kernel, batch))
        return None if row is None else read(row)

    def both(shape: str, tokens: int, kernel: str = "palimpsa", batch: int = 1) -> float | None:
        return get(shape, tokens, kernel, lambda r: r.forward_backward_ms, batch)

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    forward = get("2.7B", 32768, "palimpsa", lambda r: r.forward_ms)
    yield bar("2.7B, T = 32768, forward", forward, 10, " ms")
    yield bar("2.7B, T = 32768, forward + backward", both("2.7B", 32768), 45, " ms")
    yield bar("2.7B, T = 32768, forward + backward (aim)", both("2.7B", 32768), 20, " ms")
    yield bar("2.7B, T = 32768, peak memory", get("2.7B", 32768, "palimpsa", lambda r: r.peak_gib), 6, " GiB")
    yield bar("2.7B, T = 4096, forward + backward", both("2.7B", 4096), 6, " ms")
    yield bar("760M, B 4, T = 4096, forward + backward", both("760M", 4096, batch=4), 10, " ms")
    long, short = both("2.7B", 131072), both("2.7B", 32768)
    per_token = ratio(None if long is None else long / 4, short)
    yield bar("2.7B, per token at T = 131072 over that at 32768", per_token, 1.1)
    split = both("2.7B, 1 of 8 GPUs", 32768)
    yield bar(
        "H = 10, per-head speed over that of H = 80, T = 32768",
        ratio(None if short is None else short / 8, split), 0.8, at_least=True,
    )  # fmt: skip
    ours, theirs = both("2.7B", 32768, "ssd"), both("2.7B", 32768, "mamba_ssm ssd")
    yield bar("2.7B, T = 32768, our SSD forward + backward over mamba_ssm's", ratio(ours, theirs), 1.1)
    for batch in DECODE_BATCHES:
        step = get("2.7B", 1, "palimpsa step", lambda r: r.forward_ms, batch)
        copy = get("2.7B", 1, "copy of as many bytes", lambda r: r.forward_ms, batch)
        yield bar(f"2.7B, decode step of batch {batch} over a copy", ratio(step, copy), 1.5)
    worst = [r.error for r in found.values() if r.kernel in ("palimpsa", "ssd") and r.error is not None]
    yield bar("error of bf16 inputs, every output, gradient and head", max(worst, default=None), 5e-3)
