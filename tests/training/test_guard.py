"""The guard alone: what it refuses, how it counts, that its state resumes exactly."""

import json
import math

import pytest

from megatron_palimpsa.training.guard import StepGuard


@pytest.fixture
def experienced():
    guard = StepGuard(max_norm_ratio=10.0, max_loss_rise=1.5, max_in_row=3)
    for index in range(21):
        assert guard.accept(2.0, 1.0 + (index % 3) / 10)  # median 1.1
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (math.nan, 1.0, "loss nan"),
        (math.inf, 1.0, "loss inf"),
        (2.0, math.nan, "gradient norm nan"),
        (2.0, math.inf, "gradient norm inf"),
        (2.0, 11.01, "gradient norm 11.01, above 10 x the running median 1.1"),
        (3.51, 1.0, "loss 3.51, more than 1.5 above the running median 2"),
    ],
)
def test_bad_steps_are_refused_with_the_reason(experienced, loss, norm, reason):
    assert not experienced.accept(loss, norm)
    assert experienced.last_refusal == reason
    assert (experienced.skipped, experienced.in_row) == (1, 1)


def test_a_step_at_the_bounds_is_accepted(experienced):
    assert experienced.accept(3.49, 10.99)
    assert experienced.last_refusal == ""


def test_spikes_are_judged_only_with_enough_history():
    guard = StepGuard(max_norm_ratio=10.0, max_loss_rise=1.5, max_in_row=3)
    for _ in range(15):
        assert guard.accept(1.0, 1.0)
    assert guard.accept(100.0, 1000.0)
    assert not guard.accept(1.0, 1000.0)
    assert not guard.accept(100.0, 1.0)


def test_no_bound_still_refuses_what_is_not_finite():
    guard = StepGuard(max_norm_ratio=None, max_loss_rise=None, max_in_row=3)
    assert all(guard.accept(size, size) for size in [1.0] * 30 + [1e9])
    assert not guard.accept(math.nan, 1.0)


def test_refused_norms_do_not_move_the_median_and_a_good_step_ends_the_row(experienced):
    for _ in range(2):
        assert not experienced.accept(2.0, 500.0)
    assert not experienced.exhausted
    assert experienced.accept(2.0, 1.0)
    assert not experienced.accept(2.0, 500.0)
    assert (experienced.skipped, experienced.in_row) == (3, 1)


def test_exhausted_after_the_set_number_in_a_row(experienced):
    for _ in range(3):
        experienced.accept(math.nan, math.nan)
    assert experienced.exhausted


def test_state_goes_through_json_and_decides_the_same(experienced):
    experienced.accept(math.nan, 1.0)
    copy = StepGuard(max_norm_ratio=10.0, max_loss_rise=1.5, max_in_row=3)
    copy.load_state_dict(json.loads(json.dumps(experienced.state_dict())))
    for norm in [1.2, 0.3, 11.5, 9.0, 12.0, math.inf, 1.0]:
        for loss in (2.0, 3.4, 9.0):
            assert copy.accept(loss, norm) == experienced.accept(loss, norm)
    assert copy.state_dict() == experienced.state_dict()


def test_window_forgets_old_norms(experienced):
    for _ in range(130):
        assert experienced.accept(2.0, 5.0)
    assert experienced.accept(2.0, 49.0)  # 10 x the new median, 45 x the old one
    assert len(experienced.state_dict()["norms"]) == len(experienced.state_dict()["losses"]) == 128
