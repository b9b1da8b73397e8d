"""What a record holds, where it is appended, and the table."""

import csv
import json
import math
from dataclasses import replace

import pytest
from palimpsa_launch import stages

from megatron_palimpsa.bench.agreement import agreement_lines
from megatron_palimpsa.bench.cases import read_cases
from megatron_palimpsa.bench.measure import Measurement, Plan
from megatron_palimpsa.bench.picture import draw
from megatron_palimpsa.bench.profile import PARTS
from megatron_palimpsa.bench.record import complete, describe
from megatron_palimpsa.bench.record_file import RecordFile, measured_before
from megatron_palimpsa.bench.table import shares_line, table
from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.training.memory import estimate_memory

PLAN = Plan(warmup=1, steps=3)
MEASURED = Measurement(
    parameters=2_700_000_000,
    flops_per_token=2e10,
    build_seconds=1.0,
    first_step_seconds=9.0,
    step_seconds=[0.5, 0.25, 1.0],
    losses=[11.0, 10.5],
    grad_norms=[2.0, 1.0],
    static_bytes=50 * 2**30,
    peak_bytes=80 * 2**30,
    reserved_bytes=90 * 2**30,
    beside_bytes=2 * 2**30,
)


@pytest.fixture
def known():
    (case,) = read_cases(stages.path("bench/2.7b"), ["train.global_batch_tokens=16384"], [], 2)
    return describe(case, 2, estimate_memory(case.config, 2), PLAN) | {"device": "NVIDIA H200"}


def test_rates_come_from_the_median_step_and_mfu_from_all_devices(known):
    record = complete(known, MEASURED)
    assert record["dp"] == 2
    assert record["tokens_per_second"] == 32768
    assert (record["tokens_per_second_lowest"], record["tokens_per_second_highest"]) == (16384, 65536)
    assert record["mfu"] == pytest.approx(32768 * 2e10 / (2 * 989e12))
    assert record["beside_bytes"] == 2 * 2**30
    assert record["estimate_error_percent"] == pytest.approx(100 * (record["estimate_bytes"] / (80 * 2**30) - 1))


def test_without_a_known_device_there_is_no_mfu_and_without_cuda_no_error(known):
    record = complete(known | {"device": "cpu"}, MEASURED)
    assert record["mfu"] is None
    record = complete(known, Measurement(**{**vars(MEASURED), "peak_bytes": None}))
    assert record["estimate_error_percent"] is None


@pytest.mark.parametrize("name", ["table.jsonl", "table.csv"])
def test_records_are_appended_whatever_their_status(tmp_path, known, name):
    path = tmp_path / "new" / name
    records = [known | {"status": "out of memory"}, complete(known, MEASURED)]
    for record in records:
        RecordFile(path, list(record)).write(record)
    with path.open() as file:
        read = [json.loads(line) for line in file] if path.suffix == ".jsonl" else list(csv.DictReader(file))
    assert [row["status"] for row in read] == ["out of memory", "ok"]
    assert [str(row["peak_bytes"] or "") for row in read] == ["", str(80 * 2**30)]
    assert {tuple(row) for row in read} == {tuple(known)}


def test_the_table_has_a_line_a_case(known):
    head, failed, done = table([known | {"status": "out of memory"}, complete(known, MEASURED)]).splitlines()
    assert head.split()[:2] == ["case", "layers"]
    assert "out of memory" in failed
    assert "32,768" in done
    assert "80.00 GiB" in done
    assert f"{known['estimate_bytes'] / 2**30:.2f} GiB" in done


@pytest.mark.parametrize("name", ["table.jsonl", "table.csv"])
def test_a_file_gives_its_records_back_and_knows_what_was_measured(tmp_path, known, name):
    file = RecordFile(tmp_path / name, list(known))
    assert file.read() == []
    measured = complete(known, replace(MEASURED, shares=dict.fromkeys([*PARTS, "other", "idle"], 0.125)))
    failed = known | {"case": "1e3", "status": "out of memory"}
    for record in (measured, failed):
        file.write(record)
    assert file.read() == [measured, failed]
    # Another version's estimate is the same case; other ranks, settings, steps or a newer PyTorch are not.
    assert measured_before(known | {"estimate_bytes": 1, "parameters": 2}, [], file.read()) == measured
    for other in ({"ranks": 4}, {"overrides": "seed=3"}, {"torch": "9.0"}, {"data": "own"}, {"steps": 5}):
        assert measured_before(known | other, [], file.read()) is None
    later = known | {"triton": "3.10"}
    file.write(later)
    assert measured_before(later, [], file.read()) == later
    assert measured_before(known, ["share_scan"], file.read()) == measured
    assert measured_before(known, ["save_bytes"], file.read()) is None


