"""Preparations: what is refused before anything starts, which tasks are left, and what finishing leaves behind."""

from pathlib import Path

import pytest
import yaml
from helpers.bpe import write_tokenizer
from helpers.jobs import write_inputs
from helpers.published_mamba2 import random_mamba2, save_as_state_spaces
from palimpsa_launch import preparation
from palimpsa_launch.job import load_job

from megatron_palimpsa import cli
from megatron_palimpsa.config import ConfigError

COMMAND = "prep fineweb in --output sets/web --tokenizer tokenizer.json"


@pytest.fixture(autouse=True)
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    write_inputs(tmp_path / "in", files=3, rows=6)


def write(**changes):
    recipe = {
        "name": "data",
        "output_dir": "runs/mine",
        "arrays": {"web": {"command": COMMAND, "tasks": 2}},
        "then": ["prep blend 'my blend.yaml' --set sets/web 1.0 2"],
    }
    path = Path("data.yaml")
    path.write_text(yaml.safe_dump(recipe | changes))
    return path


def load(**changes):
    return preparation.load(write(**changes), [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"arrays": {"web": {"command": "prep fineweb in"}}}, "the following arguments are required: --output"),
        ({"arrays": {"web": {"command": COMMAND + " --min-score 3x"}}}, "argument --min-score: invalid float value"),
        ({"arrays": {"web": {"command": COMMAND + " --fast"}}}, "unrecognized arguments: --fast"),
        ({"arrays": {"web": {"command": COMMAND + " 'in"}}}, "No closing quotation"),
        ({"arrays": {"web": {"command": COMMAND + " --shard 0/2"}}}, "must make a set, without --shard"),
        ({"arrays": {"web": {"command": "prep status sets/web"}}}, "must make a set, without --shard"),
        ({"arrays": {"web": {"command": COMMAND, "tasks": 0}}}, "arrays.web.tasks=0"),
        ({"arrays": {"finish": {"command": COMMAND}}}, "arrays.finish: that is the name of the last job"),
        ({"arrays": {"a b": {"command": COMMAND}}}, "arrays.a b"),
        ({"then": ["prep blond x"]}, "then.0='prep blond x': argument WHAT: invalid choice"),
        ({"then": ["prep blend a\nb"]}, "then.0"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"array": {}}, "unknown key 'array'; known keys are name, output_dir, arrays, then, job"),
    ],
)
def test_mistakes_in_the_recipe_are_named(changes, expected):
    with pytest.raises(ConfigError) as caught:
        load(**changes)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (COMMAND.replace(" in ", " gone "), "gone"),
        (COMMAND.replace("tokenizer.json", "gone.json"), "gone.json"),
        (COMMAND.replace("sets/web", "in"), "cannot lie in --output"),
    ],
)
def test_what_is_missing_is_found_before_a_task_starts(command, expected):
    with pytest.raises(ConfigError, match=r"^arrays\.web: ") as caught:
        preparation.tasks_left(load(arrays={"web": {"command": command}}), "web")
    assert expected in str(caught.value)


def test_only_tasks_with_shards_to_make_are_left():
    config = load()
    assert preparation.tasks_left(config, "web") == [0, 1]
    assert preparation.progress(config) == (0, 0)
    assert cli.main([*preparation.words(COMMAND), "--shard", "1/2"]) == 0
    assert preparation.tasks_left(config, "web") == [0]  # shards 0 and 2
    assert preparation.progress(config) == (1, 3)
    assert preparation.tasks_left(load(arrays={"web": {"command": COMMAND, "tasks": 100}}), "web") == [0, 2]
    assert cli.main([*preparation.words(COMMAND), "--shard", "0/2"]) == 0
    assert preparation.tasks_left(config, "web") == []


def test_another_jobs_folder_is_refused():
    assert cli.main([*preparation.words(COMMAND), "--shard", "1/2"]) == 0
    with pytest.raises(ConfigError, match="holds another job"):
        preparation.tasks_left(load(arrays={"web": {"command": COMMAND + " --min-length 50"}}), "web")


def test_finishing_needs_all_shards_and_marks_these_very_commands(tmp_path):
    config = load()
    with pytest.raises(preparation.DataError):
        preparation.finish(config)
    assert cli.main(preparation.words(COMMAND)) == 0
    assert not preparation.is_complete(config)
    assert preparation.finish(config) == 0
    assert preparation.is_complete(config)
    assert (tmp_path / "my blend.yaml").is_file()
    assert preparation.is_complete(load(job={"time": "5:00:00"}))
    assert not preparation.is_complete(load(then=[]))


def test_what_a_killed_run_has_converted_is_not_converted_again(tmp_path, capfd):
    save_as_state_spaces(random_mamba2(vocab_size=64, n_groups=1, tie_word_embeddings=True), tmp_path / "source", 61)
    convert = "convert mamba2 source runs/base"
    config = load(arrays={}, then=[convert, "prep verify sets/absent"])
    assert preparation.outputs(config) == [Path("runs/base")]
    assert preparation.finish(config) == 2
    written = (tmp_path / "runs" / "base" / "STAGE_COMPLETE").stat().st_mtime_ns
    capfd.readouterr()
    assert (
        preparation.finish(load(arrays={}, then=[convert, "prep tokenizer in --vocab-size 300 --output t.json"])) == 0
    )
    assert f"{convert}: its output is there" in capfd.readouterr().out
    assert (tmp_path / "runs" / "base" / "STAGE_COMPLETE").stat().st_mtime_ns == written
    # Behind other commands it may be another's output: one converts anew, or removes it.
    other = load(arrays={}, then=["convert mamba2 source runs/other", convert])
    for _ in range(2):
        assert preparation.finish(other) == 2
        assert "runs/base is there already" in capfd.readouterr().err


def test_overrides_of_stages_leave_it_alone_and_the_job_is_changed():
    config = preparation.load(
        write(job={"gpus_per_node": 0, "processes_per_node": 2}), ["train.tokens=5", "output_dir=x"]
    )
    assert config.output_dir == "x"
    job = preparation.job_of(config, load_job(None, {"time": "60", "nodes": 8}))
    assert (job.nodes, job.gpus_per_node, job.time) == (1, 0, "60")
    with pytest.raises(ConfigError, match="data: job: unknown key 'node'"):
        preparation.job_of(load(job={"node": 1}), job)
