"""The list of configurations, and each way in which it can be wrong."""

import pytest
from palimpsa_launch import stages

from megatron_palimpsa import cli
from megatron_palimpsa.bench import read_cases
from megatron_palimpsa.config import ConfigError

STAGE = stages.path("bench/2.7b")


def test_overrides_come_first_and_a_case_changes_them():
    cases = read_cases(
        STAGE,
        ["model.seq_length=8192", "train.global_batch_tokens=32768"],
        ["a", "b:model.seq_length=32768,train.recompute=full"],
        1,
    )
    assert [case.name for case in cases] == ["a", "b"]
    assert [case.config.model.seq_length for case in cases] == [8192, 32768]
    assert [case.config.train.recompute for case in cases] == ["none", "full"]
    assert cases[1].config.train.global_batch_tokens == 32768


def test_without_cases_the_stage_itself_is_the_only_one():
    (case,) = read_cases(STAGE, [], [], 1)
    assert case.config.model.layers.count("P") == 8
    assert len(case.config.model.layers) == 64
    assert case.config.model.padded_vocab_size == 50288


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (["model.seq_length=8192"], "expected NAME:section.key=value"),
        (["a:train.recompute=full", "a"], "another case has that name"),
        (["a", "b:model.seq_len=1"], "case b: .*unknown key 'model.seq_len'"),
        (["a:parallel.tp=3"], "case a: parallel.tp=3 does not divide the number of heads"),
    ],
)
def test_a_wrong_case_is_named_before_anything_runs(cases, message):
    with pytest.raises(ConfigError, match=message):
        read_cases(STAGE, [], cases, 1)


def test_the_ranks_count():
    with pytest.raises(ConfigError, match="does not divide the number of ranks, which is 3"):
        read_cases(STAGE, ["parallel.tp=2"], [], 3)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ["dp", "zero1", "zero2", "zero3"]),
        (2, ["dp", "tp2", "cp2", "zero1", "zero2", "zero3"]),
        (8, ["dp", "tp2", "tp2-pp2", "cp2", "cp4", "zero1", "zero2", "zero3"]),
    ],
)
def test_layouts_are_those_that_the_ranks_allow_and_cases_come_behind_them(ranks, names):
    mamba2 = "mamba2:model.pattern=" + 64 * "M"
    overrides = ["train.global_batch_tokens=65536"]
    cases = read_cases(STAGE, overrides, [mamba2], ranks, stages.path("bench/layouts"))
    assert [case.name for case in cases] == [*names, "mamba2"]
    assert all(case.overrides[0] == overrides[0] for case in cases)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp: parallel.tp=2", "'dp': 'parallel.tp=2': expected NAME: .section.key=value"),
        ("../dp: []", "'../dp': .*expected NAME"),
        ("2: []", "2: .*expected NAME"),
        ("tp3: [parallel.tp=3, parallel.pt=1]", "tp3: .*unknown key 'parallel.pt'"),
        ("tp4: [parallel.tp=4]", "no layout is for 2 ranks"),
    ],
)
def test_wrong_layouts_are_named(tmp_path, text, message):
    (tmp_path / "layouts.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cases(STAGE, [], [], 2, tmp_path / "layouts.yaml")


def test_the_command_refuses_an_output_that_is_neither_csv_nor_json_lines(capsys, tmp_path):
    assert cli.main(["bench", str(STAGE), "--output", str(tmp_path / "table.txt")]) == 2
    assert "must end with .jsonl or .csv" in capsys.readouterr().err


def test_a_name_that_is_no_packaged_recipe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "bench/3b"]) == 2
    assert "'bench/3b' is neither a YAML file nor a packaged recipe" in capsys.readouterr().err
