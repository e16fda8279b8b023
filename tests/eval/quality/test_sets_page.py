"""The page of sampled sets: what it says against the files it was made of, and what it refuses."""

import base64
import io
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.command import check_refused
from tests.helpers.sample_sets import scored, work_in
from visual_spec.cli import main
from visual_spec.eval.charts import draw_points, inline_svg
from visual_spec.eval.quality.beside import STATEMENTS, summary
from visual_spec.eval.quality.sample_set import sample


def test_the_page_holds_the_files_the_scores_and_the_comparison(tmp_path, capsys):
    plain = scored(tmp_path / "plain", 10.0)
    fast = scored(tmp_path / "fast<b>", 11.5, text="speculative-jacobi:window=4")
    page = tmp_path / "page.html"
    asked = ["report", str(plain), str(fast), "--out", str(page), "--pictures", "5"]
    assert main(asked) == 0
    text = page.read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    expected = [(folder / f"{index:06d}.png").read_bytes() for index in range(5) for folder in (plain, fast)]
    assert [base64.b64decode(one) for one in pictures] == expected
    assert text.count('loading="lazy"') == 10
    assert "7 of 7 samples are, byte for byte, equal to" in text
    assert "9 to 11" in text and "10.5 to 12.5" in text and "inception abc123" in text
    assert "fast<b>" not in text and "fast&lt;b&gt;" in text
    calls = [
        sum(json.loads(line)["calls"] for line in (folder / "manifest.jsonl").read_text().splitlines()) / 7
        for folder in (plain, fast)
    ]
    assert f"fast&lt;b&gt;: {calls[0] / calls[1]:.2f}, 11.5" in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text) and "<script" not in text
    assert main(asked) == 2 and "exists" in capsys.readouterr().err


def test_sets_that_do_not_belong_together_are_refused(tmp_path, capsys):
    plain = scored(tmp_path / "plain", 10.0)
    sample(work_in(tmp_path / "seeds", seed=5))
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "a.png").write_bytes((plain / "000000.png").read_bytes())
    results = tmp_path / "results.json"
    results.write_text("{}")
    for others, message in (
        ([tmp_path / "seeds"], "not drawn for the same prompts with the same"),
        ([tmp_path / "loose"], "has no manifest.jsonl"),
        ([results], "pass results of eval, or folders, not both"),
        (["--chart", tmp_path / "a.png"], "--chart needs a distance"),
    ):
        given = ["report", str(plain), *map(str, others), "--out", str(tmp_path / "x.html")]
        check_refused(main(given), message, capsys, tmp_path / "x.html")


def test_large_pictures_are_shown_small(tmp_path):
    """Of one of 1,024 pixels a side the file has megabytes; what it shows is the same."""
    folder = scored(tmp_path / "large", 10.0)
    noise = np.random.default_rng(0).integers(0, 256, (16, 8, 3), np.uint8)
    large = Image.fromarray(noise).resize((512, 1024), Image.Resampling.BICUBIC)
    large.save(folder / "000000.png")
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(page), "--pictures", "2"]) == 0
    text = page.read_text()
    (shown,) = re.findall(r'width="128" height="256" src="data:image/jpeg;base64,([^"]+)"', text)
    small = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown)))).astype(float)
    assert np.abs(small - np.asarray(large.resize((128, 256), Image.Resampling.LANCZOS))).mean() < 4
    assert len(base64.b64decode(shown)) < (folder / "000000.png").stat().st_size / 10


def test_a_lossy_sampler_that_measured_nothing_says_so():
    same = {"hits": 0, "total": 7}
    found = {"same_samples": same, "beside": "plain", "differing": [], "kept": None, "moved_mass": None}
    found |= {"promise": "lossy", "statement": STATEMENTS["lossy"], "divergence": None}
    assert "measured nothing" in summary(found) and "is what it measured" not in summary(found)
    figures = {"divergence": {"value": 0.25}, "moved_mass": {"value": 3.0}}
    assert "0.2500 of a tested token" in summary(found | figures)
    assert "measured nothing" not in summary(found | figures)


def test_points_of_the_chart_lie_where_their_numbers_say():
    pytest.importorskip("matplotlib")
    points = [
        ("a", 1.0, 20.0, 18.0, 23.0),
        ("b", 3.0, 30.0, 29.0, 31.0),
        ("c", 2.0, 25.0, -math.inf, math.inf),
    ]
    figure: Any = draw_points(points, "across", "up")
    (panel,) = figure.axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("across", "up")
    for bar, (_, x, y, low, high), number in zip(panel.containers, points, panel.texts, strict=True):
        marker, _, lines = bar
        assert (float(marker.get_xdata()[0]), float(marker.get_ydata()[0])) == (x, y) == number.xy
        ends = [segment[:, 1].tolist() for line in lines for segment in line.get_segments()]
        assert ends == ([[low, high]] if math.isfinite(low) else [])
    assert [text.get_text() for text in panel.texts] == ["1", "2", "3"]
    drawn = inline_svg(figure, "p-")
    assert (
        drawn.startswith("<svg") and "var(--good)" in drawn and 'id="p-' in drawn and "http://p" not in drawn
    )
    assert "#187642" not in drawn and inline_svg(figure, "p-") == drawn
