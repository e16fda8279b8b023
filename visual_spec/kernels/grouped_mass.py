"""The mass of a draft's group, for GSD (`samplers.core.relaxed.grouped_acceptance`): definition and kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import launcher, on_gpu, triton
from visual_spec.kernels.neighbour_mass import (
    TILE,
    WARPS,
    check_laws,
    fits,
    law_rows,
    one_a_draft,
    power_of_two,
)


def grouped_mass(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    *,
    size: int,
    gap: float,
    distance: float | None = None,
    codebook: Tensor | None = None,
) -> Tensor:
    """Return the probability of keeping each draft under GSD, min(1, P(C) / Q(C)), target and draft mass of its group.

    Args:
        target, draft_law: [B, N, V] log-probabilities; slices of larger tensors are read without a copy.
        drafts: long [B, N].
        size: tokens of a group, the draft included.
        gap: a member's probability differs from the draft's by less than this.
        distance: a member's code has a squared distance from the draft's below this. None: no limit.
        codebook: [V, D], required with `distance`.

    Returns:
        [B, N], of the laws' dtype. By the Triton kernel for float32 laws on CUDA, else by `grouped_mass_reference`.

    Raises:
        ValueError: the shapes do not fit, the size is below 1, or a distance comes without a codebook.
    """
    check_laws(target, draft_law, drafts)
    if size < 1:
        raise ValueError(f"size={size}; pass at least 1, the draft itself.")
    if distance is None:
        codebook, distance = target.new_zeros(target.shape[-1], 1), float("inf")
    elif codebook is None or codebook.shape[:1] != target.shape[-1:]:
        shape = "none" if codebook is None else f"shape {tuple(codebook.shape)}"
        raise ValueError(
            f"distance={distance} compares codes, but codebook has {shape}; pass codebook [{target.shape[-1]}, D]."
        )
    if fits(target, draft_law):
        return _grouped_op(target, draft_law, drafts, codebook.float(), size, gap, distance)
    return grouped_mass_reference(target, draft_law, drafts, codebook, size, gap, distance)


def grouped_mass_reference(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    codebook: Tensor,
    size: int,
    gap: float,
    distance: float,
) -> Tensor:
    """The definition of `grouped_mass`, in PyTorch, on any device and in any precision."""
    at = drafts[..., None]  # [B, N, 1]
    own = target.gather(-1, at)
    ids = torch.arange(target.shape[-1], device=target.device)
    after = (target > own) | ((target == own) & (ids > at))  # [B, N, V]
    before = (target < own) | ((target == own) & (ids < at))
    # In descending order, ties come by falling id: the flip reverses the ids, and back. Forbidden tokens are at +inf.
    less, below = smallest((-target).masked_fill(~before, torch.inf).flip(-1), size // 2)
    more, above = smallest(target.masked_fill(~after, torch.inf), (size - 1) // 2)
    group = torch.cat([ids[-1] - below, at, above], -1)  # [B, N, size]
    member = torch.cat([less, torch.zeros_like(own), more], -1) < torch.inf
    inside = target.gather(-1, group).exp_()
    member &= (inside - own.exp()).abs_() < gap
    if distance < float("inf"):
        member &= (codebook[group] - codebook[at]).square().sum(-1) < distance
    member[..., below.shape[-1]].fill_(True)  # x itself, even if gap or distance is 0
    ratio = (inside * member).sum(-1) / (draft_law.gather(-1, group).exp_() * member).sum(-1)
    return ratio.clamp_(max=1).masked_fill_(own.squeeze(-1).isneginf(), 0)


def smallest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` smallest values [..., V] in ascending order, and their places; ties go to the first place.

    Selects instead of sorting V values. The result is the same on all devices, which break ties of `topk` differently.
    """
    size = values.shape[-1]
    count = min(count, size)
    if count == 0:
        return values[..., :0], torch.zeros_like(values[..., :0], dtype=torch.long)
    limit = values.topk(count, largest=False).values[..., -1:]
    places = torch.arange(size, device=values.device)
    # All values below the limit are included; of those at the limit, the first places, as many as there is room for.
    rank = torch.where(values == limit, places, 2 * size)
    rank = torch.where(values < limit, places - size, rank)
    chosen = rank.topk(count, largest=False, sorted=True).indices
    least, order = values.gather(-1, chosen).sort(dim=-1, stable=True)
    return least, chosen.gather(-1, order)


@triton_op("visual_spec::grouped_mass", mutates_args=())
def _grouped_op(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    codebook: Tensor,
    size: int,
    gap: float,
    distance: float,
) -> Tensor:
    by = grouped_mass_triton if on_gpu(target) else grouped_mass_reference
    return by(target, draft_law, drafts, codebook, size, gap, distance)


