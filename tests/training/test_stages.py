"""Which checkpoint a stage starts from, and what is refused; no training."""

import json
import shutil
from dataclasses import replace

import pytest
from helpers.stages import tiny_stage

from megatron_palimpsa.config import ConfigError, InitFrom
from megatron_palimpsa.training.checkpoint_files import STATE
from megatron_palimpsa.training.checkpoint_state import FORMAT_VERSION, fingerprint
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.stages import Source, find_source, follow_source, planned_source


@pytest.fixture
def runs(tmp_path):
    """Output folder with a complete stage `before`."""
    folder = RunFolder(tmp_path / "before")
    config = tiny_stage(name="before", output_dir=str(tmp_path))
    (folder.checkpoints / "step-4").mkdir(parents=True)
    state = {"format_version": FORMAT_VERSION, "model": fingerprint(config.model)}
    (folder.checkpoints / "step-4" / STATE).write_text(json.dumps(state))
    folder.write_config(config)
    folder.write_marker({"steps": 4, "tokens": 256, "seconds": 1.0, "checkpoint": "checkpoints/step-4"})
    return tmp_path


def stage(runs, load="weights", init="before", pattern="own", **changes):
    init_from = {"stage": init, "load": load, "pattern": pattern}
    return tiny_stage(name="after", output_dir=str(runs), init_from=init_from, **changes)


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        find_source(config)
    return str(caught.value)


def test_without_init_from_there_is_none(tmp_path):
    assert find_source(tiny_stage()) is None


def test_by_the_name_of_a_sibling_and_by_path(runs, monkeypatch):
    by_name = find_source(stage(runs))
    assert by_name.checkpoint == runs / "before" / "checkpoints" / "step-4"
    assert by_name.load == "weights"
    assert find_source(stage(runs / "elsewhere", init=str(runs / "before"))) == by_name
    monkeypatch.chdir(runs.parent)
    relative = find_source(stage(runs / "elsewhere", init=f"{runs.name}/before", load="weights+optimizer"))
    assert relative.checkpoint.resolve() == by_name.checkpoint.resolve()
    assert relative.load == "weights+optimizer"


def test_the_sequence_length_and_what_initialises_may_change(runs):
    assert find_source(stage(runs, model={"seq_length": 64, "init_std": 0.5, "dt_min": 0.01}))


def test_unknown_stage(runs):
    assert "there is no stage folder" in refusal(stage(runs, init="nowhere"))


def test_stage_that_is_not_complete(runs):
    (runs / "before" / "STAGE_COMPLETE").unlink()
    message = refusal(stage(runs))
    assert "init_from.stage='before': that stage is not complete" in message
    assert "STAGE_COMPLETE is missing" in message


def test_missing_checkpoint(runs):
    shutil.rmtree(runs / "before" / "checkpoints" / "step-4")
    assert "its last checkpoint" in refusal(stage(runs))


def test_itself(runs):
    assert "is the stage itself" in refusal(stage(runs, init="after"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pattern": "MP*PP"}, "model.pattern is 'MP*-P' in the checkpoint and 'MP*PP' here"),
        ({"hidden_size": 64}, "model.hidden_size is 32 in the checkpoint and 64 here"),
        ({"norm_eps": 1e-6}, "model.norm_eps is 1e-05 in the checkpoint and 1e-06 here"),
        ({"tie_embeddings": False}, "model.tie_embeddings is True in the checkpoint and False here"),
    ],
)
def test_another_model_is_refused_by_its_differing_keys(runs, change, named):
    message = refusal(stage(runs, model=change))
    assert "step-4: a checkpoint of another model" in message
    assert named in message


def test_moments_need_the_same_trained_parameters(runs):
    assert find_source(stage(runs, model={"train_prior": True}))
    message = refusal(stage(runs, load="weights+optimizer", model={"train_prior": True}))
    assert "model.train_prior=True (there False)" in message


def test_another_tokenizer_is_refused_wherever_it_lies(runs, monkeypatch):
    monkeypatch.chdir(runs)
    (runs / "tokenizer.model").write_bytes(b"one")
    (runs / "moved.model").write_bytes(b"one")
    (runs / "other.model").write_bytes(b"two")
    assert find_source(stage(runs, data={"tokenizer": "moved.model"}))
    message = refusal(stage(runs, data={"tokenizer": "other.model"}))
    assert "was trained with the tokenizer tokenizer.model, which is not data.tokenizer=other.model" in message


def test_damaged_marker(runs):
    (runs / "before" / "STAGE_COMPLETE").write_text(json.dumps({"checkpoint": "x"})[:-3])
    assert "not readable as the marker" in refusal(stage(runs))


@pytest.mark.parametrize("state", ["", "{}", "[]"])
def test_damaged_state_of_the_last_checkpoint(runs, state):
    (runs / "before" / "checkpoints" / "step-4" / STATE).write_text(state)
    assert "step-4 is damaged" in refusal(stage(runs))


def test_layers_in_the_order_of_the_source_with_the_stage_s_own_borders(runs):
    other = {"pattern": "-P|*PM"}
    piped = tiny_stage(2, name="after", output_dir=str(runs), model=other, parallel={"pp": 2})
    piped = replace(piped, init_from=InitFrom("before", pattern="source"))
    assert follow_source(piped).model.pattern == "MP|*-P"
    assert find_source(follow_source(piped))
    own = stage(runs, model={"pattern": "-P*PM"})
    assert follow_source(own) == own
    assert "pattern is 'MP*-P' in the checkpoint and '-P*PM' here" in refusal(own)
    with pytest.raises(ConfigError, match=r"before has layers 1 \*, 1 -, 1 M, 2 P, model.pattern 1 \*, 1 -, 2 M, 1 P"):
        follow_source(stage(runs, pattern="source", model={"pattern": "-P*MM"}))


def test_a_source_that_something_before_makes_is_planned_for(runs):
    to_come = stage(runs, init="base", pattern="source", model={"pattern": "-P*PM"})
    assert follow_source(to_come) == to_come
    assert planned_source(to_come, [], [runs / "base"]) == Source(runs / "base", "weights")
    assert planned_source(to_come, [], [runs / "other"]) is None
    # What is there is looked into.
    assert planned_source(stage(runs), [], [runs / "before"]) is None


def test_stages_before_may_have_their_layers_in_another_order_where_it_is_followed(runs):
    before = tiny_stage(name="first", output_dir=str(runs), model={"pattern": "PMP*-"})
    assert planned_source(stage(runs, init="first", pattern="source"), [before])
    with pytest.raises(ConfigError, match=r"trains another model: model\.pattern is 'PMP"):
        planned_source(stage(runs, init="first"), [before])
