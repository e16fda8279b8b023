"""Tables of methods for a paper: what results hold, interval for interval, and what is missing."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.helpers.tiny import tiny_pipeline
from visual_spec import cli

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "things-quality.json"
CAPTIONS = "a fox left of a pizza on a mint background\na castle on a sky background\n"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for kind in ("tex", "md", "csv"):
        more = ["--chart", str(folder / "chart.pdf")] if kind == "tex" else []
        page, table = str(folder / "page.html"), str(folder / f"table.{kind}")
        assert cli.main(["report", str(RESULTS), "--out", page, "--overwrite", "--table", table, *more]) == 0
    return folder


def test_each_form_has_the_figures_of_the_results(tables):
    document = json.loads(RESULTS.read_text())
    lines = (tables / "table.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["sampler"] for row in rows[:-1]] == [row["name"] for row in document["rows"]]
    for row, truth in zip(rows, document["rows"], strict=False):
        figure = truth["accuracy"]["mean_attribute"]
        for end, name in (("", "value"), (" low", "low"), (" high", "high")):
            assert float(row[f"attributes %{end}"]) == pytest.approx(100 * figure[name], abs=0.051)
        assert (row["divergence"] == "") == (truth["divergence"] is None)
    written = (tables / "table.tex").read_text()
    plain = document["rows"][0]["accuracy"]["mean_attribute"]
    value, low, high = (f"{100 * plain[name]:.1f}" for name in ("value", "low", "high"))
    assert (
        written.count(r" \\\\".replace("\\\\", "\\")) >= len(rows) and f"{value} ({low}--{high})" in written
    )
    assert f"{value} ({low}-{high})" in (tables / "table.md").read_text() and r"attributes \%" in written
    assert (tables / "chart.pdf").read_bytes()[:5] == b"%PDF-"


def test_each_form_says_where_it_comes_from(tables):
    for kind in ("tex", "md", "csv"):
        text = (tables / f"table.{kind}").read_text()
        for told in (
            "AMD EPYC",
            "torch 2.11",
            "visual_spec 0.2",
            "2026-11-28",
            "seeds from 0",
            "temperature 0.5",
        ):
            assert told in text, (kind, told)
        assert "visual-spec eval --model things --samples 100 --batch-size 25 --seed 0" in text


def test_of_sets_what_is_missing_is_said_with_the_command(tmp_path, capsys):
    tiny_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red circle\na blue star\n")
    for name, more in (("plain", ()), ("fast", ("--sampler", "speculative-jacobi"))):
        asked = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), *more]
        assert cli.main(["sample", *asked, "--out", str(tmp_path / name)]) == 0
    plain, fast, page = (str(tmp_path / name) for name in ("plain", "fast", "page.html"))
    assert cli.main(["score", fast, "--compare-to", plain, "--metrics", "ssim"]) == 0  # needs no true samples
    table = tmp_path / "table.md"
    assert cli.main(["report", plain, fast, "--out", page, "--table", str(table)]) == 0
    assert f"plain has no scores of ssim: visual-spec score {plain}" in capsys.readouterr().out
    (row,) = (line.split("|") for line in table.read_text().splitlines() if re.match(r"\| +fast ", line))
    assert row[2].strip() == "speculative-jacobi" and row[5].strip() == "1.000 (1.000-1.000)"
    chart = str(tmp_path / "chart.svg")
    assert cli.main(["report", plain, fast, "--out", page, "--overwrite", "--chart", chart]) == 2
    assert "needs a distance" in capsys.readouterr().err
    assert cli.main(["report", plain, fast, "--out", page, "--overwrite", "--table", "x.txt"]) == 2


def test_captions_that_the_parser_does_not_know_are_a_row(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text(CAPTIONS + "a cat on a fence\n")
    asked = ["--model", "things", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "set")]
    asked += ["--sampler", "speculative-jacobi:window=16"]
    assert cli.main(["sample", *asked]) == 0
    assert cli.main(["score", str(tmp_path / "set"), "--metrics", "parser", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert (figures["prompts_unread"]["hits"], figures["prompts_unread"]["total"]) == (1, 3)
    assert figures["all_correct"]["total"] == 2
