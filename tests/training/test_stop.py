"""Reasons to stop, their order, and that ranks agree."""

import os
import signal

import pytest
from helpers.stages import tiny_stage

from megatron_palimpsa.training.stop import StopControl, StopReason


def control(clock=lambda: 0.0, **train):
    return StopControl(tiny_stage(train=train).train, clock)


def alone(own):
    return own


def test_nothing_set_never_stops():
    assert control().reason(10**6, 10**12, alone) is StopReason.NONE


def test_step_and_tokens():
    assert control(stop_at_step=3).reason(2, 128, alone) is StopReason.NONE
    assert control(stop_at_step=3).reason(3, 192, alone) is StopReason.STEP
    assert control(stop_at_tokens=200).reason(3, 192, alone) is StopReason.NONE
    assert control(stop_at_tokens=200).reason(4, 256, alone) is StopReason.TOKENS


def test_minutes_count_from_the_start():
    now = [1000.0]
    stop = control(clock=lambda: now[0], stop_after_minutes=1.5)
    now[0] = 1089.0
    assert stop.reason(1, 1, alone) is StopReason.NONE
    now[0] = 1090.0
    assert stop.reason(1, 1, alone) is StopReason.MINUTES


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_noted_only_while_listening(number):
    before = signal.getsignal(number)
    stop = control()
    with stop.listening():
        os.kill(os.getpid(), number)
        assert stop.reason(1, 1, alone) is StopReason.SIGNAL
    assert signal.getsignal(number) is before


def test_the_ranks_largest_reason_wins():
    asked = []

    def agree(own):
        asked.append(own)
        return StopReason.SIGNAL

    assert control(stop_at_step=1).reason(1, 1, agree) is StopReason.SIGNAL
    assert asked == [StopReason.STEP]


def test_every_reason_says_itself():
    assert len({str(reason) for reason in StopReason}) == len(StopReason)


def test_file_stops_all_ranks_though_only_the_first_looks(tmp_path, monkeypatch):
    file = tmp_path / "STOP"
    stop = StopControl(tiny_stage().train, file=file)
    assert stop.reason(1, 64, alone) is StopReason.NONE
    file.touch()
    assert stop.reason(2, 128, alone) is StopReason.FILE
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert stop.reason(2, 128, alone) is StopReason.NONE
    assert stop.reason(2, 128, lambda own: max(own, StopReason.FILE)) is StopReason.FILE


def test_save_file_is_taken_once_by_the_first_rank_and_gives_way_to_a_stop(tmp_path, monkeypatch):
    file = tmp_path / "SAVE_NOW"
    stop = StopControl(tiny_stage(train={"stop_at_step": 3}).train, save_file=file)
    assert stop.reason(1, 64, alone) is StopReason.NONE
    file.touch()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert stop.reason(1, 64, alone) is StopReason.NONE
    monkeypatch.setenv("RANK", "0")
    assert stop.reason(1, 64, alone) is StopReason.SAVE
    assert stop.reason(2, 128, alone) is StopReason.NONE
    file.touch()
    assert stop.reason(3, 192, alone) is StopReason.STEP
