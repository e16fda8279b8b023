"""What becomes of a malformed input: refused in one line, accepted rightly, or not as it should."""

import contextlib
import io
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visual_spec import cli

REFUSED, ACCEPTED = "refused", "accepted"
ESCAPED, WRONG, SLOW = "escaped", "accepted wrongly", "too slow"
SECONDS = 30  # of the processor, for one input


class TooSlow(BaseException):
    """An input took more than `SECONDS`; no handler of ordinary errors catches it."""


@dataclass(frozen=True)
class Case:
    """One malformed input.

    Attributes:
        kind: the kind it is counted under.
        name: what is malformed about it.
        prepare: makes the files in an empty folder; returns the command line, or a function to call in its place.
        right: given that folder, whether accepting it was right; what it returns is shown if it was not.
    """

    kind: str
    name: str
    prepare: Callable[[Path], list[str] | Callable[[], Any]]
    right: Callable[[Path], bool | str]


@dataclass(frozen=True)
class Outcome:
    """What became of a case, and what was said."""

    case: Case
    what: str
    said: str


def attempt(case: Case, folder: Path) -> Outcome:
    """Run a case in this process, as the command line does."""
    folder.mkdir(parents=True)
    command = case.prepare(folder)
    output, errors = io.StringIO(), io.StringIO()
    try:
        with _limited(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = _call(command)
    except TooSlow:
        return Outcome(case, SLOW, f"more than {SECONDS} s")
    except BaseException:  # whatever escapes is what is looked for
        return Outcome(case, ESCAPED, traceback.format_exc())
    said = errors.getvalue()
    lines = [
        line for line in said.splitlines() if re.match(r"(visual-spec[^:]*: )?error: |.*: error: ", line)
    ]
    if "Traceback" in said or status not in (0, 2):
        return Outcome(case, ESCAPED, f"exit {status}: {said}")
    if status == 2:
        rest = [line for line in said.splitlines() if line not in lines and not _is_noise(line)]
        fine = len(lines) == 1 and not rest and len(lines[0]) < 2000
        return Outcome(case, REFUSED if fine else ESCAPED, said)
    verdict = case.right(folder)
    return Outcome(
        case, ACCEPTED if verdict is True else WRONG, said if verdict is True else f"{verdict} {said}"
    )


def _call(command: list[str] | Callable[[], Any]) -> int:
    """The exit status of a command; of a function 2 if it refuses by ValueError or OSError, which it prints."""
    if callable(command):
        try:
            command()
        except (ValueError, OSError) as error:
            import sys

            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    with warnings.catch_warnings(), torch.random.fork_rng():
        try:
            return cli.main(command)
        except SystemExit as ended:  # of argparse
            return ended.code if isinstance(ended.code, int) else 1


def _is_noise(line: str) -> bool:
    """Usage lines of argparse, our warnings, and progress bars."""
    return not line.strip() or line.startswith(("usage:", " ", "visual-spec: warning:")) or "%|" in line


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TooSlow

    before = [signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)  # what waits for a pipe takes no time of the processor
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, former in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, former)
