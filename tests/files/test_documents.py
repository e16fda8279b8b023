"""What is written as JSON has no Infinity and no NaN, and is read back as it was."""

import ast
import json
import math
from pathlib import Path

import pytest

from tests.helpers.refusals import refuses
from visual_spec.files.documents import json_text, write_json
from visual_spec.files.reading import parse, read_object

ROOT = Path(__file__).parents[2]
FIGURE = {"value": 7.0, "low": -math.inf, "high": math.inf, "samples": 1}


def refused(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_numbers_that_are_not_finite_are_null_with_their_text_and_come_back(tmp_path):
    document = {"figures": {"clip_score": FIGURE}, "curve": [1.5, math.inf], "none": None, "nan": math.nan}
    write_json(tmp_path / "scores.json", document)
    text = (tmp_path / "scores.json").read_text()
    strict = json.loads(text, parse_constant=refused)
    told = {"value": 7.0, "low": None, "high": None, "samples": 1}
    assert strict["figures"] == {"clip_score": told | {"not_finite": {"low": "-inf", "high": "inf"}}}
    assert strict["curve"] == [1.5, None] and strict["none"] is strict["nan"] is None
    read = read_object(tmp_path / "scores.json")
    assert math.isnan(read.pop("nan"))
    assert read == {"figures": {"clip_score": FIGURE}, "curve": [1.5, None], "none": None}


def test_files_of_before_are_read(tmp_path):
    (tmp_path / "scores.json").write_text(json.dumps({"clip_score": FIGURE}))
    assert "Infinity" in (tmp_path / "scores.json").read_text()
    assert read_object(tmp_path / "scores.json") == {"clip_score": FIGURE}


@pytest.mark.parametrize("texts", [{"low": "x"}, {"low": None}, {"low": {}}])
def test_a_text_that_is_no_number_is_named_as_damage(texts):
    refuses(ValueError, "a file is no JSON", parse, json.dumps({"low": None, "not_finite": texts}), "a file")


def test_finite_documents_are_as_of_json():
    document = {"b": [1, 2.5, "é", None, True], "a": {"c": (1, 2)}}
    assert json_text(document, indent=1) == json.dumps(document, indent=1)


@pytest.mark.parametrize("folder", ["visual_spec", "scripts", "benchmarks"])
def test_nothing_writes_json_that_other_readers_refuse(folder):
    """By `json_text`; programs that run without this package say `allow_nan=False`."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump"):
                assert "allow_nan=False" in ast.unparse(node), f"{path}, line {node.lineno}"
