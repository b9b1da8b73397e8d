import math
import random

import pytest

from megatron_palimpsa.config import LossScaleConfig
from megatron_palimpsa.engine.loss_scale import LossScale


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_a_dynamic_scale_is_deepspeeds(hysteresis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    # It reports each change on rank 0.
    monkeypatch.setattr(scaler.dist, "get_rank", lambda: 1)
    theirs = scaler.DynamicLossScaler(
        init_scale=2**6, scale_window=5, min_scale=4.0, delayed_shift=hysteresis, consecutive_hysteresis=False,
        raise_error_at_min_scale=False, dtype=None,
    )  # fmt: skip
    ours = LossScale(
        LossScaleConfig(initial_scale_power=6, loss_scale_window=5, min_loss_scale=4.0, hysteresis=hysteresis)
    )
    draw = random.Random(1)
    scales = []
    for step in range(300):
        overflow = draw.random() < (0.8 if step < 30 else 0.1)
        ours.update(math.inf if overflow else 1.0)
        theirs.update_scale(overflow)
        scales.append((ours.scale, theirs.cur_scale))
    assert [one for one, _ in scales] == [other for _, other in scales]
    assert len({one for one, _ in scales}) > 3


def test_a_saved_scale_goes_on() -> None:
    settings = LossScaleConfig(loss_scale_window=3)
    first, second = LossScale(settings), LossScale(settings)
    for norm in (math.nan, math.inf, 1.0, 1.0, 1.0):
        first.update(norm)
    second.load_state_dict(first.state_dict())
    for norm in (1.0, math.inf, math.inf):
        first.update(norm)
        second.update(norm)
        assert first.scale == second.scale
    assert first.scale == 2.0**15


def test_a_fixed_scale_stays() -> None:
    fixed = LossScale(LossScaleConfig(loss_scale=128.0))
    fixed.update(math.inf)
    fixed.load_state_dict(LossScale(LossScaleConfig()).state_dict())
    assert fixed.scale == 128.0
