"""Linear layers of one order of sums in Triton's interpreter; `test_interpreted.py` runs this file.

What it shows: which blocks of inputs are added up, in which order, whatever the rows and the tile. The sum of a block
is rounded once here (`mended_interpreter`); `test_project.py` reads from the PTX that a device takes a block in the
same instructions for every number of rows.
"""

from typing import Any

import pytest
import torch

from tests.helpers.mended_interpreter import mend
from tests.kernels.projections import KINDS, project_case
from visual_spec.kernels.project import project_reference, project_triton

NEAR: dict[torch.dtype, Any] = {
    torch.bfloat16: dict(rtol=5e-2, atol=5e-2),
    torch.float16: dict(rtol=5e-3, atol=5e-3),
    torch.float32: dict(rtol=2e-6, atol=5e-6),
}
WIDTHS = (1, 2, 32, 64, 128)


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


@pytest.mark.fast_sets(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NEAR)
def test_bits_do_not_depend_on_the_rows_beside(kind, dtype):
    """Those of one row alone, of every width, and of the definition with its order of blocks."""
    given = project_case(max(WIDTHS), dtype=dtype, **KINDS[kind])
    whole = project_triton(*given.arguments)
    torch.testing.assert_close(whole.double(), given.expected, **NEAR[dtype])
    for width in WIDTHS:
        assert torch.equal(project_triton(*given.rows(slice(width))), whole[:width])
    for row in (1, 77):  # in tiles of 16, and so at another place of another tile
        assert torch.equal(project_triton(*given.rows(slice(row, row + 1))), whole[row : row + 1])
    if not {"norm", "gate"} & set(KINDS[kind]):  # whose root and exponential are another library's
        assert torch.equal(whole, project_reference(*given.arguments))


def test_another_order_of_blocks_has_other_bits():
    """So the tests above can fail."""
    given = project_case(64).arguments
    x, weight = given[:2]
    assert not torch.equal(project_triton(x, weight), project_triton(x.flip(1), weight.flip(1)))


@pytest.mark.parametrize("tile", [(16, 16, 1), (32, 16, 2), (16, 32, 4), (64, 64, 2)])
def test_bits_do_not_depend_on_the_tile(tile):
    given = project_case(40, dtype=torch.bfloat16, norm=True, gate=True).arguments
    assert torch.equal(project_triton(*given, tile=tile), project_triton(*given))


def test_leading_axes_and_nothing_to_do():
    x, weight = project_case(6).arguments[:2]
    assert torch.equal(project_triton(x.view(2, 3, -1), weight).flatten(0, 1), project_triton(x, weight))
    assert project_triton(x[:0], weight).shape == (0, 18)
    call: Any = project_triton
    with pytest.raises(TypeError, match="x is torch.float64"):
        call(x.double(), weight.double())