_grouped_op.register_fake(one_a_draft)


def grouped_mass_triton(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    codebook: Tensor,
    size: int,
    gap: float,
    distance: float,
) -> Tensor:
    """`grouped_mass` by the Triton kernel."""
    out = one_a_draft(target, draft_law, drafts)
    if drafts.numel() == 0:
        return out
    codebook = codebook.contiguous()
    rows = law_rows(target, draft_law)
    with torch.cuda.device_of(target):
        launcher(_grouped_kernel)[(drafts.numel(),)](
            out, *rows, drafts.contiguous(), codebook, target.shape[-1], codebook.shape[1], gap, distance,
            BELOW=size // 2, ABOVE=(size - 1) // 2, DISTANCE=distance < float("inf"),
            DIM=power_of_two(codebook.shape[1]), TILE=TILE, TILES=-(-target.shape[-1] // TILE), num_warps=WARPS,
        )  # fmt: skip
    return out


if triton is not None:
    from triton import language as tl

    from visual_spec.kernels.neighbour_mass import keep

    @triton.jit
    def _member(
        ids, is_finite, target, draft_law, codebook, draft, own, dim, gap, distance, DISTANCE: tl.constexpr,
        DIM: tl.constexpr,
    ):  # fmt: skip
        """Return what a token adds to the masses of the group: zero unless it was found and is a member."""
        score = tl.load(target + ids, mask=is_finite, other=-float("inf"))
        label = tl.load(draft_law + ids, mask=is_finite, other=-float("inf"))
        apart = tl.exp(score) - tl.exp(own)
        member = is_finite & (apart < gap) & (apart > -gap)
        if DISTANCE:
            offsets = tl.arange(0, DIM)
            inside = offsets < tl.where(is_finite, dim, 0)
            code = tl.load(codebook + ids.to(tl.int64) * dim + offsets, mask=inside, other=0.0)
            own_code = tl.load(codebook + draft * dim + offsets, mask=inside, other=0.0)
            member = member & (tl.sum((code - own_code) * (code - own_code)) < distance)
        return tl.where(member, tl.exp(score), 0.0), tl.where(member, tl.exp(label), 0.0)

    @triton.jit
    def _grouped_kernel(
        out, target, draft_law, width, target_sample, target_row, draft_sample, draft_row, drafts, codebook,
        vocab_size, dim, gap, distance, BELOW: tl.constexpr, ABOVE: tl.constexpr, DISTANCE: tl.constexpr,
        DIM: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        infinity = float("inf")
        place = tl.program_id(0).to(tl.int64)
        target += place // width * target_sample + place % width * target_row
        draft_law += place // width * draft_sample + place % width * draft_row
        draft = tl.load(drafts + place)
        own = tl.load(target + draft)
        target_mass, draft_mass = tl.exp(own), tl.exp(tl.load(draft_law + draft))
        # The last members found, as places in the order (probability, then id).
        low, low_id = own, draft.to(tl.int32)
        high, high_id = own, draft.to(tl.int32)
        for step in range(BELOW):  # never fewer than ABOVE
            next_low = tl.full([TILE], -infinity, tl.float32)
            next_low_id = tl.full([TILE], -1, tl.int32)
            next_high = tl.full([TILE], infinity, tl.float32)
            next_high_id = tl.full([TILE], 2147483647, tl.int32)
            for tile in range(TILES):
                ids = tile * TILE + tl.arange(0, TILE)
                score = tl.load(target + ids, mask=ids < vocab_size, other=-infinity)
                allowed = score > -infinity
                # A lane visits its ids in ascending order: of equal values the last comes first on the way down.
                below = allowed & ((score < low) | ((score == low) & (ids < low_id))) & (score >= next_low)
                next_low_id = tl.where(below, ids, next_low_id)
                next_low = tl.where(below, score, next_low)
                above = allowed & ((score > high) | ((score == high) & (ids > high_id))) & (score < next_high)
                next_high_id = tl.where(above, ids, next_high_id)
                next_high = tl.where(above, score, next_high)
            low = tl.max(next_low)
            low_id = tl.max(tl.where(next_low == low, next_low_id, -1))
            more, label = _member(
                low_id, low > -infinity, target, draft_law, codebook, draft, own, dim, gap, distance, DISTANCE, DIM,
            )  # fmt: skip
            target_mass += more
            draft_mass += label
            high = tl.min(next_high)
            high_id = tl.min(tl.where(next_high == high, next_high_id, 2147483647))
            is_finite = (high < infinity) & (step < ABOVE)
            more, label = _member(
                high_id, is_finite, target, draft_law, codebook, draft, own, dim, gap, distance, DISTANCE, DIM
            )
            target_mass += more
            draft_mass += label
        tl.store(out + place, keep(target_mass, draft_mass, own))
