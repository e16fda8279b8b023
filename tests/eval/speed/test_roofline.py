"""The roofline: where rows lie, by arithmetic, and that the chart is written whole or not at all."""

from typing import Any

import pytest

from tests.helpers.refusals import refuses
from visual_spec.eval import charts
from visual_spec.eval.speed import roofline

ROWS = [
    dict(
        name="plain", batch_size=1, window=1, flops_per_call=4e9, weight_bytes=1.5e9, cache_bytes=0.5e9,
        ms_per_call={"p20": 7.0, "p50": 8.0, "p80": 9.0},
    ),
    dict(
        name="jacobi", batch_size=1, window=32, flops_per_call=128e9, weight_bytes=1.5e9, cache_bytes=0.5e9,
        ms_per_call=16.0,
    ),
    dict(name="no cache", batch_size=1, window=None, flops_per_call=None, weight_bytes=1, cache_bytes=1, ms_per_call=1),
]  # fmt: skip
MACHINE = dict(copy_bandwidth=5e11, matmul_flops=2e13, dtype="float32", device_name="a chip")
DOCUMENT = {"rows": ROWS, "settings": {"model": "shapes"}, "environment": MACHINE}


def test_points_lie_where_arithmetic_puts_them():
    plain, wide = roofline.points_of(ROWS, 5e11, 2e13)
    assert plain.name == "plain, batch 1, window 1" and wide.name == "jacobi, batch 1, window 32"
    assert (plain.intensity, plain.achieved, plain.roof) == pytest.approx((2.0, 5e11, 1e12))
    assert (wide.intensity, wide.achieved) == pytest.approx((64.0, 8e12))
    assert wide.roof == 2e13  # 64 operations a byte times the bandwidth is more than arithmetic reaches
    # Under the slope the share of the roof is that of the bandwidth floor.
    assert plain.achieved / plain.roof == pytest.approx(2e9 / 5e11 / 8e-3)


@pytest.mark.parametrize("name", ["roof.svg", "roof.png"])
def test_the_chart_is_written_once_and_the_same_every_time(tmp_path, name):
    path = tmp_path / "charts" / name
    points = roofline.write_roofline(DOCUMENT, path)
    assert len(points) == 2 and list(path.parent.iterdir()) == [path]
    first = path.read_bytes()
    with pytest.raises(FileExistsError):
        roofline.write_roofline(DOCUMENT, path)
    roofline.write_roofline(DOCUMENT, path, overwrite=True)
    assert path.read_bytes() == first


def test_the_chart_has_the_roof_and_a_numbered_point_a_row():
    points = roofline.points_of(ROWS, 5e11, 2e13)
    figure: Any = roofline.draw_roofline(points, 5e11, 2e13, "a title")
    panel, key = figure.axes
    roof, *drawn = panel.lines
    assert list(roof.get_ydata()) == pytest.approx([roof.get_xdata()[0] * 5e11, 2e13, 2e13])
    assert roof.get_xdata()[1] == pytest.approx(2e13 / 5e11)
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in drawn] == [
        (p.intensity, p.achieved) for p in points
    ]
    texts = [text.get_text() for text in key.texts]
    assert texts == [
        "1  plain, batch 1, window 1: 50 % of the roof",
        "2  jacobi, batch 1, window 32: 40 % of the roof",
    ]
    assert panel.get_title() == "a title"


def test_a_name_that_cannot_be_drawn_to_is_refused(tmp_path):
    refuses(ValueError, r"roof\.jpg", charts.chart_ending, tmp_path / "roof.jpg", "--plot")
