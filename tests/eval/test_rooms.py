"""The rooms of the evaluation: who may import whom, and that what was written before can still be read."""

import json
from pathlib import Path

import pytest

from tests.helpers.package_imports import PACKAGE, ROOT, imported_modules
from visual_spec.commands import report as report_command
from visual_spec.eval import words
from visual_spec.eval.quality.figures import quality_table
from visual_spec.pipelines.loading import read_facts

# `quality` and `speed` know nothing of each other: what both need lies in the files of `eval` itself.
ROOMS = {"report": set(), "quality": {"report"}, "speed": set()}
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_those_below(room):
    others = {f"visual_spec.eval.{name}" for name in set(ROOMS) - ROOMS[room] - {room}}
    for path in sorted((PACKAGE / "eval" / room).glob("*.py")):
        strangers = {name for name in imported_modules(path) if ".".join(name.split(".")[:3]) in others}
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_what_the_rooms_share_imports_none_of_them():
    for path in sorted((PACKAGE / "eval").glob("[a-z]*.py")):
        names = {
            name for name in imported_modules(path) if name.split(".")[2:3] and name.split(".")[2] in ROOMS
        }
        assert not names, f"{path.relative_to(ROOT)} imports {names}"


@pytest.mark.parametrize(
    ("name", "unit"),
    [("shapes-quality", "token"), ("shapes-var-quality", "scale"), ("tunes-quality", "column")],
)
def test_committed_results_are_still_read(name, unit, tmp_path):
    """They were written before documents held their unit."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
    assert words.words_of(document).unit == unit
    assert words.words_of({"unit": f"{unit}s", "medium": "image"}).unit == unit
    extractor = next(iter(document["rows"][0]["features"]))
    assert len(quality_table(document, extractor).splitlines()) == 3 + len(document["rows"])
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert report_command.main([str(RESULTS / f"{name}.json"), "--out", str(page)]) == 0
    text = page.read_text()
    assert all(Path(row["name"]).name.split(":")[0] in text for row in document["rows"])


@pytest.mark.parametrize(
    ("name", "samples", "truth"),
    [
        ("shapes", "pictures", "scenes"),
        ("shapes_var", "pictures", "scenes"),
        ("motion", "clips", "clips"),
        ("motion_masked", "clips", "clips"),
        ("tunes", "clips", "clips"),
    ],
)
def test_words_are_of_the_medium_and_not_of_the_unit(name, samples, truth):
    facts = read_facts(name)
    found = words.words_of({"medium": facts.medium, "unit": facts.unit})
    assert (found.samples, found.truth) == (samples, truth)
    assert found.unit + "s" == facts.unit
