"""`status`, `logs`, `cancel`, `resume` and `save-now`: work on a run by its name."""

from __future__ import annotations

import argparse
import sys

from megatron_palimpsa.commands.prep_job import count


def add(commands: argparse._SubParsersAction) -> None:
    """One command each."""
    status = _add(commands, "status", "how far a run's stages are, and why those that failed did", _status)
    status.epilog = "Exit code 0 when all stages are complete, 1 when one failed or was cancelled, else 75."
    logs = _add(commands, "logs", "what the newest attempt of a run's stage logs", _logs)
    logs.add_argument("--follow", "-f", action="store_true", help="go on with what is added, by later attempts too")
    logs.add_argument("--stage", metavar="NAME", help="of this stage (the first that is not complete)")
    logs.add_argument("--rank", type=_rank, metavar="N", help="of this rank (the first that failed, or 0)")
    logs.add_argument("--job", action="store_true", help="what the batch script logs instead of a rank")
    logs.add_argument("--lines", "-n", type=count, default=50, metavar="N", help="begin with the last N (%(default)s)")
    cancel = _add(commands, "cancel", "end a run's jobs; a stage that trains saves first", _cancel)
    cancel.add_argument(
        "--now", action="store_true", help="without saving: what came after the last checkpoint is lost"
    )
    resume = _add(commands, "resume", "submit again what is left of a run, with its recorded configuration", _resume)
    _add_job_options(resume)
    resume.add_argument("--dry-run", action="store_true", help="print plans and scripts and submit nothing")
    _add(commands, "save-now", "have the stage that trains save after its next step, and go on", _save_now)


def _add(commands: argparse._SubParsersAction, name: str, text: str, command: object) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name below runs/")
    parser.set_defaults(command=command)
    return parser


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    from megatron_palimpsa.commands.submit import add_job_options

    add_job_options(parser)


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer from 0, not {text}")
    return int(text)


def _status(options: argparse.Namespace) -> int:
    from palimpsa_launch.runs import found_run, read_run
    from palimpsa_launch.status import statuses, table

    from megatron_palimpsa.training.exit_codes import ExitCode

    with found_run(options.run) as run:
        found = statuses(read_run(run))
        print(table(found))
    if all(status.state == "complete" for status in found):
        return ExitCode.COMPLETE
    return ExitCode.FAILED if any(status.is_bad for status in found) else ExitCode.SAVED_AND_STOPPED


def _logs(options: argparse.Namespace) -> int:
    from palimpsa_launch.follow import choose_step, follow, log_of, tail
    from palimpsa_launch.runs import found_run, read_run

    from megatron_palimpsa.config import ConfigError

    with found_run(options.run) as run:
        if options.follow:
            follow(run, options.stage, options.rank, options.job, options.lines, _write)
            return 0
        step = choose_step(read_run(run), options.stage)
        path = log_of(step, options.rank, options.job)
        if path is None:
            raise ConfigError(f"{step.name} has logged nothing yet; see megatron-palimpsa status {options.run}")
        print(f"==> {path} <==")
        _write(tail(path, options.lines))
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _cancel(options: argparse.Namespace) -> int:
    from palimpsa_launch.control import cancel
    from palimpsa_launch.runs import found_run, read_run

    with found_run(options.run) as run:
        print("\n".join(cancel(read_run(run), at_once=options.now)))
    return 0


def _resume(options: argparse.Namespace) -> int:
    from palimpsa_launch.control import plan_rest
    from palimpsa_launch.runs import found_run, read_run

    from megatron_palimpsa.commands.submit import job_changes, submit_or_print

    with found_run(options.run) as run:
        steps = plan_rest(run, read_run(run), job_changes(options))
        return submit_or_print(steps, dry_run=options.dry_run)


def _save_now(options: argparse.Namespace) -> int:
    from palimpsa_launch.control import save_now
    from palimpsa_launch.runs import found_run, read_run

    with found_run(options.run) as run:
        step = save_now(read_run(run))
    print(f"{step.name} saves after its next step, into {step.folder / 'checkpoints'}")
    return 0
