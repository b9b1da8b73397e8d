"""One process with Megatron's parallel state for each module of engine tests."""

from helpers.single_process import single_process as single_process
