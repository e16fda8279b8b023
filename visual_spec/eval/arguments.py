"""Arguments that commands have in common, and the reading of numbers. The standard library only."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable


def at_least(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """What argparse reads an integer of at least `minimum`, and at most `maximum`, by."""
    up_to = "" if maximum is None else f" and at most {maximum}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"{text} given; pass an integer of at least {minimum}{up_to}")
        return value

    return parse


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add `--threads`. A process starts all that it asks for, so more than the machine has use of are refused."""
    parser.add_argument(
        "--threads",
        type=at_least(1, max(64, os.cpu_count() or 1)),
        metavar="N",
        help="processor threads (default: PyTorch's choice)",
    )
