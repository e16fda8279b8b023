"""The mass of a draft and its kin, for relaxed acceptance: GSD's groups, static clusters, and LANTERN's neighbours.

Each is the probability of keeping a draft by the rule of that name in `samplers.relaxed`, one program a draft:

    grouped     size // 2 passes over the target law; each finds the next member down the order of probability and the
                next one up, so nothing is sorted, and the draft law and the codes are read at members only;
    clustered   one pass over the target law, the draft law and the cluster numbers;
    lantern     none: K neighbours are looked up.

Only drafts that tie with another token, a gap, a distance or a limit to within float32 rounding may differ from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from visual_spec.kernels.launch import compiled, on_gpu, rows_of_numbers, triton

_TILE = 1024
_WARPS = 8


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
    """Probability of keeping each draft under GSD, min(1, P(C) / Q(C)): see `samplers.relaxed.grouped_acceptance`.

    Args:
        target, draft_law: float32 [B, N, V] log-probabilities; parts of larger tensors are read where they lie.
        drafts: long [B, N].
        size: tokens of a group, the draft included.
        gap: members have a probability less than this from the draft's.
        distance: and a code less than this squared distance from the draft's. None: any.
        codebook: float32 [V, D], needed with `distance`.

    Returns:
        float32 [B, N]. On CUDA by the Triton kernel, elsewhere by `grouped_mass_reference`.

    Raises:
        ValueError: shapes that do not fit, a size below 1, a distance without codes.
        TypeError: laws that are not float32.
    """
    _check_laws(target, draft_law, drafts)
    if size < 1:
        raise ValueError(f"size={size}; pass at least 1, the draft itself.")
    if distance is not None and (codebook is None or codebook.shape[:1] != target.shape[-1:]):
        given = "none" if codebook is None else f"shape {tuple(codebook.shape)}"
        raise ValueError(
            f"distance={distance} compares codes, but codebook has {given}; pass codebook [{target.shape[-1]}, D]."
        )
    codes = (
        target.new_zeros(target.shape[-1], 1) if codebook is None or distance is None else codebook.float()
    )
    return _grouped_op(
        target, draft_law, drafts, codes, size, gap, float("inf") if distance is None else distance
    )


def clustered_mass(target: Tensor, draft_law: Tensor, drafts: Tensor, *, clusters: Tensor) -> Tensor:
    """As `grouped_mass`, with fixed groups: see `samplers.relaxed.clustered_acceptance`.

    Args:
        clusters: int [V], the cluster of every token.
    """
    _check_laws(target, draft_law, drafts)
    if clusters.shape != target.shape[-1:]:
        raise ValueError(
            f"clusters have shape {tuple(clusters.shape)}; pass [{target.shape[-1]}], one number a token."
        )
    return _clustered_op(target, draft_law, drafts, clusters)


def lantern_mass(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    *,
    neighbours: Tensor,
    delta: float = 0.1,
    factor: float | None = None,
) -> Tensor:
    """Probability of keeping each draft under LANTERN: see `samplers.relaxed.lantern_acceptance`.

    Args:
        neighbours: int [V, K], the nearest codes of each, the nearest first.
        delta: most mass that neighbours lend, when `factor` is None.
        factor: they lend at most (factor - 1) times the draft's own.
    """
    _check_laws(target, draft_law, drafts)
    if neighbours.dim() != 2 or neighbours.shape[:1] != target.shape[-1:]:
        raise ValueError(
            f"neighbours have shape {tuple(neighbours.shape)}; pass [{target.shape[-1]}, K], the nearest codes of each."
        )
    fixed = factor is None
    return _lantern_op(target, draft_law, drafts, neighbours, delta if fixed else factor - 1, fixed)


def _check_laws(target: Tensor, draft_law: Tensor, drafts: Tensor) -> None:
    if target.dim() != 3 or draft_law.shape != target.shape or drafts.shape != target.shape[:2]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, draft_law {tuple(draft_law.shape)}, drafts "
            f"{tuple(drafts.shape)}; pass laws [B, N, V] and drafts [B, N]."
        )
    if target.dtype != torch.float32 or draft_law.dtype != torch.float32:
        raise TypeError(
            f"target is {target.dtype} and draft_law {draft_law.dtype}; the kernels compute in float32, so pass "
            "float32. The rules of `samplers.relaxed` take float64."
        )


# --------------------------------------------------------------------------------------------------- the references


def grouped_mass_reference(
    target: Tensor,
    draft_law: Tensor,
    drafts: Tensor,
    codebook: Tensor,
    size: int,
    gap: float,
    distance: float,
) -> Tensor:
    """The definition of `grouped_mass`, in PyTorch, on any device: by the place in the order, without selecting."""
    at = drafts[..., None]
    # Stable, so equal ones come by id.
    place = target.argsort(dim=-1, stable=True).argsort(-1)  # [B, N, V]
    apart = place - place.gather(-1, at)
    inside, own = target.exp(), target.gather(-1, at).exp()
    member = (apart >= -(size // 2)) & (apart <= (size - 1) // 2) & (inside > 0)
    member &= (inside - own).abs() < gap
    if distance < float("inf"):
        member &= (codebook - codebook[drafts][:, :, None]).square().sum(-1) < distance
    member |= apart == 0
    return _ratio(inside, draft_law.exp(), member, own)


def clustered_mass_reference(target: Tensor, draft_law: Tensor, drafts: Tensor, clusters: Tensor) -> Tensor:
    """The definition of `clustered_mass`, in PyTorch, on any device."""
    together = clusters == clusters[drafts][..., None]
    own = target.gather(-1, drafts[..., None]).exp()
    return _ratio(target.exp(), draft_law.exp(), together, own)


def lantern_mass_reference(
    target: Tensor, draft_law: Tensor, drafts: Tensor, neighbours: Tensor, limit: float, fixed: bool
) -> Tensor:
    """The definition of `lantern_mass`, in PyTorch, on any device. `limit`: of the mass, or times the draft's."""
    at = drafts[..., None]
    own = target.gather(-1, at).exp()
    mass = target.gather(-1, neighbours[drafts].long()).exp()
    lent = mass.cumsum(-1) <= (limit if fixed else limit * own)
    merged = own + (mass * lent).sum(-1, keepdim=True)
    ratio = merged / draft_law.gather(-1, at).exp()
    return ratio.clamp(max=1).masked_fill(own == 0, 0).squeeze(-1)


