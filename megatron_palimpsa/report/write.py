"""`build`: report.md, report.json and the pictures of a folder of finished stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage
from megatron_palimpsa.report.samples import TEMPERATURE, TOP_P, Sample
from megatron_palimpsa.report.stages import StageSummary, read_stage, summarize
from megatron_palimpsa.report.table import format_table
from megatron_palimpsa.training.run_folder import RunFolder

_UNITS = "Losses are nats a token, each stage's on text of its own; tokens/s count the time in training steps."
_PICTURES = {
    "loss.png": "Training and validation loss over the stages, each on text of its own.",
    "loss-by-position.png": "Validation loss by the token's position in its document, before and after {longest}.",
    "memory.png": "Memory window N_t = 1 / (1 - alpha_t) of every recurrent layer, and importance ratio "
    "r = (I_max - I_min) / I_min of every Palimpsa layer, at each validation.",
}


def stages_in(folder: Path) -> dict[str, StageConfig]:
    """The stages below `folder` by the names of their folders, each behind the one that it starts from.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    places = [path.parent for path in sorted(folder.glob("*/config.yaml"))]
    # A converted model is a complete stage of no steps.
    trained = [place for place in places if (RunFolder(place).read_marker() or {}).get("steps") != 0]
    found = {place.name: load_stage(RunFolder(place).config) for place in trained}
    if not found:
        raise ConfigError(f"{folder}: holds no stage (a folder with a config.yaml)")
    return dict(sorted(found.items(), key=lambda item: len(_ancestors(item[1], found))))


def _ancestors(config: StageConfig, found: dict[str, StageConfig]) -> list[str]:
    names: list[str] = []
    while config.init_from is not None:
        name = Path(config.init_from.stage).name
        if name not in found or name in names:
            break
        names.append(name)
        config = found[name]
    return names


def _series(stages: dict[str, StageConfig]) -> list[dict[str, StageConfig]]:
    """Those with the same layers together: what is drawn over training is drawn by layer."""
    by_layers: dict[str, dict[str, StageConfig]] = {}
    for name, config in stages.items():
        by_layers.setdefault(config.model.layers, {})[name] = config
    return list(by_layers.values())


def summaries(folder: Path) -> list[StageSummary]:
    """One row a stage, read without torch."""
    return [summarize(read_stage(folder / name)) for name in stages_in(folder)]


def build(folder: Path) -> Path:
    """Write `folder/report/` from the finished stages in `folder` and print its tables and samples; -> report.md.

    Where stages have different layers, those with the same ones get a report of their own below it.

    Raises:
        ConfigError: a stage is missing or not complete.
    """
    rows = summaries(folder)
    output, series = folder / "report", _series(stages_in(folder))
    if len(series) == 1:
        return _build_series(folder, series[0], output)
    own = [_build_series(folder, named, output / list(named)[-1]) for named in series]
    links = [f"- [{', '.join(named)}]({path.relative_to(output)})" for named, path in zip(series, own, strict=True)]
    (output / "report.md").write_text("\n\n".join(["# Report", format_table(rows), _UNITS, "\n".join(links)]) + "\n")
    _write_last(output / "report.json", json.dumps({"stages": [row.to_dict() for row in rows]}, indent=2) + "\n")
    print(f"{format_table(rows)}\n\nAll of them: {output / 'report.md'}\n", flush=True)
    return output / "report.md"


def _build_series(folder: Path, named: dict[str, StageConfig], output: Path) -> Path:
    from megatron_palimpsa.report import pictures
    from megatron_palimpsa.report.samples import generate_samples

    configs = list(named.values())
    stages = [read_stage(folder / name) for name in named]
    rows = [summarize(stage) for stage in stages]
    longest = max(range(len(stages)), key=lambda index: configs[index].model.seq_length)
    output.mkdir(exist_ok=True, parents=True)
    pictures.draw_losses(stages, output / "loss.png")
    pictures.draw_loss_by_position(stages[longest], output / "loss-by-position.png")
    has_memory = pictures.draw_memory(stages, configs[0].model.layers, output / "memory.png")
    samples = generate_samples(folder / stages[-1].name)
    drawn = [name for name in _PICTURES if name != "memory.png" or has_memory]
    text = _markdown(rows, samples, stages[longest].name, drawn)
    (output / "report.md").write_text(text)
    data = {"stages": [row.to_dict() for row in rows], "samples": [vars(sample) for sample in samples]}
    _write_last(output / "report.json", json.dumps(data, indent=2) + "\n")
    report = output / "report.md"
    print(f"\n{format_table(rows)}\n\n{_sample_lines(samples)}\n\nReport with pictures: {report}\n", flush=True)
    return report


def is_current(folder: Path) -> bool:
    """Whether the report was finished after every stage in `folder`."""
    report = folder / "report" / "report.json"
    markers = [RunFolder(folder / name).marker for name in stages_in(folder)]
    return report.exists() and all(m.exists() and m.stat().st_mtime <= report.stat().st_mtime for m in markers)


def _write_last(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _markdown(rows: Sequence[StageSummary], samples: Sequence[Sample], longest: str, pictures: Sequence[str]) -> str:
    parts = ["# Report", format_table(rows), _UNITS]
    parts += [f"{_PICTURES[name].format(longest=longest)}\n\n![{name}]({name})" for name in pictures]
    parts += [f"## Generated\n\nSampled at temperature {TEMPERATURE} from the likeliest {TOP_P} of the mass."]
    parts += [f"```text\n{_sample_lines(samples)}\n```"]
    return "\n\n".join(parts) + "\n"


def _sample_lines(samples: Sequence[Sample]) -> str:
    return "\n".join(f"> {sample.prompt}\n  {' '.join(sample.answer.split())}" for sample in samples)
