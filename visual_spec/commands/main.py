"""The command line: visual-spec generate | convert | models | bench | eval | sample | score | report | app | serve.

Only the standard library is imported before the arguments are known to be good, so that `--help`, a misspelt flag, or
a file in the way are answered at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence

import visual_spec
from visual_spec.commands.convert import add_convert
from visual_spec.commands.generate import add_generate
from visual_spec.commands.models import add_models
from visual_spec.commands.options import Parser, show_warning
from visual_spec.files.program import run_program

_OWN_ARGUMENTS = {
    "bench": "measure calls and seconds",
    "eval": "what samplers gain, and what it costs in quality",
    "sample": "draw a set of samples as files, on any number of processes",
    "score": "FID, KID, IS, precision, recall, CLIP, FVD of such a set",
    "report": "a page of the results of eval, or of sampled sets",
    "app": "a page on this machine: plain and accelerated decoding side by side",
    "serve": "pictures over HTTP, by vLLM or Ray Serve",
}
# The commands that decode batches, and what to pass when there is no memory for one.
_BATCHES: dict[str, str] = dict.fromkeys(("generate", "eval", "sample", "score"), "a smaller --batch-size")
_BATCHES["bench"] = "smaller --batch-sizes"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="visual-spec", description="Fast and exact token-by-token generation.")
    parser.add_argument("--version", action="version", version=f"visual-spec {visual_spec.__version__}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="generate | convert | models | bench | eval | sample | score | report | app | serve",
    )
    add_generate(commands)
    add_convert(commands)
    add_models(commands)
    for name, what in _OWN_ARGUMENTS.items():  # they read their own arguments: see `main`
        commands.add_parser(name, help=f"{what}; see visual-spec {name} --help", add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    As of `run_program`; 1: a claim of equality failed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((text for text in arguments if not text.startswith("-")), "")
    remedy = _BATCHES.get(command, "a smaller model, or take a machine with more memory")
    # At import diffusers says that it does not know a newer torchao's tensors; nothing here reads them through it.
    logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        return run_program(lambda: _run(arguments), "visual-spec", remedy)


def _run(arguments: list[str]) -> int:
    early = next((at for at, text in enumerate(arguments) if text not in ("--quiet", "--verbose")), 0)
    arguments = arguments[early : early + 1] + arguments[:early] + arguments[early + 1 :]
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next; the line is in its environment
        arguments = os.environ["COMP_LINE"].split()[1:2]
        if arguments and arguments[0] in _OWN_ARGUMENTS:
            os.environ["_ARGCOMPLETE"] = "2"  # words before the options of the command
    if arguments and arguments[0] in _OWN_ARGUMENTS:
        module = importlib.import_module(f"visual_spec.commands.{arguments[0]}")
        return module.main(arguments[1:]) or 0
    args = build_parser().parse_args(arguments)
    return args.run(args)
