import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.finished_stage import write_finished_stage
from palimpsa_launch import stages

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage
from megatron_palimpsa.report import build, samples, write
from megatron_palimpsa.report.samples import Sample
from megatron_palimpsa.report.stages import read_stage, summarize
from megatron_palimpsa.report.table import format_table
from megatron_palimpsa.training.run_folder import RunFolder

NAMES = ("continue-pretraining", "long-context", "instruct")
PNG = b"\x89PNG\r\n\x1a\n"


def demo_stage(name: str, folder: Path) -> StageConfig:
    return load_stage(stages.path(f"demo/{name}"), [f"output_dir={folder}"])


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    for name, losses in zip(NAMES, [(7.6, 4.4), (4.3, 4.0), (4.5, 2.5)], strict=True):
        write_finished_stage(demo_stage(name, tmp_path), first_loss=losses[0], last_loss=losses[1])
    return tmp_path


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    asked: list[Path] = []

    def generate(stage: Path) -> list[Sample]:
        asked.append(stage)
        return [Sample("What is a list?", "A\nsequence.")]

    monkeypatch.setattr(samples, "generate_samples", generate)
    return asked


def test_summary_holds_the_records_numbers(finished: Path) -> None:
    row = summarize(read_stage(finished / "long-context"))
    assert (row.stage, row.steps, row.tokens, row.resumes) == ("long-context", 40, 40_000, 1)
    assert (row.loss_before, row.loss_after) == (4.3, 4.0)
    assert row.peak_memory_bytes == 300 * 2**20
    # 20,000 tokens in 40 s, 20,000 in 80 s.
    assert row.tokens_per_second == pytest.approx(40_000 / 120)


def test_table_lines_up_and_shows_every_column(finished: Path) -> None:
    header, rule, *rows = format_table(write.summaries(finished)).splitlines()
    assert [cell.strip() for cell in rows[0].strip("|").split("|")] == [
        "continue-pretraining", "40", "40,000", "333", "7.600", "4.400", "300 MiB",
    ]  # fmt: skip
    assert len({len(line) for line in (header, rule, *rows)}) == 1
    assert len(rows) == 3


def test_stages_are_ordered_by_what_they_start_from(finished: Path) -> None:
    assert list(write.stages_in(finished)) == list(NAMES)


def test_a_copied_stage_is_read_from_its_own_folder(finished: Path) -> None:
    shutil.copytree(finished / "instruct", finished / "instruct-before")
    metrics = finished / "instruct-before" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 2.5', '"loss": 2.75'))
    assert sorted(row.loss_after for row in write.summaries(finished)) == [2.5, 2.75, 4.0, 4.4]


def test_stages_with_other_layers_get_a_report_of_their_own(
    finished: Path, generated: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write.stages_in(finished)["instruct"]
    other = dataclasses.replace(
        config, model=dataclasses.replace(config.model, pattern=config.model.layers.replace("P", "Q"))
    )
    RunFolder(finished / "instruct").write_config(other)
    path = build(finished)
    assert generated == [finished / "long-context", finished / "instruct"]
    text = path.read_text()
    assert format_table(write.summaries(finished)) in text
    assert format_table(write.summaries(finished)) in capsys.readouterr().out
    for names, own in (("continue-pretraining, long-context", "long-context"), ("instruct", "instruct")):
        assert f"- [{names}]({own}/report.md)" in text
        assert (path.parent / own / "memory.png").read_bytes().startswith(PNG)
    assert [row["stage"] for row in json.loads((path.parent / "report.json").read_text())["stages"]] == list(NAMES)
    assert write.is_current(finished)


@pytest.mark.parametrize(("pattern", "has_picture"), [("*-", False), ("MM", True)])
def test_layers_without_importance_or_without_any_state_are_drawn_as_they_are(
    tmp_path: Path, generated: list[Path], pattern: str, has_picture: bool
) -> None:
    config = demo_stage("long-context", tmp_path)
    model = dataclasses.replace(config.model, pattern=pattern, num_attention_heads=4, ffn_hidden_size=64)
    config = dataclasses.replace(config, model=model, init_from=None)
    write_finished_stage(config, first_loss=5.0, last_loss=4.0)
    path = build(tmp_path)
    assert ("](memory.png)" in path.read_text()) == (path.parent / "memory.png").exists() == has_picture


def test_build_writes_report_data_and_pictures(
    finished: Path, generated: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = build(finished)
    assert generated == [finished / "instruct"]
    text = path.read_text()
    assert format_table(write.summaries(finished)) in text
    assert format_table(write.summaries(finished)) in capsys.readouterr().out
    assert "> What is a list?\n  A sequence." in text
    data = json.loads((path.parent / "report.json").read_text())
    assert [stage["loss_after"] for stage in data["stages"]] == [4.4, 4.0, 2.5]
    for picture in ("loss.png", "loss-by-position.png", "memory.png"):
        assert f"]({picture})" in text
        assert (path.parent / picture).read_bytes().startswith(PNG)


def test_a_report_is_current_until_a_stage_ends_after_it(finished: Path, generated: list[Path]) -> None:
    assert not write.is_current(finished)
    build(finished)
    assert write.is_current(finished)
    marker = finished / "instruct" / "STAGE_COMPLETE"
    marker.unlink()
    assert not write.is_current(finished)


def test_an_incomplete_stage_is_refused_by_name(finished: Path, generated: list[Path]) -> None:
    (finished / "long-context" / "STAGE_COMPLETE").unlink()
    with pytest.raises(ConfigError, match=r"long-context: the stage is not complete"):
        build(finished)


def test_a_folder_without_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no stage"):
        build(tmp_path)


def test_the_table_needs_no_torch(finished: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from megatron_palimpsa.report.write import summaries;"
        "print(len(summaries(Path(sys.argv[1]))), 'torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(finished)], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["3", "False", "False"]
