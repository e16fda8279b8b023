"""What every command says of itself, and how soon: without PyTorch, for `--help` and for a model that is not there."""

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from visual_spec.commands.main import _OWN_ARGUMENTS, build_parser, main
from visual_spec.commands.options import Parser

COMMANDS = ("generate", "convert", "models", *_OWN_ARGUMENTS)


class Grabbed(Exception):
    """In place of parsing."""


@pytest.fixture(params=COMMANDS)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of a command."""
    if request.param not in _OWN_ARGUMENTS:
        [commands] = [one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)]
        return commands.choices[request.param]
    found = []

    def grab(self: Parser, *_: object) -> None:
        found.append(self)
        raise Grabbed

    monkeypatch.setattr(Parser, "parse_args", grab)
    with pytest.raises(Grabbed):
        importlib.import_module(f"visual_spec.commands.{request.param}").main([])
    return found[0]


def test_a_command_describes_itself_by_examples_and_words(parser: argparse.ArgumentParser) -> None:
    assert parser.description is not None and parser.description.count("\n    visual-spec ") >= 2
    for example in parser.description.splitlines():
        assert len(example) <= 120
    shown = " ".join(parser.format_help().split())
    for action in parser._actions:
        assert action.help, action.option_strings or action.dest
        usual = action.default
        if (
            action.help != argparse.SUPPRESS
            and action.option_strings
            and usual not in (None, False, "==SUPPRESS==")
        ):
            assert usual == [] or "default" in action.help or f"(default: {usual})" in shown, (
                action.option_strings
            )


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)


def test_help_needs_no_library() -> None:
    code = """
import sys
from visual_spec.commands.main import main
for command in sys.argv[1:]:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0
heavy = {"torch", "numpy", "diffusers", "transformers", "PIL", "gradio"} & set(sys.modules)
assert not heavy, heavy
"""
    ran = run(code, *COMMANDS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("usage: visual-spec ") == len(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate x --model shapez", "unknown model 'shapez'; embedded models are .*Did you mean shapes"),
        ("generate x --model=", "empty model name"),
        ("eval --out o --model ./nothing", "there is no folder ./nothing"),
        ("bench --model /no/where", "there is no folder /no/where"),
        ("sample --prompts p --out o --model shapez", "Did you mean shapes"),
        ("serve shapez", "Did you mean shapes"),
        ("app --model tune", "Did you mean tunes"),
        ("models shpaes", "Did you mean shapes"),
        ("models speculative-jacobbi", "Did you mean speculative-jacobi"),
        ("score /no/where", "no folder of samples and no .npz file at /no/where"),
        ("score . --compare-to /no/where", "no folder of samples and no .npz file at /no/where"),
    ],
)
def test_a_model_that_is_not_there_is_refused_before_any_library_is_imported(arguments, message) -> None:
    code = "import sys; sys.modules['torch'] = None; from visual_spec.cli import main; sys.exit(main(sys.argv[1:]))"
    ran = run(code, *arguments.split())
    assert ran.returncode == 2 and re.search(message, ran.stderr), ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_folder_of_transformers_is_told_of_accelerate(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["JanusForConditionalGeneration"]}')
    assert main(["generate", "a cat", "--model", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "transformers.JanusForConditionalGeneration.from_pretrained" in told
    assert "visual_spec.accelerate(model)" in told


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("visual-spec be", "bench"),
        ("visual-spec bench --wind", "--windows"),
        ("visual-spec generate x --model shapes_v", "shapes_var"),
        ("visual-spec serve shapes --engine ", "vllm ray sglang"),
    ],
)
def test_the_shell_completes(line: str, wanted: str, tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    asked = dict(
        COMP_LINE=line, COMP_POINT=str(len(line)), COMP_TYPE="9", _ARGCOMPLETE="1", _ARGCOMPLETE_IFS=" "
    )
    out = tmp_path / "out"
    more = {"_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    run("from visual_spec.cli import main; main()", **asked, **more)
    assert out.read_text() == wanted
