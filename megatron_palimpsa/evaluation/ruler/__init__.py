"""RULER (Hsieh et al. 2024, 2404.06654) from a seed: its tasks, settings, prompts and scores, in any length.

Apart from the training needles by construction (`words.py`): keys, names and coded words are of the half of all
spellings that training leaves to evaluation (`palimpsa_data.needles.names.split_of`), numbers have 7 digits, which
training's never have, and seeds have a tag of their own.
"""

from megatron_palimpsa.evaluation.ruler.fit import Sample, make_sample
from megatron_palimpsa.evaluation.ruler.tasks import GENERATED, NAMES, RulerTask, Sources

__all__ = ["GENERATED", "NAMES", "RulerTask", "Sample", "Sources", "make_sample"]
