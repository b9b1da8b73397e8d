"""Long documents in which facts are hidden and asked for: the task families of RULER (Hsieh et al. 2024, 2404.06654).

Single, multi-key, multi-value and multi-query needles, variable tracing, common and frequent words; for training, so
everything is kept apart from evaluation: names are invented words of one half of a split (`names.split_of`) whose other
half is evaluation's, wording and value formats are not RULER's, and seeds have a tag of their own.
"""

from palimpsa_data.needles.generate import NeedleOptions, Tokens, needle
from palimpsa_data.needles.tasks import TASKS

__all__ = ["TASKS", "NeedleOptions", "Tokens", "needle"]
