"""Rows of a benchmark's CSV: kept as they are measured, so that a run that is cut short goes on where it stopped."""

import csv
import dataclasses
from collections.abc import Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement; `error` is the largest relative error, `floor_fraction` the counted floor's time over ours."""

    shape: str
    batch: int
    tokens: int
    decays: str
    kernel: str
    forward_ms: float
    forward_backward_ms: float | None
    peak_gib: float | None
    floor_fraction: float | None
    error: float | None
    card: str
    versions: str
    commit: str
    kernel_files: str

    @property
    def key(self) -> tuple[str, int, int, str, str, str, str, str]:
        """What makes a repetition needless."""
        return (
            self.shape, self.batch, self.tokens, self.decays, self.kernel, self.card, self.versions, self.kernel_files,
        )  # fmt: skip


def _parse(text: str, kind: object) -> object:
    if text == "" and kind in (float | None, int | None):
        return None
    return int(text) if kind is int else text if kind is str else float(text)


def read_rows(path: Path) -> list[Row]:
    """The complete rows of a CSV; a last line that was cut off is left out.

    Raises:
        ValueError: the file's columns are not a benchmark's, or a cell is not what its column holds.
        OSError: it cannot be read.
    """
    if not path.exists():
        return []
    other = f"{path}: not a CSV of this benchmark; give --output another file"
    fields = {field.name: field.type for field in dataclasses.fields(Row)}
    try:
        lines = path.read_text().splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise ValueError(other) from error
    if not lines:
        return []
    whole = [line for line in lines if line.endswith("\n")]
    reader = csv.reader(whole)
    if next(reader, None) != list(fields):
        raise ValueError(other)
    rows = []
    for line in reader:
        if len(line) == len(fields):
            try:
                cells = [_parse(text, kind) for text, kind in zip(line, fields.values(), strict=True)]
            except ValueError as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}; mend it or give another --output") from None
            rows.append(Row(*cells))  # type: ignore[arg-type]
    return rows


def open_for_rows(path: Path) -> list[Row]:
    """`read_rows` of a file that can be written to, with its folders: an OSError comes before anything is measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(path)
    with path.open("a"):
        pass
    return rows


def append_row(path: Path, row: Row) -> None:
    """Write one more row, and the header first where there is none; replaces a line that was cut off."""
    names = [field.name for field in dataclasses.fields(Row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not text:
            writer.writerow(names)
        writer.writerow("" if (x := getattr(row, name)) is None else x for name in names)


def plot(rows: Iterable[Row], path: Path) -> None:
    """Forward + backward and forward over the number of tokens, a panel a shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scans = [row for row in rows if row.forward_backward_ms is not None]
    names = list(dict.fromkeys(row.shape for row in scans))
    if not names:
        return
    figure, axes = plt.subplots(1, len(names), figsize=(4.5 * len(names), 3.6), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for i, kernel in enumerate(dict.fromkeys(row.kernel for row in scans if row.shape == name)):
            own = sorted((r for r in scans if r.shape == name and r.kernel == kernel), key=lambda r: r.tokens)
            tokens = [r.tokens for r in own]
            axis.plot(tokens, [r.forward_backward_ms for r in own], marker="o", color=f"C{i}", label=kernel)
            axis.plot(tokens, [r.forward_ms for r in own], linestyle=":", color=f"C{i}")
        axis.set(title=f"{name}, B {own[0].batch}", xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
        axis.legend(title="forward + backward (dotted: forward)", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
