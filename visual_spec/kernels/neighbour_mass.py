"""The parts that the kernels of relaxed acceptance share: the mass of a draft together with similar tokens.

Each kernel computes the probability of keeping a draft by a relaxed rule, one program a draft, in its own file:

    grouped_mass      GSD's groups; size // 2 passes over the target law. Each pass finds the next member down the order
                      of probability and the next one up, so nothing is sorted, and the draft law and the codes are read
                      at members only;
    clustered_mass    static clusters; one pass over the target law, the draft law and the cluster numbers;
    lantern_mass      LANTERN's neighbours; no pass, K neighbours are looked up.

`samplers.core.relaxed` states the rules and their guarantees. A kernel and its definition may differ only for drafts
that tie with another token, a gap, a distance or a limit to within float32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_spec.kernels.launch import on_gpu, rows_of_numbers, triton

TILE = 1024
WARPS = 8


def fits(target: Tensor, draft_law: Tensor) -> bool:
    """Return whether the kernels take these laws: on a GPU and both in float32, in which they compute."""
    return on_gpu(target) and target.dtype == draft_law.dtype == torch.float32


def check_laws(target: Tensor, draft_law: Tensor, drafts: Tensor) -> None:
    """Refuse laws that are not both [B, N, V], and drafts that are not [B, N], by ValueError."""
    if target.dim() != 3 or draft_law.shape != target.shape or drafts.shape != target.shape[:2]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, draft_law {tuple(draft_law.shape)}, drafts "
            f"{tuple(drafts.shape)}; pass laws [B, N, V] and drafts [B, N]."
        )


def one_a_draft(target: Tensor, draft_law: Tensor, drafts: Tensor, *_: object) -> Tensor:
    """Return an empty output of the kernels, float32 [B, N]."""
    return drafts.new_empty(drafts.shape, dtype=torch.float32)


def law_rows(target: Tensor, draft_law: Tensor) -> tuple[Tensor | int, ...]:
    """Return the laws, the drafts of a sample, and the strides between samples and between drafts of either law.

    Samplers test all positions of a window except the last, or every K-th: such slices are not copied.
    """
    target, draft_law = rows_of_numbers(target), rows_of_numbers(draft_law)
    return target, draft_law, target.shape[1], *target.stride()[:2], *draft_law.stride()[:2]


def power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


if triton is not None:
    from triton import language as tl

    @triton.jit
    def keep(target_mass, draft_mass, own):
        """Return the ratio as a probability; a token that the target forbids is never kept."""
        ratio = tl.minimum(target_mass / draft_mass, 1.0)
        # The minimum with a nan is 1 here; the definitions return nan.
        ratio = tl.where((target_mass == 0.0) & (draft_mass == 0.0), float("nan"), ratio)
        return tl.where(own > -float("inf"), ratio, 0.0)
