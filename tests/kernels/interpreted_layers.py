"""The kernels of transformer layers in Triton's interpreter; `test_layers.py` runs this file.

Products in float16 in place of bfloat16, which the interpreter computes wrongly.
"""

from typing import Any

import pytest
import torch

from tests.kernels.layers import PLACES, opened, summed, window_case, write_case
from visual_spec.kernels import window_attention as attention
from visual_spec.kernels.layers import add_norm_triton, gated_triton
from visual_spec.kernels.rotary_write import rotary_write_triton
from visual_spec.kernels.window_attention import window_attention_triton

NEAR: dict[torch.dtype, Any] = {
    torch.float32: dict(rtol=2e-6, atol=2e-6),
    torch.float16: dict(rtol=2e-3, atol=2e-3),
    torch.bfloat16: dict(rtol=2e-2, atol=2e-2),
}


def rows(arguments: Any, which: slice) -> Any:
    """Those of some rows; the last argument is a number."""
    return (*(one[which] for one in arguments[:-1]), arguments[-1])


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small caches have several, and more than one tile in each."""
    monkeypatch.setattr(attention, "_SPLIT", 16)
    monkeypatch.setattr(attention, "_TILES", dict.fromkeys((2, 4), (16, 8, 4)))


@pytest.mark.fast_sets(4)
@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_window_attention(name, dtype):
    given = window_case(PLACES[name], dtype=dtype)
    found = window_attention_triton(*given.arguments)
    torch.testing.assert_close(found.double(), given.expected, **NEAR[dtype])


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize(
    "settings",
    [
        dict(heads=2, groups=2, dim=16),
        dict(
            heads=9, groups=1, dim=4, prefix=0
        ),  # 45 queries a head of keys: tiles of rows, the last one part full
        dict(heads=3, groups=3, dim=20, scale=0.7),
    ],
    ids=str,
)
def test_window_attention_of_other_heads(settings):
    given = window_case(PLACES["window"], **settings)
    found = window_attention_triton(*given.arguments)
    torch.testing.assert_close(found.double(), given.expected, **NEAR[torch.float32])


def test_a_long_cache_has_few_splits(monkeypatch):
    monkeypatch.setattr(attention, "_SPLIT", 8)
    monkeypatch.setattr(attention, "_MOST_SPLITS", 2)
    monkeypatch.setattr(attention, "_TILES", {4: (16, 8, 4)})
    given = window_case([[0, 37]])  # two splits of 24 places
    found = window_attention_triton(*given.arguments)
    torch.testing.assert_close(found.double(), given.expected, **NEAR[torch.float32])


@pytest.mark.usefixtures("small_splits")
def test_a_row_does_not_depend_on_the_batch():
    given = window_case(PLACES["window"]).arguments
    assert torch.equal(
        window_attention_triton(*given)[1:2], window_attention_triton(*rows(given, slice(1, 2)))
    )


@pytest.mark.parametrize(
    "sizes", [dict(), dict(rows=2, heads=9, groups=1, dim=4), dict(one_turn=True, groups=4)], ids=str
)
@pytest.mark.parametrize("dtype", NEAR)
def test_rotary_write(sizes, dtype):
    given = write_case(dtype=dtype, **sizes)
    queries = rotary_write_triton(given.projected, *given.turns, given.keys, given.values, given.places)
    for found, expected in zip((queries, given.keys, given.values), given.expected, strict=True):
        torch.testing.assert_close(found.double(), expected, **NEAR[dtype])


@pytest.mark.parametrize("width", [48, 1280])
@pytest.mark.parametrize("dtype", NEAR)
def test_add_norm(width, dtype):
    hidden, change, weight = (torch.randn(3, 2, width).to(dtype) for _ in range(3))
    found = add_norm_triton(hidden, change, weight[0, 0], 1e-5)
    for one, expected in zip(found, summed(hidden, change, weight[0, 0], 1e-5), strict=True):
        torch.testing.assert_close(one.double(), expected, **NEAR[dtype])
    if dtype != torch.bfloat16:  # to which the interpreter does not round, but cuts
        assert torch.equal(found[0], hidden + change)


@pytest.mark.parametrize("dtype", NEAR)
def test_gated(dtype):
    both = torch.randn(3, 2, 2 * 1100).to(dtype) * 4
    for gate, up in (both.chunk(2, -1), (both.flip(0), both)):
        torch.testing.assert_close(gated_triton(gate, up).double(), opened(gate, up), **NEAR[dtype])


def test_nothing_to_do():
    given = window_case([[3]]).arguments
    assert window_attention_triton(*rows(given, slice(0))).shape == (0, 1, 4, 12)
    none = torch.zeros(0, 5, 8)
    assert gated_triton(none, none).shape == none.shape
    assert add_norm_triton(none, none, torch.ones(8), 1e-5)[1].shape == none.shape


def test_other_dtypes_are_refused():
    queries, *rest = window_case([[3]]).arguments
    call: Any = window_attention_triton
    with pytest.raises(TypeError, match="queries are torch.float64"):
        call(queries.double(), *rest)
    given = write_case()
    with pytest.raises(TypeError, match="keys torch.float64"):
        rotary_write_triton(given.projected, *given.turns, given.keys.double(), given.values, given.places)
    with pytest.raises(TypeError, match="gate is torch.float64"):
        gated_triton(queries.double(), queries)
    with pytest.raises(TypeError, match="change torch.float64"):
        add_norm_triton(queries, queries.double(), torch.ones(12), 1e-5)