@pytest.mark.parametrize("name", ["table.jsonl", "table.csv"])
def test_a_loss_that_is_no_number_is_recorded_as_none(tmp_path, known, name):
    file = RecordFile(tmp_path / name, list(known))
    file.write(complete(known, replace(MEASURED, losses=[11.0, math.nan], grad_norms=[1.0, math.inf])))
    (record,) = file.read()
    assert record["loss"] is record["losses"] is record["grad_norm"] is record["grad_norms"] is None


@pytest.mark.parametrize("name", ["table.jsonl", "table.csv"])
def test_a_file_with_a_line_cut_off_is_refused(tmp_path, known, name):
    path = tmp_path / name
    file = RecordFile(path, list(known))
    for _ in range(2):
        file.write(complete(known, MEASURED))
    path.write_text(path.read_text()[:-200])
    with pytest.raises(ConfigError, match=r"holds something else than records .* can be taken out"):
        RecordFile(path, list(known)).read()


def test_cases_of_one_model_are_compared_whatever_their_layout(known):
    first = complete(known | {"case": "dp"}, MEASURED)
    overrides = f"{known['overrides']} parallel.tp=2"
    near = complete(
        known | {"case": "tp2", "overrides": overrides, "tp": 2, "dp": 1}, replace(MEASURED, losses=[11.0, 10.501])
    )
    far = complete(known | {"case": "cp2", "cp": 2, "dp": 1}, replace(MEASURED, grad_norms=[2.1, 1.0]))
    other = complete(known | {"case": "longer", "seq_length": 8192}, MEASURED)
    out = known | {"case": "pp2", "status": "out of memory"}
    faster = complete(known | {"case": "lr", "overrides": f"{known['overrides']} optimizer.lr=1"}, MEASURED)
    (line,) = agreement_lines([first, out, near, far, other, faster])
    assert line == (
        "dp and 2 of the same model, 2 steps, largest difference: losses 9.5e-05 (tp2 within 2e-03), "
        "gradient norms 5.0e-02 (cp2, NOT within 2e-02)"
    )


def test_a_picture_has_rates_and_what_was_profiled(tmp_path, known):
    profiled = complete(known, replace(MEASURED, shares=dict.fromkeys([*PARTS, "other", "idle"], 0.1)))
    out = known | {"status": "out of memory"}
    for records in ([profiled, out], [complete(known, MEASURED)], [out]):
        draw(records, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert shares_line(profiled).startswith(f"{profiled['case']}, of a step: communication 10 %, ")
    assert shares_line(complete(known, MEASURED)) is None


@pytest.mark.parametrize(
    ("overrides", "fields", "shown"),
    [
        ([], ("megatron", True, None, None, None), "dp 2"),
        (["zero_stage=0"], ("deepspeed", None, 0, False, False), "dp 2, ZeRO 0"),
        (
            ["zero_stage=1", "offload_optimizer=true"],
            ("deepspeed", None, 1, True, False),
            "ZeRO 1, optimizer offloaded",
        ),
        (
            ["zero_stage=3", "offload_optimizer=true", "offload_parameters=true"],
            ("deepspeed", None, 3, True, True),
            "ZeRO 3, all offloaded",
        ),
    ],
)
def test_engine_and_stage_are_told_apart(overrides, fields, shown):
    keys = [f"parallel.deepspeed.{override}" for override in overrides]
    keys += ["parallel.engine=deepspeed"] if overrides else []
    (case,) = read_cases(stages.path("bench/2.7b"), ["train.global_batch_tokens=8192", *keys], [], 2)
    record = complete(describe(case, 2, estimate_memory(case.config, 2), PLAN), MEASURED)
    names = ("engine", "distributed_optimizer", "zero_stage", "offload_optimizer", "offload_parameters")
    assert tuple(record[name] for name in names) == fields
    assert shown in table([record])


def test_a_csv_with_other_columns_is_left_alone(tmp_path, known):
    path = tmp_path / "table.csv"
    path.write_text("case,tokens\na,1\n")
    with pytest.raises(ConfigError, match=r"table.csv: has other columns"):
        RecordFile(path, list(known))
    assert path.read_text() == "case,tokens\na,1\n"
