"""The page and the charts of an evaluation: rows are drawn where their figures say, and the page stands alone."""

import copy
import json
import re
from typing import Any

import pytest
from PIL import Image

from tests.helpers.refusals import refuses
from visual_spec.commands import report as report_command
from visual_spec.eval.report import frontier

matplotlib = pytest.importorskip("matplotlib")


def figure(value, reach=0.1):
    return {"value": value, "low": value - reach, "high": value + reach}


def quantiles(value):
    return {"p20": 0.9 * value, "p50": value, "p80": 1.2 * value}


def row(name, kind, speed, clock, accuracy, distance):
    return {
        "name": name,
        "kind": kind,
        "samples": 20,
        "tokens_per_call": figure(speed),
        "speed_up_calls": figure(speed),
        "accuracy": {"mean_attribute": figure(accuracy, 0.02), "all_correct": figure(accuracy / 2, 0.02)},
        "features": {
            "shapes": {
                "frechet_to_real": figure(distance),
                "frechet_to_plain": figure(1.0),
                "precision": figure(0.9),
                "recall": figure(0.8),
            }
        },
        "divergence": figure(0.0123, 0.001) if kind == "lossy" else None,
        "identical_samples": 19 if name == "jacobi" else None,
        "wall_clock": {
            "batch_size": 50,
            "seconds_per_picture": quantiles(1.0),
            "speed_up": quantiles(clock / 2),
            "alone_seconds": quantiles(1.0),
            "alone_speed_up": quantiles(clock),
        },
        "processor_time": None,
    }


@pytest.fixture
def document():
    rows = [
        row("autoregressive", "plain", 1.0, 1.0, 0.8, 4.0),
        row("autoregressive:temperature=0.9", "control", 1.0, 1.0, 0.84, 3.0),
        row("jacobi", "lossless", 3.0, 2.0, 0.8, 4.0),
        row("<grouped>", "lossy", 5.0, 2.5, 0.6, 10.0),
    ]
    reference = {key: rows[0][key] for key in ("accuracy", "features")}
    settings = {"model": "shapes", "samples": 20, "batch_size": 50, "law": {"guidance_scale": 3.0}, "seed": 0}
    environment = {"device": "cpu", "device_name": "a processor"}
    return {
        "kind": "quality",
        "settings": settings,
        "environment": environment,
        "rows": rows,
        "references": {"tokenizer": reference},
    }


def written(tmp_path, document, name="results.json"):
    path = tmp_path / name
    path.write_text(json.dumps(document))
    return path


def test_points_lie_where_the_figures_say(document):
    drawn: Any = frontier.draw_frontier(document)
    calls_accuracy, clock_accuracy, calls_distance, clock_distance = drawn.axes[:4]
    expected = {
        calls_accuracy: [(1, 1), (1, 1.05), (3, 1), (5, 0.75)],
        clock_accuracy: [(1, 1), (1, 1.05), (2, 1), (2.5, 0.75)],
        calls_distance: [(1, 1), (1, 0.75), (3, 1), (5, 2.5)],
        clock_distance: [(1, 1), (1, 0.75), (2, 1), (2.5, 2.5)],
    }
    for panel, points in expected.items():
        found = [(float(bars[0].get_xdata()[0]), float(bars[0].get_ydata()[0])) for bars in panel.containers]
        assert found == [pytest.approx(point) for point in points]
        shapes = [bars[0].get_marker() for bars in panel.containers]
        assert shapes == ["*", "s", "o", "^"]  # told apart without colour
        assert [text.get_text() for text in panel.texts] == ["0", "1", "2", "3"]
    # Better is up in every panel: the axis of the distance is turned.
    assert not calls_accuracy.yaxis_inverted() and calls_distance.yaxis_inverted()
    bar = calls_accuracy.containers[3].lines[2][0].get_segments()[0]
    assert bar[:, 0].tolist() == pytest.approx([4.9, 5.1])
    bar = clock_distance.containers[3].lines[2][1].get_segments()[0]
    assert sorted(bar[:, 1].tolist()) == pytest.approx([9.9 / 4, 10.1 / 4])


def test_a_row_far_away_does_not_push_the_others_together(document):
    assert {panel.get_xscale() for panel in frontier.draw_frontier(document).axes[:4]} == {"linear"}
    document["rows"].append(row("multiscale", "lossy", 29.0, 1.9, 0.7, 9.0))
    drawn = frontier.draw_frontier(document)
    drawn.draw_without_rendering()
    assert [panel.get_xscale() for panel in drawn.axes[:4]] == ["log", "linear", "log", "linear"]
    across = (
        drawn.axes[0]
        .transAxes.inverted()
        .transform(drawn.axes[0].transData.transform([(1, 1), (3, 1), (29, 1)]))
    )
    assert across[1, 0] - across[0, 0] > 0.2 and 0 < across[0, 0] < across[2, 0] < 1
    assert {"1", "2", "4", "8"} <= {text.get_text() for text in drawn.axes[0].get_xticklabels()}


def test_numbers_do_not_cover_points_or_each_other(document):
    for place in range(8):
        document["rows"].append(row(f"close {place}", "lossless", 3.0 + 0.15 * place, 2.0, 0.8, 4.0))
    drawn = frontier.draw_frontier(document)
    drawn.draw_without_rendering()
    panel = drawn.axes[0]
    boxes = [text.get_window_extent() for text in panel.texts]
    assert len(boxes) == 12
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_without_times_at_batch_1_those_of_the_batch_are_drawn(document):
    for one in document["rows"]:
        one["wall_clock"]["alone_speed_up"] = None
    panel = frontier.draw_frontier(document).axes[1]
    assert "batch 50" in panel.get_xlabel()
    assert [float(bars[0].get_xdata()[0]) for bars in panel.containers] == [0.5, 0.5, 1.0, 1.25]


