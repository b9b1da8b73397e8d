"""The paper's tasks (arXiv 2602.09075), and which number of each it goes by.

The choice is that of the tables of Gated Linear Attention (Yang et al. 2023, 2312.06635) and Gated DeltaNet (Yang et
al. 2024, 2412.06464), whose tasks these are: accuracy, in HellaSwag and ARC-challenge that normalised by the answers'
length, without examples in the prompt. The seven-task average is that of the accuracies.
"""

from __future__ import annotations

from typing import NamedTuple


class PaperTask(NamedTuple):
    """One column of the table."""

    task: str
    """Its name in lm-evaluation-harness."""
    column: str
    metric: str
    averaged: bool = True


TABLE = (
    PaperTask("wikitext", "WikiText ppl", "word_perplexity", averaged=False),
    PaperTask("lambada_openai", "LAMBADA ppl", "perplexity", averaged=False),
    PaperTask("lambada_openai", "LAMBADA", "acc"),
    PaperTask("piqa", "PIQA", "acc"),
    PaperTask("hellaswag", "HellaSwag (norm)", "acc_norm"),
    PaperTask("winogrande", "WinoGrande", "acc"),
    PaperTask("arc_easy", "ARC-e", "acc"),
    PaperTask("arc_challenge", "ARC-c (norm)", "acc_norm"),
    PaperTask("social_iqa", "SIQA", "acc"),
)
TASKS = tuple(dict.fromkeys(row.task for row in TABLE))
