"""`build`: table, CSV and pictures of all sweeps in a folder."""

from __future__ import annotations

from pathlib import Path

from megatron_palimpsa.experiments.mqar import summary
from megatron_palimpsa.experiments.mqar.files import lock, write_whole
from megatron_palimpsa.experiments.mqar.folders import sweeps_in

_TEXT = """# MQAR

Accuracy at the queries of each lesson's last epoch, on examples that were not trained on; each seed at the learning
rate that was best for it at that length, ± standard deviation over seeds.

{table}

Every finished lesson of every run is in `accuracy.csv`, every epoch in `training.csv`.

![accuracy.png](accuracy.png)

Over the curriculum, each model at its best learning rate: memory window N_t = 1 / (1 - alpha_t) (median over heads and
tokens), importance ratio r = (I_max - I_min) / I_min (median over heads and examples) and loss. Lines are medians over
seeds, shaded from the lowest to the highest; behind a lesson that ended early they go straight on.

![training.png](training.png)
"""


def build(output_dir: str) -> Path | None:
    """Write `OUTPUT_DIR/report` of all sweeps there and print its table; -> report.md, None without any epoch.

    Raises:
        ConfigError: a sweep's or a run's files are damaged.
    """
    runs = [item for config in sweeps_in(output_dir) for item in summary.read_runs(config)]
    if not runs:
        print("No epoch is trained yet: no report.")
        return None
    from megatron_palimpsa.experiments.mqar import pictures

    output = Path(output_dir) / "report"
    rows = summary.accuracies(runs)
    text = summary.table(rows) if rows else "No lesson is finished yet."
    if ended := summary.diverged(runs):
        text += f"\n\nEnded by a loss that was not finite, and in no row behind that: {', '.join(ended)}."
    report = output / "report.md"
    # Several processes that worked on the sweep may come to its end together.
    with lock(output, wait=True):
        summary.write_accuracy_csv(runs, output / "accuracy.csv")
        summary.write_training_csv(runs, output / "training.csv")
        pictures.draw_training(runs, output / "training.png")
        if rows:
            pictures.draw_accuracy(rows, output / "accuracy.png")
        write_whole(report, _TEXT.format(table=text).encode())
    print(f"\n{text}\n\nReport with pictures: {report}", flush=True)
    return report
