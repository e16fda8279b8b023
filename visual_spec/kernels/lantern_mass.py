"""The mass of a draft and its nearest codes, for LANTERN: definition and kernel.

See `samplers.core.relaxed.lantern_acceptance`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import launcher, on_gpu, triton
from visual_spec.kernels.neighbour_mass import check_laws, fits, law_rows, one_a_draft, power_of_two


def lantern_mass(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    *,
    neighbours: Tensor,
    delta: float = 0.1,
    factor: float | None = None,
) -> Tensor:
    """Return the probability of keeping each draft under LANTERN, min(1, merged(x) / draft(x)).

    Args:
        target, draft_law, drafts: as in `grouped_mass`, and so is the result.
        neighbours: int [V, K], the nearest codes of each code, the nearest first.
        delta: most mass that neighbours lend, if `factor` is None.
        factor: neighbours lend at most (factor - 1) times the draft's own mass.
    """
    check_laws(target, draft_law, drafts)
    if neighbours.dim() != 2 or neighbours.shape[:1] != target.shape[-1:]:
        raise ValueError(
            f"neighbours have shape {tuple(neighbours.shape)}; pass [{target.shape[-1]}, K], the nearest codes of each."
        )
    by = _lantern_op if fits(target, draft_law) else lantern_mass_reference
    return by(target, draft_law, drafts, neighbours, *lending_limit(delta, factor))


def lending_limit(delta: float, factor: float | None) -> tuple[float, bool]:
    """The most that neighbours lend; and whether that is a mass (True) or a multiple of the draft's own (False)."""
    return (delta, True) if factor is None else (factor - 1, False)


def lantern_mass_reference(
    target: Tensor, draft_law: Tensor, drafts: Tensor, neighbours: Tensor, limit: float, fixed: bool
) -> Tensor:
    """The definition of `lantern_mass`, in PyTorch, on any device and in any precision."""
    _, _, merged = merge_neighbours(target, drafts, neighbours, limit, fixed)
    return (merged / draft_law.gather(-1, drafts[..., None]).exp_()).clamp_(max=1).squeeze(-1)


def merge_neighbours(
    target: Tensor, drafts: Tensor, neighbours: Tensor, limit: float, fixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nearest codes [B, N, K], whether each lends its mass, and the merged mass of the draft [B, N, 1]."""
    own = target.gather(-1, drafts[..., None]).exp_()
    near = neighbours[drafts].long()
    mass = target.gather(-1, near).exp_()
    lent = mass.cumsum(-1) <= (limit if fixed else limit * own)
    lent &= own > 0  # a forbidden token stays forbidden
    return near, lent, own + (mass * lent).sum(-1, keepdim=True)


@triton_op("visual_spec::lantern_mass", mutates_args=())
def _lantern_op(
    target: Tensor, draft_law: Tensor, drafts: Tensor, neighbours: Tensor, limit: float, fixed: bool
) -> Tensor:
    by = lantern_mass_triton if on_gpu(target) else lantern_mass_reference
    return by(target, draft_law, drafts, neighbours, limit, fixed)


_lantern_op.register_fake(one_a_draft)


def lantern_mass_triton(
    target: Tensor, draft_law: Tensor, drafts: Tensor, neighbours: Tensor, limit: float, fixed: bool
) -> Tensor:
    """`lantern_mass` by the Triton kernel."""
    out = one_a_draft(target, draft_law, drafts)
    if drafts.numel() == 0:
        return out
    rows = law_rows(target, draft_law)
    with torch.cuda.device_of(target):
        launcher(_lantern_kernel)[(drafts.numel(),)](
            out, *rows, drafts.contiguous(), neighbours.contiguous(), target.shape[-1], neighbours.shape[1], limit,
            FIXED=fixed, COUNT=power_of_two(neighbours.shape[1]), num_warps=1,
        )  # fmt: skip
    return out


if triton is not None:
    from triton import language as tl

    from visual_spec.kernels.neighbour_mass import keep

    @triton.jit
    def _lantern_kernel(
        out, target, draft_law, width, target_sample, target_row, draft_sample, draft_row, drafts, neighbours,
        vocab_size, count, limit, FIXED: tl.constexpr, COUNT: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64)
        target += place // width * target_sample + place % width * target_row
        draft_law += place // width * draft_sample + place % width * draft_row
        draft = tl.load(drafts + place)
        own = tl.load(target + draft)
        order = tl.arange(0, COUNT)
        near = tl.load(neighbours + draft * count + order, mask=order < count, other=0).to(tl.int64)
        mass = tl.exp(tl.load(target + near, mask=order < count, other=-float("inf")))
        most = limit
        if not FIXED:
            most = limit * tl.exp(own)
        lent = tl.sum(tl.where(tl.cumsum(mass, 0) <= most, mass, 0.0))
        label = tl.load(draft_law + draft)
        tl.store(out + place, keep(tl.exp(own) + lent, tl.exp(label), own))
