"""How a program ends: by its status, and by one line where there is something that the user can mend."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable

# Errors of torch that are no class of their own.
_NO_MEMORY = re.compile(
    "OutOfMemory|(can't|cannot) allocate memory|not enough memory|out of memory|ALLOC_FAILED", re.I
)


def run_program(program: Callable[[], int | None], name: str, remedy: str) -> int:
    """Run a program; returns its exit status.

    0: done. 2: bad input, or no memory. 130: interrupted. 141: what reads the output has gone.

    Args:
        name: that its messages begin with.
        remedy: what to pass where memory runs out.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a console cannot show does not end a program
            stream.reconfigure(errors="backslashreplace")
    try:
        status = program()
        sys.stdout.flush()  # here, where a closed pipe can be caught
        return status or 0
    except BrokenPipeError:
        return _ended(141)
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            # A second one ends the process at once, without a trace.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return _ended(130, f"\n{name}: interrupted; files that were finished are kept")
    except Exception as error:
        said = " ".join(str(error).split())  # one line, whatever a library wrote into its message
        if is_of_memory(error):
            said = f"out of memory ({said[:200]}); pass {remedy}"
        elif not isinstance(error, ValueError | OSError | ImportError | FloatingPointError):
            raise
        return _ended(2, "; ".join([f"{name}: error: {said}", *getattr(error, "__notes__", [])]))


def is_of_memory(error: BaseException | None) -> bool:
    """Whether there was no memory, on a device or the host, or whether that is what another error was made of."""
    if error is None:
        return False
    told = isinstance(error, RuntimeError) and _NO_MEMORY.search(f"{type(error).__name__} {error}")
    no_pages = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or bool(told) or no_pages or is_of_memory(error.__cause__)


def _ended(status: int, message: str = "") -> int:
    """Say why a program ends, as far as its outputs take it, and return its status."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, message)):
        try:
            print(text, end="\n" if text else "", file=stream, flush=True)
        except OSError:  # a closed pipe, a full disk: the interpreter flushes once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def _open_closed_streams() -> None:
    """Let what is printed go nowhere where the shell has closed an output (`>&-`).

    Python has None in its place. The null device takes the number of the closed output, which the next file that is
    written would take otherwise.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