def test_on_a_processor_its_own_seconds_are_drawn(document):
    for one in document["rows"]:
        one["processor_time"] = {**one["wall_clock"], "alone_speed_up": quantiles(7.0)}
    panel = frontier.draw_frontier(document).axes[1]
    assert "processor time, batch 1" in panel.get_xlabel()
    assert [float(bars[0].get_xdata()[0]) for bars in panel.containers] == [7.0] * 4


def test_the_page_stands_alone(document, tmp_path, capsys):
    Image.new("RGB", (4, 4)).save(tmp_path / "pictures.png")
    for one in document["rows"]:
        one["processor_time"] = {**one["wall_clock"], "alone_speed_up": quantiles(6.54)}
    out = tmp_path / "report.html"
    arguments = [str(written(tmp_path, document)), "--out", str(out), "--title", "A & B"]
    assert report_command.main([*arguments, "--chart", str(tmp_path / "chart.svg")]) == 0
    page = out.read_text()
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
    (sheet,) = (link for link in links if not link.startswith("#"))
    assert sheet.startswith("data:image/png")
    assert "<script" not in page and "&lt;grouped&gt;" in page and "<h1>A &amp; B</h1>" in page
    words = "0.0123|19 of 20|a processor|true scenes through the tokenizer|>lossy<|80.0 %|6.54x"
    for text in words.split("|"):
        assert text in page
    again = ["--out", str(tmp_path / "again.html"), "--title", "A & B"]
    capsys.readouterr()
    assert report_command.main([arguments[0], *again]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'again.html'}\n"
    assert report_command.main([arguments[0], *again, "--overwrite", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["page"] == str(tmp_path / "again.html") and said["chart"] is None
    assert (tmp_path / "again.html").read_text() == page  # to the last byte
    assert (tmp_path / "chart.svg").read_text().startswith("<?xml")
    refuses(FileExistsError, "--overwrite", report_command.main, arguments)


def test_charts_are_in_the_page_with_the_colours_of_the_page(document, tmp_path):
    other = copy.deepcopy(document)
    other["settings"]["seed"] = 1
    paths = [str(written(tmp_path, one, f"{index}.json")) for index, one in enumerate((document, other))]
    assert report_command.main([*paths, "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 2
    for chart in charts:
        assert set(re.findall(r"#[0-9a-f]{6}\b", chart)) == set()  # nothing is of one colour, light and dark
        used = set(re.findall(r"var\((--[a-z]+)\)", chart))
        assert {"--ink", "--muted", "--good", "--lossy", "--card", "--axis", "--band"} == used
        assert all(page.count(f"{name}:") >= 2 for name in used)  # light and dark
        root = chart[: chart.index(">")]
        assert "viewBox" in root and not re.search(r"\s(width|height)=", root)
        named = set(re.findall(r' id="([^"]*)"', chart))
        assert (
            set(re.findall(r'href="#([^"]*)"', chart)) | set(re.findall(r"url\(#([^)]*)\)", chart)) <= named
        )
    one, two = (set(re.findall(r' id="([^"]*)"', chart)) for chart in charts)
    assert one and not one & two
    tables = re.findall(r"(\S+\s*)<table", page)
    assert tables and all('class="scroll">' in before for before in tables)


def test_results_of_one_setting_are_joined(document, tmp_path):
    other = copy.deepcopy(document)
    other["rows"] = [other["rows"][0], row("another", "lossy", 4.0, 2.0, 0.7, 5.0)]
    third = copy.deepcopy(document)
    third["settings"]["law"]["guidance_scale"] = 1.0
    paths = [written(tmp_path, d, f"{i}.json") for i, d in enumerate((document, other, third))]
    sections = frontier.read_results(paths)
    assert [len(section["rows"]) for section in sections] == [5, 4]
    assert sections[0]["rows"][-1]["name"] == "another"


def test_bad_input_is_refused(document, tmp_path):
    (tmp_path / "no.json").write_text("{")
    refuses(ValueError, "JSON", report_command.main, [str(tmp_path / "no.json")])
    document["kind"] = "bench"
    refuses(ValueError, r"evaluation.*results\.json", report_command.main, [str(written(tmp_path, document))])
    with pytest.raises(ValueError, match=r"chart\.jpg"):
        report_command.main([str(written(tmp_path, document)), "--chart", "chart.jpg"])
    with pytest.raises(FileNotFoundError):
        report_command.main([str(tmp_path / "absent.json")])


def places(part, path=()):
    """The path of every entry of a document."""
    entries = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, value in entries:
        yield (*path, name)
        yield from places(value, (*path, name))


def test_results_with_missing_parts_are_refused_in_one_line(document, tmp_path):
    refused = []
    for path in [*places(document)]:
        damaged = copy.deepcopy(document)
        *above, name = path
        part = damaged
        for step in above:
            part = part[step]
        del part[name]
        try:
            frontier.read_results([written(tmp_path, damaged)])
        except ValueError as error:
            assert str(tmp_path / "results.json") in str(error) and "\n" not in str(error)
            refused.append(path)
    assert {("rows",), ("settings",), ("environment",), ("references",), ("rows", 2, "features")} <= {
        *refused
    }
    with pytest.raises(ValueError, match="lacks 'rows'"):
        report_command.main(
            [str(written(tmp_path, {"kind": "quality"})), "--out", str(tmp_path / "page.html")]
        )
