"""Arguments that commands have in common, and the reading of numbers. The standard library only."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

DTYPES = ("float32", "bfloat16", "float16", "float64")


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


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `--model`."""
    parser.add_argument(
        "--model", default="shapes", help="embedded name, folder, or Hub id (default: shapes)"
    )


def add_machine(parser: argparse.ArgumentParser, *, dtype: bool = True) -> None:
    """Add `--device`, `--dtype` unless it is not wanted, and `--threads`."""
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    if dtype:
        parser.add_argument("--dtype", default="float32", choices=DTYPES)
    add_threads(parser)


def add_share(parser: argparse.ArgumentParser) -> None:
    """Add `--rank` and `--shards`, see `share`."""
    parser.add_argument(
        "--rank", type=int, metavar="R", help="share of this process (default: torchrun's, or 0)"
    )
    parser.add_argument("--shards", type=int, metavar="N", help="processes (default: torchrun's, or 1)")


def share(args: argparse.Namespace) -> dict[str, int]:
    """The `rank` of this process among `shards`: as the options say, else as torchrun does."""
    asked = {"rank": (args.rank, "RANK", 0), "shards": (args.shards, "WORLD_SIZE", 1)}
    return {
        name: int(os.environ.get(variable, usual)) if value is None else value
        for name, (value, variable, usual) in asked.items()
    }


def add_law(parser: argparse.ArgumentParser) -> None:
    """Add the law's filters."""
    parser.add_argument("--temperature", type=float, metavar="T", help="0: greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="0: off")
    parser.add_argument("--top-p", type=float, metavar="P", help="1: off")


def progress(text: str) -> None:
    """Tell how far a command is, beside its output."""
    print(text, file=sys.stderr, flush=True)
