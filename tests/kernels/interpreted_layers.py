"""The kernels of transformer layers in Triton's interpreter; `test_layers.py` runs this file.

Products in float16 in place of bfloat16, which the interpreter computes wrongly.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.mended_interpreter import mend
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


class Launch:
    """In the place of a kernel: launches it, and keeps what with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.args, self.kwargs = args, kwargs
            self.kernel[grid](*args, **kwargs)

        return launch


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Launch:
    launch = Launch(attention._attention_kernel)
    monkeypatch.setattr(attention, "_attention_kernel", launch)
    return launch


def shuffle(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Run the programs of a launch in another order."""
    from triton.runtime.interpreter import InterpreterBuilder

    real, draw, orders = InterpreterBuilder.set_grid_idx, np.random.default_rng(seed), {}

    def moved(self: Any, *at: int) -> None:
        sizes = self.grid_dim
        order = orders.setdefault(sizes, draw.permutation(np.prod(sizes)))
        real(self, *map(int, np.unravel_index(order[np.ravel_multi_index(at, sizes)], sizes)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", moved)


def in_two_launches(launch: Launch, places: Tensor) -> Tensor:
    """[R, W, H, D]: the parts that a launch left, combined one after the other by a loop; nan where there is one."""
    sizes, (rows, window) = launch.kwargs, places.shape
    chunk, splits, dim, of_group = (sizes[name] for name in ("CHUNK", "SPLITS", "DIM", "OF_GROUP"))
    count = window * of_group
    groups = launch.args[0].shape[2] // of_group
    parts, masses = launch.args[1].split(
        [rows * groups * count * splits * dim, rows * groups * count * splits]
    )
    parts = parts.view(rows, groups, count, splits, dim).numpy()
    masses = masses.view(rows, groups, count, splits).numpy()
    mixed = torch.full((rows, groups, count, dim), torch.nan)
    for row in range(rows):
        lasts = places[row].repeat_interleave(of_group).split(sizes["ROWS"])  # of the queries of a program
        written = torch.cat([(one.max() // chunk + 1).expand(len(one)) for one in lasts])
        for group in range(groups):
            for query in (written > 1).nonzero()[:, 0].tolist():
                levels = masses[row, group, query, : written[query]]
                total, mass = np.zeros(dim, np.float32), np.float32(0)
                for level, part in zip(levels, parts[row, group, query], strict=False):
                    share = np.exp2(level - levels.max())
                    total, mass = total + part * share, mass + share
                mixed[row, group, query] = torch.from_numpy(total / mass)
    return mixed.unflatten(2, (window, of_group)).permute(0, 2, 1, 3, 4).flatten(2, 3)


@pytest.mark.fast_sets(3)
@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("window", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whoever_ends_last_combines_the_parts_in_their_order(monkeypatch, watched, window, dtype):
    mend(monkeypatch)
    starts = (3, 44)  # of one split or its border on, and of several
    own = [[start + at for at in range(window)] for start in starts]
    given = window_case(own, size=112, dtype=dtype, heads=2, groups=1)
    found = window_attention_triton(*given.arguments, one_order=True)
    torch.testing.assert_close(found.double(), given.expected, **NEAR[dtype])
    expected, counters = in_two_launches(watched, given.places), watched.args[2]
    several = ~expected.isnan()
    assert several[1].all() and torch.equal(found[several], expected[several].to(dtype))
    assert several[0].any() == (window >= 16) and not several[0].all()
    for seed in range(2):  # with the counters that the launch before has left
        with pytest.MonkeyPatch.context() as patch:
            shuffle(patch, seed)
            assert torch.equal(window_attention_triton(*given.arguments, one_order=True), found)
        assert watched.args[2] is counters and not counters.any()


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_in_one_order_has_the_bits_that_it_has_alone(monkeypatch, dtype):
    """In one split alone, and in several with those beside it."""
    mend(monkeypatch)
    given = window_case([[*range(6, 38)]], size=50, heads=2, groups=1, dtype=dtype)
    queries, keys, values, places, *rest = given.arguments
    call: Any = window_attention_triton
    found = call(queries, keys, values, places, *rest, one_order=True)
    for width in (1, 2, 16):
        for start in range(0, 32, 5 if width == 1 else 14):
            some = slice(start, start + width)
            alone = call(queries[:, some], keys, values, places[:, some], *rest, one_order=True)
            assert torch.equal(alone, found[:, some])


@pytest.mark.usefixtures("small_splits")
def test_one_part_is_not_counted(watched):
    given = window_case([[2, 3, 15], [4, 9, 0]], size=40)
    window_attention_triton(*given.arguments)
    watched.args[2].fill_(99)
    found = window_attention_triton(*given.arguments)
    torch.testing.assert_close(found.double(), given.expected, **NEAR[torch.float32])
    assert (watched.args[2] == 99).all()


@pytest.mark.usefixtures("small_splits")
def test_a_place_after_the_cache_does_not_spoil_the_calls_after_it(watched):
    given = window_case([[33]], size=40)
    window_attention_triton(*given.arguments[:3], given.places + 17, *given.arguments[4:])
    assert not watched.args[2].any()
    found = window_attention_triton(*given.arguments)
    torch.testing.assert_close(found.double(), given.expected, **NEAR[torch.float32])


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
