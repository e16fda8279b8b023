"""Records of JSON have the entries that their table states, or are refused by file, line and entry."""

import json
import math

import pytest

from tests.helpers.refusals import refuses
from visual_spec.files.reading import (
    COUNT,
    FLAG,
    FLOAT,
    LIST,
    NULL,
    NUMBER,
    OBJECT,
    POSITIVE,
    SECONDS,
    TEXT,
    parse,
    read_object,
    read_objects,
)

VALUES = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2**64,
    10**400,
    0.5,
    1e308,
    math.nan,
    math.inf,
    "",
    "x",
    [],
    [1],
    {},
    {"a": 1},
]


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        (NULL, [None]),
        (TEXT, ["", "x"]),
        (FLAG, [True, False]),
        (COUNT, [0, 1]),
        (POSITIVE, [1]),
        (FLOAT, [-1, 0, 1, 0.5, 1e308, math.nan, math.inf]),
        (NUMBER, [-1, 0, 1, 0.5, 1e308]),
        (SECONDS, [0, 1, 0.5]),
        (OBJECT, [{}, {"a": 1}]),
        (LIST, [[], [1]]),
        (TEXT | NULL, [None, "", "x"]),
    ],
)
def test_kinds_take_what_they_say(kind, right):
    assert [repr(value) for value in VALUES if kind.fits(value)] == [repr(value) for value in right]


def test_entries_are_named_with_their_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": "x"}\n')
    refuses(ValueError, r"lines\.jsonl.*2.*a='x'", read_objects, path, {"a": COUNT})
    refuses(ValueError, "line 1.*no b", read_objects, path, {"b": COUNT})
    assert read_objects(path, {}, {"b": COUNT}) == [{"a": 1}, {"a": "x"}]
    path.write_text("[1]\n")
    refuses(ValueError, "1.*list", read_objects, path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" * 65 + "]" * 65, "", "{", "nul", "\x00"]
)
def test_nested_and_broken_texts_are_refused(tmp_path, text):
    refuses(ValueError, "here", parse, text, "here")
    (tmp_path / "a.json").write_text(text)
    refuses(ValueError, "a.json", read_object, tmp_path / "a.json")


def test_whole_texts_are_read(tmp_path):
    value = {"a": [1, {"b": None}], "c": "é"}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_object(tmp_path / "a.json", {"a": LIST}) == value
    assert parse("[" * 64 + "]" * 64, "here") is not None
