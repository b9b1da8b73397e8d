"""What a trained model knows and how long it remembers: tasks of lm-evaluation-harness, RULER, LongBench v2, NLL."""
