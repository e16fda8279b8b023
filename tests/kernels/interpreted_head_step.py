"""The kernels of `head_step` in Triton's interpreter; `test_head_step.py` runs this file.

In float16 in place of bfloat16, whose products the interpreter computes wrongly.
"""

from typing import Any

import pytest
import torch

from tests.kernels.heads import case
from visual_spec.kernels import head_step as module
from visual_spec.kernels.head_step import head_step_triton


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small heads have several."""
    monkeypatch.setattr(module, "_READ", 32)


@pytest.mark.parametrize(
    "sizes, settings",
    [
        ((3, 5, 40, 2), {}),
        ((2, 16, 48, 1), dict(guided=False)),
        ((20, 3, 17, 1), dict(one_law=True)),  # several tiles of rows, and a width that fills none
        ((35, 3, 16, 1), dict(guided=False, learned=False)),
        ((2, 20, 32, 2), dict(learned=False, noisy=False)),
    ],
    ids=str,
)
def test_computes_the_straight_line(monkeypatch, sizes, settings):
    monkeypatch.setattr(module, "_MOST", 16)
    here = case(*sizes, **settings)
    for found, expected in zip(head_step_triton(*here.arguments), here.expected, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=2e-5, atol=2e-5)


def test_half_precision():
    here = case(3, 5, 40, 2, dtype=torch.float16)
    for found, expected in zip(head_step_triton(*here.arguments), here.expected, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=2e-2, atol=2e-2)


def test_rows_far_from_their_mean():
    """Where a difference of sums of squares would cancel."""
    here = case(2, 4, 40, 1)
    here.arguments[2][1].data.add_(3000.0)  # the bias of the input projection
    expected = module.head_step_reference(*_in_float64(here.arguments))
    for found, exact in zip(head_step_triton(*here.arguments), expected, strict=True):
        torch.testing.assert_close(found, exact.float(), rtol=1e-3, atol=1e-3)


def test_nothing_to_draw():
    here = case(1, 4, 16, 1, guided=False)
    x, modulations, weights, _, law, noise = here.arguments
    found = head_step_triton(x[:0], modulations[:0], weights, None, law[:0], noise[:0])
    assert [one.shape for one in found] == [(0, 4)] * 3


def test_other_dtypes_are_refused():
    here = case(1, 4, 16, 1, guided=False)
    with pytest.raises(TypeError, match="points are torch.float64"):
        head_step_triton(*_in_float64(here.arguments))


def _in_float64(arguments: Any) -> list[Any]:
    return [
        [one.double() for one in value]
        if isinstance(value, list)
        else value
        if value is None
        else value.double()
        for value in arguments
    ]
