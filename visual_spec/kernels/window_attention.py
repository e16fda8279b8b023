"""Attention of a window of new tokens to a static cache, up to each token's own place.

A window has few queries and many keys: one program a head would leave most of a GPU idle. So the places are split, and
a program serves one split of one head of keys (Dao et al., "Flash-Decoding for long-context inference", 2023):

    split    the scores of a chunk of places, their softmax by the largest so far (Milakov, Gimelshein, "Online
             normalizer calculation for softmax", 2018), and the values mixed; programs past the text end at once
    combine  the splits of a query weighed by the mass of each

No mask is made. A query knows its place and sees what stands before it, so a call reads the text that is there and not
the whole cache. All queries that share a head of keys (grouped-query attention) are rows of one product: keys and
values are not repeated. Sums are float32. How places are split depends on the size of the cache alone, so a query's
result does not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import (
    FLOATS,
    early_launch,
    fused,
    launcher,
    on_gpu,
    rows_of_numbers,
    triton,
    wait_for_others,
)

# Numbers of a head that the kernel takes: tiles of more do not fit into the registers.
MOST_NUMBERS = 128
# A split is a multiple of so many places, and a cache has at most so many splits: what they write for the second launch
# must stay small beside the cache.
_SPLIT, _MOST_SPLITS = 128, 16
# Most queries of a program, places that it reads at a time, and warps, by the bytes of a number: no more fit into the
# registers, float32 least of all, whose products no tensor core computes. A tile of a product has at least 16 rows.
_TILES = {2: (64, 64, 4), 4: (16, 32, 8)}
_FEWEST = 16


def takes(activations: Tensor, head_dim: int) -> bool:
    """Return whether the kernel takes heads of this size and activations like these: on a GPU, no gradients."""
    return fused(activations) and head_dim <= MOST_NUMBERS


def window_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    prefix_mask: Tensor,
    scale: float | None = None,
    *,
    one_order: bool = False,
) -> Tensor:
    """Attend to the places of a cache before each query's own, and to its own.

    Args:
        queries: [R, W, H, D]; heads n * H / G to (n + 1) * H / G - 1 share head n of the keys.
        keys, values: [R, G, S, D].
        places: long [R, W], 0 to S - 1: the places of the queries, whose keys are already written.
        prefix_mask: bool [R, T], False at places of the prefix that only their own queries see, such as padding.
        scale: of the scores; None: D ** -0.5.
        one_order: give a query the same bits whatever the window, in one cache: programs have 16 queries, however many
            there are. Kernels may then be launched before the one before them has ended, where the device can.

    Returns:
        [R, W, H, D] in the dtype of the queries. On CUDA by the Triton kernels, elsewhere by
        `window_attention_reference`.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    _check(queries, keys, values, places, prefix_mask)
    factor = queries.shape[-1] ** -0.5 if scale is None else scale
    return _window_attention_op(queries, keys, values, places, prefix_mask, factor, one_order)


def window_attention_reference(
    queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, prefix_mask: Tensor, scale: float,
    one_order: bool = False,
) -> Tensor:  # fmt: skip
    """The definition of `window_attention`, in PyTorch, on any device; in float32, or float64 for such queries."""
    kind = torch.promote_types(queries.dtype, torch.float32)
    place = torch.arange(keys.shape[2], device=keys.device)
    open_places = torch.ones(len(keys), len(place), dtype=torch.bool, device=keys.device)
    open_places[:, : prefix_mask.shape[1]] = prefix_mask
    own = places[..., None]  # [R, W, 1]
    seen = (open_places[:, None] & (place < own)) | (place == own)  # [R, W, S]
    by_group = queries.to(kind).unflatten(2, (keys.shape[1], -1))  # [R, W, G, H / G, D]
    scores = torch.einsum("rwghd,rgsd->rwghs", by_group, keys.to(kind)) * scale
    shares = scores.masked_fill(~seen[:, :, None, None], -torch.inf).softmax(-1)
    return torch.einsum("rwghs,rgsd->rwghd", shares, values.to(kind)).flatten(2, 3).to(queries.dtype)


