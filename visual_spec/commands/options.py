"""The parser of all commands, arguments that they have in common, and the logger. No PyTorch."""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, cast

from visual_spec.models.core.settings import Help, LawSettings, settings_of

logger = logging.getLogger("visual_spec")

DTYPES = ("float32", "bfloat16", "float16", "float64")
WEIGHTS = DTYPES[:3]  # dtypes of weights that are drawn with or written


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Says the default of every option whose words do not."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, usual = action.help or "", action.default
        said = "default" in text or usual in (None, False, argparse.SUPPRESS) or usual == []
        return text if said else f"{text} (default: %(default)s)".lstrip()


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the command or option that was probably meant, with `--quiet` and `--verbose`.

    Where the arguments are read, the logger gets its level: what a command says beside its output goes through it, to
    standard error.
    """

    _completing = False
    of_saved_models = True  # `--model` names one; else a size without weights

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=_HelpFormatter, **kwargs)
        level = self.add_mutually_exclusive_group()
        for flag, value, what in (
            ("quiet", logging.ERROR, "no progress and no warnings"),
            ("verbose", logging.DEBUG, "say more: what was loaded, what each batch cost"),
        ):
            stored: dict[str, Any] = dict(dest="log_level", action="store_const", default=argparse.SUPPRESS)
            level.add_argument(f"--{flag}", const=value, help=what, **stored)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if "_ARGCOMPLETE" in os.environ and not Parser._completing:  # a shell asks what may come next
            import argcomplete  # pyright: ignore[reportMissingImports]

            from visual_spec.pipelines.embedded import embedded_models

            for action in self._every_action():
                if action.dest == "model":
                    vars(action)["completer"] = lambda **_: embedded_models()
            Parser._completing = True  # it parses what is there of the line by this very function
            argcomplete.autocomplete(self)
        arguments = sys.argv[1:] if args is None else list(args)
        if not any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            self._refuse_unknown(arguments)
        parsed = super().parse_known_args(arguments, namespace)
        of_transformers = getattr(parsed[0], "engine", None) == "sglang"
        model = getattr(parsed[0], "model", None)
        if self.of_saved_models and isinstance(model, str) and not of_transformers:
            from visual_spec.pipelines.embedded import refuse_no_pipeline

            refuse_no_pipeline(model)  # before PyTorch is imported
        logger.setLevel(getattr(parsed[0], "log_level", logging.INFO))
        if not logger.handlers:
            logger.addHandler(_Stderr())
            logger.propagate = False
        return parsed

    def _every_action(self) -> Iterable[argparse.Action]:
        for action in self._actions:
            yield action
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._actions

    def _refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Refuse an option that does not exist before argparse misses one that is required."""
        for text in arguments:
            if text == "--":
                return
            name = text.partition("=")[0]
            if re.fullmatch(r"--[A-Za-z][\w-]*", name) and not any(
                option.startswith(name) for option in self._option_string_actions
            ):
                self.error(f"unrecognized arguments: {name}")

    def error(self, message: str) -> NoReturn:
        known = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                known += action.choices
        wrong = re.search(r"invalid choice: '([^']+)'|unrecognized arguments: (-[^\s=]+)", message)
        near = difflib.get_close_matches(wrong[1] or wrong[2], known, 1) if wrong else []
        # Without the usage, whose many lines push the reason off the screen.
        advice = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        self.exit(2, f"{self.prog}: error: {message}; {advice}\n")


