"""The mass of a draft's cluster (`samplers.core.relaxed.clustered_acceptance`): definition and kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import launcher, on_gpu, triton
from visual_spec.kernels.neighbour_mass import TILE, WARPS, check_laws, fits, law_rows, one_a_draft


def clustered_mass(target: Tensor, draft_law: Tensor, drafts: Tensor, *, clusters: Tensor) -> Tensor:
    """As `grouped_mass`, with fixed groups.

    Args:
        target, draft_law, drafts: as in `grouped_mass`, and so is the result.
        clusters: int [V], the cluster of every token.
    """
    check_laws(target, draft_law, drafts)
    if clusters.shape != target.shape[-1:]:
        raise ValueError(
            f"clusters have shape {tuple(clusters.shape)}; pass [{target.shape[-1]}], one number a token."
        )
    by = _clustered_op if fits(target, draft_law) else clustered_mass_reference
    return by(target, draft_law, drafts, clusters)


def clustered_mass_reference(target: Tensor, draft_law: Tensor, drafts: Tensor, clusters: Tensor) -> Tensor:
    """The definition of `clustered_mass`, in PyTorch, on any device and in any precision."""
    together = clusters == clusters[drafts][..., None]  # [B, N, V]
    masses = [law.masked_fill(~together, -torch.inf).exp().sum(-1) for law in (target, draft_law)]
    own = target.gather(-1, drafts[..., None]).squeeze(-1)
    return (masses[0] / masses[1]).clamp_(max=1).masked_fill_(own.isneginf(), 0)


@triton_op("visual_spec::clustered_mass", mutates_args=())
def _clustered_op(target: Tensor, draft_law: Tensor, drafts: Tensor, clusters: Tensor) -> Tensor:
    by = clustered_mass_triton if on_gpu(target) else clustered_mass_reference
    return by(target, draft_law, drafts, clusters)


_clustered_op.register_fake(one_a_draft)


def clustered_mass_triton(target: Tensor, draft_law: Tensor, drafts: Tensor, clusters: Tensor) -> Tensor:
    """`clustered_mass` by the Triton kernel."""
    out = one_a_draft(target, draft_law, drafts)
    if drafts.numel() == 0:
        return out
    rows = law_rows(target, draft_law)
    with torch.cuda.device_of(target):
        launcher(_clustered_kernel)[(drafts.numel(),)](
            out,
            *rows,
            drafts.contiguous(),
            clusters.contiguous(),
            target.shape[-1],
            TILE=TILE,
            TILES=-(-target.shape[-1] // TILE),
            num_warps=WARPS,
        )
    return out


if triton is not None:
    from triton import language as tl

    from visual_spec.kernels.neighbour_mass import keep

    @triton.jit
    def _clustered_kernel(
        out, target, draft_law, width, target_sample, target_row, draft_sample, draft_row, drafts, clusters,
        vocab_size, TILE: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
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
        tl.store(out + place, keep(tl.sum(target_mass), tl.sum(draft_mass), tl.load(target + draft)))
