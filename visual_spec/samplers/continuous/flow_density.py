"""Densities of tokens that a deterministic chain makes of normal noise.

Every step of such a chain is a map of R^d to itself. Where all of these are one to one, the density of a token is that
of the noise it came from, over the determinants of the maps on the way (Chen et al. 2018, section 4; here of the steps
themselves, so no integral is approximated). d is small, so determinants are computed whole, from d directional
derivatives of the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visual_spec.samplers.continuous.denoising import Chains

_ITERATIONS = 60


def pushed(chains: Chains, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, N, d] from starting points, and the logarithm of their density, float64 [B, N].

    Raises:
        FloatingPointError: as `_log_determinant`.
    """
    chains, density = replace(chains, fused=False), _log_start(chains, x)
    for level in reversed(range(chains.law.levels)):
        x, slope = _step(chains, x, level)
        density = density - _log_determinant(slope, level)
    return x, density


def pulled(chains: Chains, tokens: Tensor, wanted: Tensor) -> Tensor:
    """Logarithm of the density of tokens [B, N, d] under these chains, float64 [B, N].

    Each map is inverted by Newton's method.

    Args:
        wanted: bool [B, N]; what comes out elsewhere means nothing.

    Raises:
        FloatingPointError: a point without an origin, or as `_log_determinant`.
    """
    chains, x = replace(chains, fused=False), tokens
    density = torch.zeros(tokens.shape[:-1], dtype=torch.float64, device=tokens.device)
    for level in range(chains.law.levels):
        x, slope = _inverted(chains, x, level, wanted)
        density = density - torch.where(wanted, _log_determinant(slope, level, wanted), 0.0)
    return density + _log_start(chains, x)


def _step(chains: Chains, x: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """The point after `x [B, N, d]`, and the matrix [B, N, d, d] of derivatives, its last axis belongs to `x`."""
    dim = x.shape[-1]
    basis = torch.eye(dim, dtype=x.dtype, device=x.device)[:, None, None].expand(-1, *x.shape)  # [d, B, N, d]
    moved: Any = torch.func.jvp(
        lambda point: chains.kernel(point, level)[0],
        (x.expand_as(basis).contiguous(),),
        (basis.contiguous(),),
    )
    values, slopes = moved
    return values[0], slopes.movedim(0, -1)


def _inverted(chains: Chains, y: Tensor, level: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The point whose next one is `y`, and the derivatives there."""
    near = torch.finfo(y.dtype).eps ** (2 / 3)  # rounding leaves the last third of the digits unsettled
    x, length = y, torch.ones_like(y[..., :1])
    value, slope = _step(chains, x, level)
    error = (value - y).norm(dim=-1, keepdim=True)
    for _ in range(_ITERATIONS):
        open_ = wanted & (error[..., 0] > near * (1.0 + y.norm(dim=-1)))
        if not open_.any():
            return x, slope
        move = torch.linalg.solve_ex(slope, value - y)[0]
        tried = torch.where(open_[..., None], x - length * move, x)
        new_value, new_slope = _step(chains, tried, level)
        new_error = (new_value - y).norm(dim=-1, keepdim=True)
        better = new_error < error
        # Shorter steps where the last one led away, and longer ones again where it did not.
        length = torch.where(better, (2.0 * length).clamp_max(1.0), 0.25 * length)
        x, value, error = (
            torch.where(better, new, old) for new, old in ((tried, x), (new_value, value), (new_error, error))
        )
        slope = torch.where(better[..., None], new_slope, slope)
    if not (wanted & ~(error[..., 0] <= near**0.75 * (1.0 + y.norm(dim=-1)))).any():
        return x, slope
    raise FloatingPointError(
        f"level {level} of the chain leads to no such token, so its map is not one to one, and rule='ode' has no "
        "density of it; take more head_steps, weaker guidance, or another rule."
    )


def _log_determinant(slope: Tensor, level: int, wanted: Tensor | None = None) -> Tensor:
    """Logarithms of determinants, float64 [B, N]."""
    sign, logarithm = torch.linalg.slogdet(slope.double())
    folded = ~(sign > 0) if wanted is None else wanted & ~(sign > 0)
    if folded.any():
        raise FloatingPointError(
            f"level {level} of the chain folds space, so tokens have several origins, and rule='ode' counts one only; "
            "take more head_steps, weaker guidance, or another rule."
        )
    return logarithm


def _log_start(chains: Chains, x: Tensor) -> Tensor:
    """Logarithm of the density of starting points, but for a constant, which is the same for all chains."""
    return -0.5 * (x.double() / chains.law.temperature).square().sum(-1)
