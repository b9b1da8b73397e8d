"""The command on one process, and what it does when a case does not fit, on one rank or on some of several."""

import json

import pytest
import torch
from helpers import bench_ranks
from helpers.runs import run_ranks, write_stage

from megatron_palimpsa import bench, cli
from megatron_palimpsa.bench import run as bench_run

STEPS = ["--warmup", "1", "--steps", "2"]


@pytest.fixture
def stage(tmp_path):
    # No data is there, and none is needed.
    return write_stage(tmp_path, tmp_path / "nothing")


def test_every_case_is_trained_and_recorded(stage, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    cases = ["--case", "plain", "--case", "again:train.recompute=full", "--case", "M:model.pattern=MM"]
    assert cli.main(["bench", str(stage), *cases, *STEPS, "--output", str(output)]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["case"] for record in records] == ["plain", "again", "M"]
    assert {record["status"] for record in records} == {"ok"}
    assert records[0]["layers"] == {"M": 1, "P": 1, "*": 1, "-": 1}
    # Three steps on the same data: recomputation changes no loss, another model does.
    assert records[0]["loss"] == records[1]["loss"] != records[2]["loss"]
    assert all(record["tokens_per_second"] > 0 and record["steps"] == 2 for record in records)
    assert all(record["parameters"] > 0 and record["estimate_bytes"] > 0 for record in records)
    assert records[0]["mfu"] is records[0]["peak_bytes"] is None
    *_, plain, again, other, agreement, picture = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (plain, again, other)] == ["plain", "again", "M"]
    assert agreement.startswith("plain and 1 of the same model, 3 steps, largest difference: losses 0.0e+00 (again")
    assert picture == f"Picture: {tmp_path / 'out.png'}"
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    # The run folder is not touched.
    assert not (tmp_path / "runs").exists()
    # What is there is shown, not measured again; another setting is another case.
    assert cli.main(["bench", str(stage), *cases[:2], "--case", "again:train.recompute=none", *STEPS, "--output",
                     str(output)]) == 0  # fmt: skip
    assert "1 of 2 cases are in" in capsys.readouterr().out
    assert [json.loads(line)["case"] for line in output.read_text().splitlines()] == ["plain", "again", "M", "again"]


def test_a_stage_s_own_data(tiny_data, tmp_path, stage, capsys):
    own = write_stage(tmp_path, tiny_data, "own")
    output = tmp_path / "out.jsonl"
    assert cli.main(["bench", str(own), "--data", "--profile", *STEPS, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["data"] == "own"
    assert len(record["losses"]) == len(record["grad_norms"]) == 3
    assert record["losses"][0] != record["losses"][1] != record["losses"][2]  # no batch comes twice
    assert record["share_scan"] is None  # no GPU
    assert cli.main(["bench", str(stage), "--data", *STEPS]) == 2
    assert "data." in capsys.readouterr().err


def test_a_case_without_memory_is_recorded_and_the_next_runs(stage, tmp_path, monkeypatch):
    measure = bench_run.measure

    def first_fails(config, plan, **options):
        if config.train.recompute == "none":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
        return measure(config, plan, **options)

    monkeypatch.setattr(bench_run, "measure", first_fails)
    output = tmp_path / "out.jsonl"
    cases = bench.read_cases(stage, [], ["large", "small:train.recompute=full"], 1)
    bench.run_cases(cases, bench.Plan(1, 1), output=output)
    large, small = (json.loads(line) for line in output.read_text().splitlines())
    assert large["status"] == "out of memory"
    assert large["tokens_per_second"] is None
    assert small["status"] == "ok"


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")
NCCL_WITHOUT_MEMORY = RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'")


@pytest.mark.parametrize(
    "errors",
    [[NO_MEMORY, None], [None, NCCL_WITHOUT_MEMORY], [NO_MEMORY, NO_MEMORY]],
    ids=["rank 0", "rank 1", "both"],
)
def test_of_several_ranks_all_end_with_the_record_whichever_ran_out(stage, tmp_path, errors):
    output = tmp_path / "out.jsonl"
    cases = ["--case", "small", "--case", "large:train.micro_batch_size=1", "--case", "next"]
    arguments = ["bench", str(stage), *cases, "--warmup", "1", "--steps", "1", "--output", str(output)]
    assert run_ranks(bench_ranks.bench, arguments, errors, seconds=60) == [1, 1]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["case"], record["status"]) for record in records] == [("small", "ok"), ("large", "out of memory")]
    said = [(tmp_path / f"{stage.name}.{rank}").read_text() for rank in range(2)]
    assert said[0].count("tokens/s") == 1
    assert "is out of memory; all ranks end here" in said[0]
    assert "the same command goes on with: next" in said[0]
    assert "Traceback" not in said[0] + said[1]


def test_what_a_background_save_costs(stage, tmp_path, capsys):
    output, folder = tmp_path / "out.jsonl", tmp_path / "saved"
    arguments = ["bench", str(stage), "--case", "small", *STEPS, "--output", str(output), "--save", str(folder)]
    assert cli.main(arguments) == 0
    record = json.loads(output.read_text())
    [checkpoint] = folder.glob("small/step-*")
    assert checkpoint.name == "step-3"
    assert 0 < record["save_bytes"] < sum(file.stat().st_size for file in checkpoint.iterdir())
    assert record["save_stopped_seconds"] > 0
    assert record["save_complete_seconds"] >= record["save_stopped_seconds"]
    assert "small: a save stops training for 0." in capsys.readouterr().out
