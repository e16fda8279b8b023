"""The command line, run in this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from visual_spec import cli


def generate(model: str, out: Path, *arguments: str) -> int:
    return cli.main(["generate", *arguments, "--model", model, "--out", str(out), "--device", "cpu"])


def convert(out: Path, *arguments: Path | str) -> int:
    return cli.main(["convert", *map(str, arguments), "--out", str(out), "--json"])


def last_line(capsys: pytest.CaptureFixture) -> Any:
    """The document that `--json` prints."""
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def pixels(path: str | Path) -> np.ndarray:
    return np.asarray(PIL.Image.open(path))


def check_refused(status: int, message: str, capsys: pytest.CaptureFixture, *unwritten: Path) -> None:
    """Status 2, one line that says why, and no files."""
    error = capsys.readouterr().err.strip()
    assert status == 2 and error.startswith("visual-spec: error: ") and message in error and "\n" not in error
    assert not [path for path in unwritten if path.is_file() or path.is_dir() and any(path.iterdir())]
