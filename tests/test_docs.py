"""The documents name only what is there."""

import re
from pathlib import Path

import pytest

from megatron_palimpsa.config import load_stage

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kernels/**/*.md")])
PLACES = [
    "",
    "megatron_palimpsa",
    "kernels/palimpsa_kernels",
    "data_prep/palimpsa_data",
    "launch/palimpsa_launch/stages",
]
# In docs/architecture.md a module is named without the folder that its paragraph is about.
PLACES += [
    f"megatron_palimpsa/{folder}"
    for folder in (
        "model",
        "parallel",
        "engine",
        "training",
        "convert",
        "export",
        "evaluation",
        "experiments/mqar",
        "bench",
    )
]
PLACES += [
    "data_prep",
    "launch",
    "launch/palimpsa_launch",
    "launch/palimpsa_launch/templates",
    "kernels/benchmarks",
    "data_prep/benchmarks",
]
MADE_BY_RUNS = {"config.yaml", "report.md", "model.yaml", "pattern.yaml", "runs/mine/train.yaml"}


def named_files(text: str) -> set[str]:
    return set(re.findall(r"`([\w./-]+\.(?:py|yaml|md|toml|txt|sh))`", text)) - MADE_BY_RUNS


def exists(name: str) -> bool:
    return any((ROOT / place / name).exists() for place in PLACES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_named_file_exists(document: Path) -> None:
    missing = {name for name in named_files(document.read_text()) if not exists(name)}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_inside_the_repository_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not (document.parent / link).exists()] == []


def test_the_recipe_for_a_converted_model_is_complete(tmp_path: Path) -> None:
    (recipe,) = re.findall(r"^```yaml\n(base: start/model.yaml.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "train.yaml").write_text(recipe)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "model.yaml").write_text("model: {pattern: MP, hidden_size: 64, vocab_size: 312}")
    config = load_stage(tmp_path / "train.yaml")
    assert (config.folder, config.total_steps) == (Path("runs/mine/train"), 954)


def test_every_make_command_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)\b(?=[`,;. ]|$)", _commands(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def _commands() -> str:
    """Code of the documents: what stands between backticks or is indented."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    found = re.findall(r"`([^`\n]+)`|^    (.*)$", text, re.MULTILINE)
    return "\n".join(quoted or indented for quoted, indented in found)
