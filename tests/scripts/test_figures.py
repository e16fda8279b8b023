"""The tables of README and docs/results are those of the stored results (`benchmarks/figures.py`)."""

import json

import pytest

from benchmarks import figures


def test_pages_hold_the_tables_of_the_stored_results():
    measured = json.loads((figures.RESULTS / "measured.json").read_text())
    places = [place[2] for page in figures.PAGES for place in figures.MARKED.finditer(page.read_text())]
    assert {*places} == {*measured, "headline", "methods"}
    assert all(measured[name]["command"] == figures.FIGURES[name].command for name in measured)
    weights = {name: figures.weights_of(figures.FIGURES[name]) for name in measured}
    for page, text in figures.pages(measured, weights).items():
        assert page.read_text() == text, "run python benchmarks/figures.py --tables"


def test_a_table_gives_the_figures_of_a_document():
    row = {"tokens per call": 5.651, "interval": [5.4, 5.9], "most calls": 94, "equal pictures": 200}
    text = figures.calls_table({"prompts": 200, "rows": {"repaired, window 32": row}})
    assert text.splitlines()[2] == "| 32 | repaired | 5.65 (5.40-5.90) | 94 | 200 of 200 |"


@pytest.mark.parametrize(("weights", "earlier"), [("new", False), ("old", True)])
def test_a_result_of_earlier_weights_says_so(tmp_path, monkeypatch, weights, earlier):
    page = tmp_path / "page.md"
    monkeypatch.setattr(figures, "methods_table", str)
    page.write_text("Before.\n<!-- figure: things-demo -->\nold table\n<!-- end -->\nAfter.\n")
    (tmp_path / "things-demo.json").write_text('{"comparison": []}')
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "PAGES", (page,))
    entry = {"weights": {"things": weights}, "machine": "a processor", "threads": 2, "load": 0.1}
    text = figures.pages({"things-demo": entry}, {"things-demo": {"things": "new"}})[page]
    assert text.startswith("Before.\n<!-- figure: things-demo -->") and text.endswith(
        "<!-- end -->\nAfter.\n"
    )
    assert "old table" not in text and "a processor, 2 threads" in text
    assert ("earlier weights" in text) == earlier
