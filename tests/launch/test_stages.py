from pathlib import Path

import pytest
from palimpsa_launch import stages

from megatron_palimpsa.config import check_stage, load_stage

DEMO = ["continue-pretraining", "long-context", "instruct"]


@pytest.mark.parametrize("name", DEMO)
def test_each_demo_recipe_is_a_valid_stage_of_its_own_name(name: str) -> None:
    config = load_stage(stages.path(f"demo/{name}"))
    check_stage(config)
    assert config.name == name
    assert Path(config.output_dir) == Path("runs/demo")


def test_the_stages_follow_each_other_with_one_geometry() -> None:
    first, second, third = (load_stage(stages.path(f"demo/{name}")) for name in DEMO)
    assert first.init_from is None
    assert second.init_from is not None
    assert second.init_from.stage == first.name
    assert third.init_from is not None
    assert third.init_from.stage == second.name
    assert second.model.seq_length > first.model.seq_length
    assert second.data.packing == "best-fit"
    assert first.model.pattern == second.model.pattern == third.model.pattern


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="demo/instruct"):
        stages.path("demo/pretraining")