def _check(queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, prefix_mask: Tensor) -> None:
    if queries.dim() != 4 or keys.dim() != 4 or keys.shape != values.shape:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)}; "
            "pass [R, W, H, D], and [R, G, S, D] twice."
        )
    (rows, window, heads, dim), (held_rows, groups, size, held_dim) = queries.shape, keys.shape
    if held_rows != rows or held_dim != dim or heads % groups:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; pass [R, W, H, D] and "
            "[R, G, S, D] of the same R and D, with H a multiple of G."
        )
    if places.shape != (rows, window):
        raise ValueError(f"places have shape {tuple(places.shape)}; pass [{rows}, {window}].")
    if prefix_mask.dim() != 2 or len(prefix_mask) != rows or prefix_mask.shape[1] > size:
        raise ValueError(
            f"the prefix mask has shape {tuple(prefix_mask.shape)}; pass [{rows}, T], T at most {size}."
        )


@triton_op("visual_spec::window_attention", mutates_args=())
def _window_attention_op(
    queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, prefix_mask: Tensor, scale: float,
    one_order: bool = False,
) -> Tensor:  # fmt: skip
    function = window_attention_triton if on_gpu(queries) else window_attention_reference
    return function(queries, keys, values, places, prefix_mask, scale, one_order)


@_window_attention_op.register_fake
def _mixed_like(queries: Tensor, *_: Tensor | float) -> Tensor:
    return queries.new_empty(queries.shape)


