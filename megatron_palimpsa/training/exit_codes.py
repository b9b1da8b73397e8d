"""What the exit code of a training process says; launchers act on it."""

from enum import IntEnum


class ExitCode(IntEnum):
    COMPLETE = 0
    """The stage's tokens are done and its marker is written; nothing else exits 0."""
    FAILED = 1
    """A file could not be written (disk full) or read, or an error nobody foresaw; the checkpoints before stay."""
    WRONG_INPUT = 2
    """Refused before anything started."""
    NUMERICAL_STOP = 3
    """Too many steps in a row were refused; the last checkpoint is from before them."""
    SAVED_AND_STOPPED = 75
    """A checkpoint was saved on request (signal, step, tokens or minutes); starting again goes on from it."""
    INTERRUPTED = 130
    """Ctrl-C; the last checkpoint stays."""
