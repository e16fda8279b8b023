"""What commands say of themselves: each example is taken, each setting has words."""

import contextlib
import re
import shlex

import pytest

from visual_spec import cli
from visual_spec.commands.options import Parser
from visual_spec.samplers.registry import names

COMMANDS = "generate convert models bench eval sample score report app serve".split()


@pytest.mark.parametrize("command", COMMANDS)
def test_each_example_of_help_is_taken(command, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    help_text = capsys.readouterr().out
    lines = re.findall(rf"^    visual-spec ({command}\b.*?)(?:  .*)?$", help_text, re.MULTILINE)
    assert stop.value.code == 0 and len(lines) >= 2
    read, taken = Parser.parse_args, False

    def parsed(self, *args, **kwargs):
        nonlocal taken
        read(self, *args, **kwargs)
        taken = True
        raise SystemExit

    monkeypatch.setattr(Parser, "parse_args", parsed)
    for line in lines:
        taken = False
        with contextlib.suppress(SystemExit):
            cli.main(shlex.split(line.replace("DIR", "things")))
        assert taken, line


@pytest.mark.parametrize("name", names())
def test_each_setting_of_a_sampler_has_words(name, capsys):
    assert cli.main(["models", name]) == 0
    for setting in re.split(r"\n(?! )", capsys.readouterr().out.strip()):
        limits, _, words = " ".join(setting.split()).partition(").")
        assert words or " has no settings" in limits, setting


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("genrate x", "generate"),
        ("generate x --negtive-prompt y", "--negative-prompt"),
        ("generate x --smapler zipar", "--sampler"),
        ("generate x --tempreature=1", "--temperature"),
        ("generate x --nothing-like-it", ""),
        ("convert x --out y --image-sice 3", "--image-size"),
        ("sample --promts x", "--prompts"),
        ("eval --samplrs x", "--samplers"),
        ("--quiet bench --modle shapes", "--model"),
        ("score --featurs x", "--features"),
        ("serve shapes --windw=3", "--window"),
    ],
)
def test_a_misspelt_option_is_answered_before_one_that_is_missing(arguments, meant, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.endswith(f"did you mean {meant}?\n") if meant else "did you mean" not in said
