"""MQAR, multi-query associative recall: examples, a curriculum over lengths, sweeps over learning rates and seeds.

The task is Zoology's (arXiv 2312.04927), sizes and curriculum are those of the Palimpsa paper (arXiv 2602.09075).
"""
