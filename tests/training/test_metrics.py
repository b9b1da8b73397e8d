"""Metrics files: schema-free mechanics of the JSON lines and TensorBoard's curves."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_palimpsa.training.metrics import MetricsFile, TensorBoard, flatten_scalars, read_records

VALID = {
    "step": 4,
    "loss": 2.5,
    "position_edges": [0, 16, 32],
    "loss_by_position": [3.0, None],
    "memory": {"2": {"window": 8.0, "importance_ratio": 1.5}},
}


def test_lines_are_there_as_soon_as_written(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", None)
    metrics.write("train", step=1, loss=2.0)
    assert read_records(tmp_path / "metrics.jsonl") == [{"kind": "train", "step": 1, "loss": 2.0}]


def test_not_finite_becomes_null_so_that_every_line_is_json(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", None)
    metrics.write("train", step=1, loss=math.nan, nested={"a": [math.inf, 1.0]})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "kind": "train",
        "step": 1,
        "loss": None,
        "nested": {"a": [None, 1.0]},
    }


def test_resume_drops_later_records_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, None)
    for step in range(6):
        metrics.write("train", step=step, loss=0.1 + step)
    metrics.close()
    with path.open("a") as file:
        # What a crash of the machine can leave, and a kill.
        file.write('\0\0\0\n{"kind": "tr\n\n3\n{}\n\xff\n')
        file.write('{"kind": "train", "step": 6, "lo')
    metrics = MetricsFile(path, 3)
    metrics.write("resume", step=3)
    assert [(record["kind"], record["step"]) for record in read_records(path)] == [
        ("train", 0),
        ("train", 1),
        ("train", 2),
        ("train", 3),
        ("resume", 3),
    ]
    assert read_records(path)[2]["loss"] == 2.1


def test_a_new_start_begins_a_new_file(tmp_path):
    for _ in range(2):
        metrics = MetricsFile(tmp_path / "metrics.jsonl", None)
        metrics.write("train", step=1, loss=1.0)
        metrics.close()
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1


def test_curves_of_a_record():
    assert flatten_scalars(VALID) == [
        ("loss", 2.5),
        ("memory/2/window", 8.0),
        ("memory/2/importance_ratio", 1.5),
        ("loss_before_position/16", 3.0),
    ]


def test_tensorboard_purges_steps_done_again(tmp_path):
    first = TensorBoard(tmp_path, None)
    for step in range(1, 6):
        first.write("train", step=step, loss=1.0)
    first.close()
    second = TensorBoard(tmp_path, 3)
    second.write("train", step=4, loss=2.0)
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
    ]
