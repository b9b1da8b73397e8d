"""`job/submission.json` of a step: the jobs that were submitted for it last."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from palimpsa_data.files import json_bytes, write_atomically

from megatron_palimpsa.config import ConfigError


@dataclass(frozen=True)
class Submission:
    """What SLURM has of a step."""

    jobs: dict[str, str]
    """Ids by name: `train`, `evaluation`, or a preparation's arrays and `finish`."""
    main: str
    """The job that the next step waits for; "" where it waits for none of them."""
    submitted: str
    """When, in UTC."""
    git_commit: str | None
    git_changed: bool = False
    working_folder: str | None = None
    """Where it was submitted from: relative paths of the configuration start there. None in old records."""
    is_whole: bool = True
    """False until all jobs are noted: a submit that was killed leaves it so, and SLURM may have one job more."""
    place: int = 0
    """In the chain, among the steps that were submitted together."""

    @property
    def order(self) -> tuple[str, int, int]:
        """Sorts a run's steps."""
        return self.submitted, self.place, min(map(int, self.jobs.values()), default=0)

    @property
    def job_id(self) -> str | None:
        return self.jobs.get(self.main)


def write_submission(folder: Path, submission: Submission) -> None:
    """Of the step in `folder`."""
    record = {"job_id": submission.job_id, **dataclasses.asdict(submission)}
    write_atomically(_path(folder), json_bytes(record))


def remove_submission(folder: Path) -> None:
    """Of the step in `folder`."""
    _path(folder).unlink(missing_ok=True)


def read_submission(folder: Path) -> Submission | None:
    """None for a step that was never submitted.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = _path(folder)
    try:
        record = json.loads(path.read_text())
        record.pop("job_id")
        submission = Submission(**record)
        if (submission.is_whole and not submission.jobs) or not all(
            job.isdecimal() for job in submission.jobs.values()
        ):
            raise ValueError("jobs are not ids")
        texts = (submission.main, submission.submitted, submission.working_folder or "")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("main, submitted and working_folder are texts")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); see squeue, and remove it") from None
    return submission


def _path(folder: Path) -> Path:
    return folder / "job" / "submission.json"