def _ratio(target: Tensor, draft: Tensor, member: Tensor, own: Tensor) -> Tensor:
    ratio = (target * member).sum(-1) / (draft * member).sum(-1)
    return ratio.clamp(max=1).masked_fill(own.squeeze(-1) == 0, 0)


# ---------------------------------------------------------------------------------------------------- the operators


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


@triton_op("visual_spec::clustered_mass", mutates_args=())
def _clustered_op(target: Tensor, draft_law: Tensor, drafts: Tensor, clusters: Tensor) -> Tensor:
    by = clustered_mass_triton if on_gpu(target) else clustered_mass_reference
    return by(target, draft_law, drafts, clusters)


@triton_op("visual_spec::lantern_mass", mutates_args=())
def _lantern_op(
    target: Tensor, draft_law: Tensor, drafts: Tensor, neighbours: Tensor, limit: float, fixed: bool
) -> Tensor:
    by = lantern_mass_triton if on_gpu(target) else lantern_mass_reference
    return by(target, draft_law, drafts, neighbours, limit, fixed)


@_grouped_op.register_fake
@_clustered_op.register_fake
@_lantern_op.register_fake
def _one_a_draft(target: Tensor, draft_law: Tensor, drafts: Tensor, *_: Any) -> Tensor:
    return drafts.new_empty(drafts.shape, dtype=torch.float32)


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
    out = _one_a_draft(target, draft_law, drafts)
    if drafts.numel() == 0:
        return out
    codebook = codebook.contiguous()
    rows = _rows(target, draft_law)
    kernel: Any = wrap_triton(_grouped_kernel) if compiled(_grouped_kernel) else _grouped_kernel
    with torch.cuda.device_of(target):
        kernel[(drafts.numel(),)](
            out,
            *rows,
            drafts.contiguous(),
            codebook,
            target.shape[-1],
            codebook.shape[1],
            gap,
            distance,
            BELOW=size // 2,
            ABOVE=(size - 1) // 2,
            DISTANCE=distance < float("inf"),
            DIM=_power_of_two(codebook.shape[1]),
            TILE=_TILE,
            TILES=-(-target.shape[-1] // _TILE),
            num_warps=_WARPS,
        )
    return out


def clustered_mass_triton(target: Tensor, draft_law: Tensor, drafts: Tensor, clusters: Tensor) -> Tensor:
    """`clustered_mass` by the Triton kernel."""
    out = _one_a_draft(target, draft_law, drafts)
    if drafts.numel() == 0:
        return out
    rows = _rows(target, draft_law)
    kernel: Any = wrap_triton(_clustered_kernel) if compiled(_clustered_kernel) else _clustered_kernel
    with torch.cuda.device_of(target):
        kernel[(drafts.numel(),)](
            out,
            *rows,
            drafts.contiguous(),
            clusters.contiguous(),
            target.shape[-1],
            TILE=_TILE,
            TILES=-(-target.shape[-1] // _TILE),
            num_warps=_WARPS,
        )
    return out


def lantern_mass_triton(
    target: Tensor, draft_law: Tensor, drafts: Tensor, neighbours: Tensor, limit: float, fixed: bool
) -> Tensor:
    """`lantern_mass` by the Triton kernel."""
    out = _one_a_draft(target, draft_law, drafts)
    if drafts.numel() == 0:
        return out
    rows = _rows(target, draft_law)
    kernel: Any = wrap_triton(_lantern_kernel) if compiled(_lantern_kernel) else _lantern_kernel
    with torch.cuda.device_of(target):
        kernel[(drafts.numel(),)](
            out,
            *rows,
            drafts.contiguous(),
            neighbours.contiguous(),
            target.shape[-1],
            neighbours.shape[1],
            limit,
            FIXED=fixed,
            COUNT=_power_of_two(neighbours.shape[1]),
            num_warps=1,
        )
    return out


def _rows(target: Tensor, draft_law: Tensor) -> tuple[Any, ...]:
    """The laws, the drafts of a sample, and the steps from sample to sample and from draft to draft in either law.

    Samplers test all columns of a window but the last, or every K-th: such parts are not copied.
    """
    target, draft_law = rows_of_numbers(target), rows_of_numbers(draft_law)
    return target, draft_law, target.shape[1], *target.stride()[:2], *draft_law.stride()[:2]


def _power_of_two(count: int) -> int:
    """The least one from `count` on."""
    return 1 << (count - 1).bit_length()


# ------------------------------------------------------------------------------------------------------ the kernels

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _keep(target_mass, draft_mass, own):
        """The ratio as a probability; nothing that the target forbids is kept."""
        ratio = tl.minimum(target_mass / draft_mass, 1.0)
        # The minimum with a nan is 1; the references pass a nan on.
        ratio = tl.where((target_mass == 0.0) & (draft_mass == 0.0), float("nan"), ratio)
        return tl.where(own > -float("inf"), ratio, 0.0)

    @triton.jit
    def _member(
        ids,
        found,
        target,
        draft_law,
        codebook,
        draft,
        own,
        dim,
        gap,
        distance,
        DISTANCE: tl.constexpr,
        DIM: tl.constexpr,
    ):
        """What a token adds to the masses of the group, if it was found and is a member."""
        score = tl.load(target + ids, mask=found, other=-float("inf"))
        label = tl.load(draft_law + ids, mask=found, other=-float("inf"))
        apart = tl.exp(score) - tl.exp(own)
        member = found & (apart < gap) & (apart > -gap)
        if DISTANCE:
            offsets = tl.arange(0, DIM)
            inside = offsets < tl.where(found, dim, 0)
            code = tl.load(codebook + ids.to(tl.int64) * dim + offsets, mask=inside, other=0.0)
            own_code = tl.load(codebook + draft * dim + offsets, mask=inside, other=0.0)
            member = member & (tl.sum((code - own_code) * (code - own_code)) < distance)
        return tl.where(member, tl.exp(score), 0.0), tl.where(member, tl.exp(label), 0.0)

    @triton.jit
    def _grouped_kernel(
        out,
        target,
        draft_law,
        width,
        target_sample,
        target_row,
        draft_sample,
        draft_row,
        drafts,
        codebook,
        vocab_size,
        dim,
        gap,
        distance,
        BELOW: tl.constexpr,
        ABOVE: tl.constexpr,
        DISTANCE: tl.constexpr,
        DIM: tl.constexpr,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
    ):
        infinity = float("inf")
        place = tl.program_id(0).to(tl.int64)
        target += place // width * target_sample + place % width * target_row
        draft_law += place // width * draft_sample + place % width * draft_row
        draft = tl.load(drafts + place)
        own = tl.load(target + draft)
        target_mass, draft_mass = tl.exp(own), tl.exp(tl.load(draft_law + draft))
        # The last members found, as places in the order: by probability, then by id.
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
                # A lane meets its ids in rising order: of equal ones the last goes first on the way down.
                below = allowed & ((score < low) | ((score == low) & (ids < low_id))) & (score >= next_low)
                next_low_id = tl.where(below, ids, next_low_id)
                next_low = tl.where(below, score, next_low)
                above = allowed & ((score > high) | ((score == high) & (ids > high_id))) & (score < next_high)
                next_high_id = tl.where(above, ids, next_high_id)
                next_high = tl.where(above, score, next_high)
            low = tl.max(next_low)
            low_id = tl.max(tl.where(next_low == low, next_low_id, -1))
            more, label = _member(
                low_id,
                low > -infinity,
                target,
                draft_law,
                codebook,
                draft,
                own,
                dim,
                gap,
                distance,
                DISTANCE,
                DIM,
            )
            target_mass += more
            draft_mass += label
            high = tl.min(next_high)
            high_id = tl.min(tl.where(next_high == high, next_high_id, 2147483647))
            found = (high < infinity) & (step < ABOVE)
            more, label = _member(
                high_id, found, target, draft_law, codebook, draft, own, dim, gap, distance, DISTANCE, DIM
            )
            target_mass += more
            draft_mass += label
        tl.store(out + place, _keep(target_mass, draft_mass, own))

    @triton.jit
    def _clustered_kernel(
        out,
        target,
        draft_law,
        width,
        target_sample,
        target_row,
        draft_sample,
        draft_row,
        drafts,
        clusters,
        vocab_size,
        TILE: tl.constexpr,
        TILES: tl.constexpr,
    ):
        place = tl.program_id(0).to(tl.int64)
        target += place // width * target_sample + place % width * target_row
        draft_law += place // width * draft_sample + place % width * draft_row
        draft = tl.load(drafts + place)
        cluster = tl.load(clusters + draft)
        target_mass = tl.zeros([TILE], tl.float32)
        draft_mass = tl.zeros([TILE], tl.float32)
        for tile in range(TILES):
            ids = tile * TILE + tl.arange(0, TILE)
            inside = ids < vocab_size
            together = inside & (tl.load(clusters + ids, mask=inside, other=-1) == cluster)
            target_mass += tl.exp(tl.load(target + ids, mask=together, other=-float("inf")))
            draft_mass += tl.exp(tl.load(draft_law + ids, mask=together, other=-float("inf")))
        tl.store(out + place, _keep(tl.sum(target_mass), tl.sum(draft_mass), tl.load(target + draft)))

    @triton.jit
    def _lantern_kernel(
        out,
        target,
        draft_law,
        width,
        target_sample,
        target_row,
        draft_sample,
        draft_row,
        drafts,
        neighbours,
        vocab_size,
        count,
        limit,
        FIXED: tl.constexpr,
        COUNT: tl.constexpr,
    ):
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
        tl.store(out + place, _keep(tl.exp(own) + lent, tl.exp(label), own))