def window_attention_triton(
    queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, prefix_mask: Tensor, scale: float,
    one_order: bool = False,
) -> Tensor:  # fmt: skip
    """`window_attention` by the Triton kernels.

    Raises:
        TypeError: a dtype that the kernels do not take.
        ValueError: heads of more than `MOST_NUMBERS` numbers, or keys and values that lie differently in memory.
    """
    if not queries.dtype == keys.dtype == values.dtype or queries.dtype not in FLOATS:
        raise TypeError(
            f"queries are {queries.dtype}, keys {keys.dtype} and values {values.dtype}; pass float32, bfloat16 or "
            "float16, three times the same."
        )
    (rows, window, heads, dim), (_, groups, size, _) = queries.shape, keys.shape
    if dim > MOST_NUMBERS or keys.stride() != values.stride() or keys.stride(-1) != 1:
        raise ValueError(
            f"heads of {dim} numbers, keys and values with strides {keys.stride()} and {values.stride()}; pass at most "
            f"{MOST_NUMBERS} numbers, and equal strides, the last one 1."
        )
    mixed = _mixed_like(queries)
    if mixed.numel() == 0:
        return mixed
    chunk = _SPLIT * -(-size // (_SPLIT * _MOST_SPLITS))
    splits, count = -(-size // chunk), window * (heads // groups)
    parts = torch.empty(rows, window, heads, splits, dim, dtype=torch.float32, device=queries.device)
    masses = torch.empty(rows, window, heads, splits, dtype=torch.float32, device=queries.device)
    most, columns, warps = _TILES[queries.element_size()]
    most = _FEWEST if one_order else most  # other tiles run other instructions
    tile = max(_FEWEST, min(most, 1 << (count - 1).bit_length()))
    places, prefix_mask = places.contiguous(), rows_of_numbers(prefix_mask)
    width = 1 << (dim - 1).bit_length()
    with torch.cuda.device_of(queries):
        launcher(_split_kernel)[(rows * groups, -(-count // tile), splits)](
            parts,
            masses,
            queries.contiguous(),
            keys,
            values,
            places,
            prefix_mask,
            window,
            groups,
            prefix_mask.shape[1],
            prefix_mask.stride(0),
            *keys.stride()[:3],
            scale * 1.4426950408889634,  # powers of 2 in place of e
            splits,
            OF_GROUP=heads // groups,
            DIM=dim,
            WIDTH=max(16, width),
            ROWS=tile,
            COLUMNS=columns,
            CHUNK=chunk,
            num_warps=8 if dim % 16 else warps,  # loaded number by number
            **early_launch(_split_kernel, one_order, queries.device),
        )
        launcher(_combine_kernel)[(rows * window * heads,)](
            mixed, parts, masses, places, heads, chunk, splits, DIM=dim, WIDTH=width,
            SPLITS=1 << (splits - 1).bit_length(), num_warps=2,
            **early_launch(_combine_kernel, one_order, queries.device),
        )  # fmt: skip
    return mixed


if triton is not None:
    from triton import language as tl

    @triton.jit(do_not_specialize=["window"])  # one kernel for calls of one token and of several
    def _split_kernel(
        parts, masses, queries, keys, values, places, prefix_mask, window, groups, prefix, mask_stride, row_stride,
        head_stride, place_stride, scale, splits, OF_GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Part and mass of some queries in one chunk of places; mass is the binary logarithm of the sum."""
        wait_for_others(EARLY)
        infinity = float("inf")
        row = (tl.program_id(0) // groups).to(tl.int64)
        group = tl.program_id(0) % groups
        query = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # position * OF_GROUP + head of the group
        position = query // OF_GROUP
        known = position < window
        own = tl.load(places + row * window + position, mask=known, other=-1).to(tl.int32)
        start = tl.program_id(2) * CHUNK
        stop = tl.minimum(start + CHUNK, tl.max(own, 0) + 1)
        if start < stop:
            number = tl.arange(0, WIDTH)
            # Of all queries, the ones of one head of keys: [R, W, G, OF_GROUP].
            at = ((row * window + position) * groups + group) * OF_GROUP + query % OF_GROUP
            inside = known[:, None] & (number < DIM)[None]
            asked = tl.load(queries + at[:, None] * DIM + number[None], mask=inside, other=0.0)
            held = row * row_stride + group * head_stride
            best = tl.full([ROWS], -infinity, tl.float32)
            mass = tl.zeros([ROWS], tl.float32)
            total = tl.zeros([ROWS, WIDTH], tl.float32)
            for step in range(CHUNK // COLUMNS):  # of known length: past the text nothing is loaded
                place = start + step * COLUMNS + tl.arange(0, COLUMNS)
                there = place < stop
                line = held + place.to(tl.int64) * place_stride
                held_here = (number < DIM)[:, None] & there[None]
                key = tl.load(keys + line[None] + number[:, None], mask=held_here, other=0.0)
                scores = tl.dot(asked, key, input_precision="ieee") * scale
                of_prefix = there & (place < prefix)
                shown = tl.load(prefix_mask + row * mask_stride + place, mask=of_prefix, other=1) != 0
                seen = (shown[None] & (place[None] < own[:, None])) | (place[None] == own[:, None])
                scores = tl.where(seen, scores, -infinity)
                higher = tl.maximum(best, tl.max(scores, 1))
                base = tl.where(higher == -infinity, 0.0, higher)
                shares = tl.exp2(scores - base[:, None])
                fade = tl.exp2(best - base)
                mass = mass * fade + tl.sum(shares, 1)
                value = tl.load(values + line[:, None] + number[None], mask=tl.trans(held_here), other=0.0)
                total = tl.dot(shares.to(value.dtype), value, total * fade[:, None], input_precision="ieee")
                best = higher
            base = tl.where(mass > 0.0, mass, 1.0)
            to = at * splits + tl.program_id(2)
            tl.store(masses + to, tl.where(mass > 0.0, best + tl.log2(base), -infinity), mask=known)
            tl.store(parts + to[:, None] * DIM + number[None], total / base[:, None], mask=inside)

    @triton.jit
    def _combine_kernel(
        mixed, parts, masses, places, heads, chunk, splits, DIM: tl.constexpr, WIDTH: tl.constexpr,
        SPLITS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One head of one query: the splits up to its place; after it nothing was written."""
        wait_for_others(EARLY)
        at = tl.program_id(0).to(tl.int64)
        own = tl.load(places + at // heads)
        split = tl.arange(0, SPLITS)
        written = split * chunk <= own
        mass = tl.load(masses + at * splits + split, mask=written, other=-float("inf"))
        shares = tl.exp2(mass - tl.max(mass, 0))  # finite: a query sees its own place
        number = tl.arange(0, WIDTH)
        inside = written[:, None] & (number < DIM)[None]
        part = tl.load(parts + (at * splits + split[:, None]) * DIM + number[None], mask=inside, other=0.0)
        total = tl.sum(part * shares[:, None], 0) / tl.sum(shares, 0)
        tl.store(mixed + at * DIM + number, total.to(mixed.dtype.element_ty), mask=number < DIM)
