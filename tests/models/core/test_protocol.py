import pytest

from tests.helpers.refusals import refuses
from visual_spec.models.core.protocol import TokenGrid


def test_coordinates_run_in_raster_order():
    grid = TokenGrid(2, 3, frames=2)
    assert grid.num_tokens == 12
    expected = [(t, h, w) for t in range(2) for h in range(2) for w in range(3)]
    assert [grid.coordinates(index) for index in range(12)] == expected


def test_neighbours():
    grid = TokenGrid(2, 3, frames=2)
    assert [grid.left(index) for index in range(6)] == [None, 0, 1, None, 3, 4]
    assert [grid.up(index) for index in range(6)] == [None, None, None, 0, 1, 2]
    assert [grid.left(index) for index in range(6, 9)] == [None, 6, 7]
    assert [grid.up(index) for index in range(6, 12)] == [None, None, None, 6, 7, 8]
    assert [grid.previous_frame(index) for index in (0, 5, 6, 11)] == [None, None, 0, 5]


def test_codebooks_do_not_add_slots():
    assert TokenGrid(1, 8, codebooks=4).num_tokens == 8


@pytest.mark.parametrize("index", [-1, 12, 100])
def test_refuses_a_slot_outside(index):
    grid = TokenGrid(2, 3, frames=2)
    for method in (grid.coordinates, grid.left, grid.up, grid.previous_frame):
        refuses(IndexError, f"slot {index} .*0 to 11", method, index)


@pytest.mark.parametrize("name", ["height", "width", "frames", "codebooks"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_refuses_a_size_below_one(name, size):
    refuses(ValueError, f"{name}={size!r}.*1", TokenGrid, **{"height": 2, "width": 2, name: size})