class _Stderr(logging.Handler):
    """Writes messages as they are; looks for standard error anew each time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def is_quiet() -> bool:
    """Return whether the command was asked to say nothing beside its output."""
    return logger.getEffectiveLevel() > logging.WARNING


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """What `warnings.showwarning` is while a command runs."""
    logger.warning("visual-spec: warning: %s", message)


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


# Options that several commands have.
OPTIONS: dict[str, dict[str, Any]] = {
    "model": dict(default="shapes", help="embedded name, folder, or Hub id (default: shapes)"),
    "samplers": dict(
        nargs="+",
        metavar="S",
        help="name or name:setting=value,..., such as speculative-jacobi:window=32,coupling=maximal,acceptance=exact, "
        "or scale-wise:num_draft_scales=6,cache_share=0.1,refiner=FOLDER, or column-jacobi:unit=codebook,"
        "acceptance=exact; temperature, top_k, top_p, guidance_scale, seed and drafter may be set too (default: those "
        "that the list of samplers names for the model; for next-scale models all that it has)",
    ),
    "masked": dict(metavar="MODEL", help="a masked model of the same tokens, measured beside --model"),
    "negative_prompt": dict(metavar="TEXT", help="what guidance leads away from, in place of no prompt"),
    "batch_size": dict(type=int, default=50, metavar="B", help="samples at once (default: 50)"),
    "seed": dict(type=int, default=0, help="of sample 0; sample i has seed + i"),
    "device": dict(help="default: cuda where there is one, else cpu"),
    "dtype": dict(default="float32", choices=DTYPES, help="of weights and computation"),
    # A process starts all that it asks for, so more than the machine has use of are refused.
    "threads": dict(
        type=at_least(1, max(64, os.cpu_count() or 1)),
        metavar="N",
        help="processor threads (default: PyTorch's choice)",
    ),
    "rank": dict(type=int, metavar="R", help="share of this process (default: torchrun's, or 0)"),
    "shards": dict(type=int, metavar="N", help="processes (default: torchrun's, or 1)"),
    "overwrite": dict(action="store_true", help="replace files that are already there"),
    "json": dict(action="store_true", help="print a JSON document as the last line"),
}
for _name, _setting in settings_of(LawSettings.__init__).items():
    _help = cast(Help, _setting.help)
    OPTIONS[_name] = dict(type=_setting.kinds[0], metavar=_help.letter, help=_help.text)
LAW = ("temperature", "top_k", "top_p")
MACHINE = ("device", "dtype", "threads")
SHARE = ("rank", "shards")


def add(parser: argparse._ActionsContainer, *names: str, **others: dict[str, Any]) -> None:
    """Add options of `OPTIONS`, and others by what `add_argument` takes, to a parser or a group of it."""
    for name, option in ({name: OPTIONS[name] for name in names} | others).items():
        parser.add_argument(f"--{name.replace('_', '-')}", **option)


def check_taken(pipe: object, model: str, names: Iterable[str]) -> None:
    """Refuse, by ValueError, options that the pipeline does not take; `names` are of a call."""
    taken = inspect.signature(type(pipe).__call__).parameters
    for name in names:
        if name not in taken:
            raise ValueError(f"{model} takes no --{name.replace('_', '-')}; leave it out.")


def share(args: argparse.Namespace) -> dict[str, int]:
    """The `rank` of this process among `shards`: as the options say, else as torchrun does."""
    asked = {"rank": (args.rank, "RANK", 0), "shards": (args.shards, "WORLD_SIZE", 1)}
    return {
        name: _of_environment(variable, usual) if value is None else value
        for name, (value, variable, usual) in asked.items()
    }


def _of_environment(variable: str, usual: int) -> int:
    """A whole number of the environment; one that is not set, or empty as some launchers leave it, is the usual one."""
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{variable}={text!r} in the environment; unset it, or set a whole number")
    return int(text or usual)


def progress(text: str) -> None:
    """Tell how far a command is, beside its output."""
    logger.info("%s", text)


def command(
    name: str,
    text: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    *,
    of_saved_models: bool = True,
) -> Callable[..., int]:
    """The `main` of `visual-spec NAME`: parses arguments, runs, and returns the exit status.

    `of_saved_models` is whether `--model` names a saved model, and no size without weights.

    Bad input raises ValueError, OSError or ImportError, which name it, before anything is computed.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        parser = Parser(prog=f"visual-spec {name}", description=text)
        parser.of_saved_models = of_saved_models
        add_arguments(parser)
        return run(parser.parse_args(argv))

    return main
