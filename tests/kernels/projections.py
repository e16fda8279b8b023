"""Cases for `project`, and what it computes, in float64."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class ProjectCase(NamedTuple):
    """Arguments of `project`, and what it must return, in float64."""

    arguments: tuple[Any, ...]
    expected: Tensor

    def rows(self, which: slice) -> tuple[Any, ...]:
        """The arguments of some rows."""
        x, *others, residual, gate = self.arguments
        return x[which], *others, None if residual is None else residual[which], gate


# What stands before and after the product.
KINDS: dict[str, Any] = {
    "plain": {},
    "into attention": dict(norm=True),
    "out of attention": dict(residual=True),
    "gated": dict(norm=True, gate=True),
    "biased": dict(norm=True, bias=True),
    "int8": dict(weights=torch.int8, bias=True, residual=True),
    "float8": dict(weights=torch.float8_e4m3fn, norm=True, gate=True, bias=True),
}


def project_case(
    rows: int,
    *,
    inputs: int = 600,
    outputs: int = 18,
    dtype: torch.dtype = torch.float32,
    weights: torch.dtype | None = None,
    norm: bool = False,
    bias: bool = False,
    residual: bool = False,
    gate: bool = False,
) -> ProjectCase:
    """Random rows; the first ones are those of a case with fewer."""
    draw = torch.Generator().manual_seed(7)
    weight = torch.randn(outputs, inputs, generator=draw) / inputs**0.5
    factors, added = 1 + torch.randn(inputs, generator=draw) / 4, torch.randn(outputs, generator=draw)
    scale = None if weights is None else torch.rand(outputs, generator=draw) / 600
    weight = weight.to(dtype) if weights is None else (700 * weight).clamp(-127, 127).to(weights)
    x = 3 * torch.randn(rows, inputs, generator=draw)
    before = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(8))
    x, factors, added, before = (one.to(dtype) for one in (x, factors, added, before))
    exact = x.double()
    if norm:
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factors.double()
    exact = exact @ weight.double().T
    exact = exact if scale is None else exact * scale.double()
    exact = exact + added.double() if bias else exact
    if gate:
        first, second = exact.chunk(2, -1)
        exact = first * torch.special.expit(first) * second
    around = factors if norm else None, 1e-5, scale, added if bias else None, before if residual else None
    given = x, weight, *around, gate
    return ProjectCase(given, exact + before.double() if residual else exact)
