"""Attention of a window of new tokens to a static cache, up to each token's own place, in one launch.

A window has few queries and many keys: one program a head would leave most of a GPU idle. So the places are split, and
a program serves one split of one head of keys (Dao et al., "Flash-Decoding for long-context inference", 2023):

    split    the scores of a chunk of places, their softmax by the largest so far (Milakov, Gimelshein, "Online
             normalizer calculation for softmax", 2018), and the values mixed; programs past the text end at once
    combine  the splits of a query weighed by the mass of each, in their order, by whichever program of the same queries
             ends last: each counts itself after it has written its part (as in CUDA's sample `threadFenceReduction`)

No mask is made. A query knows its place and sees what stands before it, so a call reads the text that is there and not
the whole cache. All queries that share a head of keys (grouped-query attention) are rows of one product: keys and
values are not repeated. Sums are float32. How places are split depends on the size of the cache alone, so a query's
result does not depend on the batch. Where the text of all queries of a program is in the first split, nothing is
counted.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.library import custom_op

from visual_spec.kernels.launch import (
    FLOATS,
    early_launch,
    fused,
    on_gpu,
    rows_of_numbers,
    triton,
    wait_for_others,
)

# Numbers of a head that the kernel takes: tiles of more do not fit into the registers.
MOST_NUMBERS = 128
# A split is a multiple of so many places, and a cache has at most so many splits: what they write to be combined
# must stay small beside the cache.
_SPLIT, _MOST_SPLITS = 128, 16
# Most queries of a program, places that it reads at a time, and warps, by the bytes of a number: no more fit into the
# registers, float32 least of all, whose products no tensor core computes. A tile of a product has at least 16 rows.
_TILES = {2: (64, 64, 4), 4: (16, 32, 8)}
_FEWEST = 16
# Of a cache's memory, by their number: the counters of its calls, which follow each other. They are 0 between two.
_COUNTERS: WeakKeyDictionary[torch.UntypedStorage, dict[int, Tensor]] = WeakKeyDictionary()


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
        [R, W, H, D] in the dtype of the queries. On CUDA by the Triton kernel, elsewhere by
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


@custom_op("visual_spec::window_attention", mutates_args=())
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
    """`window_attention` by the Triton kernel.

    Raises:
        TypeError: a dtype that the kernel does not take.
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
    splits, of_group = -(-size // chunk), heads // groups
    most_splits, width = (1 << (number - 1).bit_length() for number in (splits, dim))
    most, columns, warps = _TILES[queries.element_size()]
    most = _FEWEST if one_order else most  # other tiles run other instructions
    tile = max(_FEWEST, min(most, 1 << (window * of_group - 1).bit_length()))
    tiles, prefix_mask = -(-window * of_group // tile), rows_of_numbers(prefix_mask)
    parts = torch.empty(
        mixed.numel() // dim * most_splits * (dim + 1), dtype=torch.float32, device=mixed.device
    )
    with torch.cuda.device_of(queries):
        _attention_kernel[(rows * groups, tiles, splits)](
            mixed,
            parts,
            _counters(keys, rows * groups * tiles),
            queries.contiguous(),
            keys,
            values,
            places.contiguous(),
            prefix_mask,
            window,
            (groups, *keys.stride()[:3], prefix_mask.shape[1], prefix_mask.stride(0)),
            scale * 1.4426950408889634,  # powers of 2 in place of e
            OF_GROUP=of_group,
            DIM=dim,
            WIDTH=max(16, width),
            ROWS=tile,
            COLUMNS=columns,
            CHUNK=chunk,
            SPLITS=most_splits,
            num_warps=8 if dim % 16 else warps,  # loaded number by number
            **early_launch(_attention_kernel, one_order, queries.device),
        )
    return mixed


def _counters(keys: Tensor, count: int) -> Tensor:
    """Return zeros, int32 [count], that a call leaves as they are: the same for all calls of a cache.

    A CUDA graph whose cache no call has read before has its own, which every replay sets to 0.
    """
    held = _COUNTERS.setdefault(keys.untyped_storage(), {})
    if count in held:
        return held[count]
    counters = torch.zeros(count, dtype=torch.int32, device=keys.device)
    if not (keys.is_cuda and torch.cuda.is_current_stream_capturing()):
        held[count] = counters
    return counters


if triton is not None:
    from triton import language as tl

    @triton.jit
    def _combine(
        mixed, parts, count, row, group, groups, splits, OF_GROUP: tl.constexpr, DIM: tl.constexpr,
        WIDTH: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    ):  # fmt: skip
        """Add the parts of a program's queries by their masses, in the order of the splits, some queries at a time."""
        split, number = tl.arange(0, SPLITS)[None], tl.arange(0, WIDTH)[None]
        for block in range(ROWS // 16):  # all parts of more do not fit into the registers
            query = tl.program_id(1) * ROWS + block * 16 + tl.arange(0, 16)
            known = query < count
            line, masses = _places_of_parts(parts, query, count, DIM, SPLITS)
            written = known[:, None] & (split < splits)
            best = tl.max(tl.load(masses[:, None] + split, mask=written, other=-float("inf")), 1)
            best = tl.where(known, best, 0.0)
            inside = known[:, None] & (number < DIM)
            total, mass = tl.zeros([16, WIDTH], tl.float32), tl.zeros([16], tl.float32)
            for each in tl.static_range(SPLITS):
                share = tl.load(masses + each, mask=known & (each < splits), other=-float("inf"))
                share = tl.exp2(share - best)
                part = tl.load(line[:, None] + each * DIM + number, mask=inside & (each < splits), other=0.0)
                total += part * share[:, None]
                mass += share
            done = tl.div_rn(total, tl.broadcast_to(mass[:, None], total.shape))  # by 1 exactly
            at = (row * (count // OF_GROUP) + query // OF_GROUP) * groups + group
            at = at * OF_GROUP + query % OF_GROUP
            tl.store(mixed + at[:, None] * DIM + number, done.to(mixed.dtype.element_ty), mask=inside)

    @triton.jit
    def _places_of_parts(parts, query, count, DIM: tl.constexpr, SPLITS: tl.constexpr):
        """Where parts of queries are written, [R * G, W * OF_GROUP, SPLITS, DIM], and their masses, which follow."""
        line = (tl.program_id(0).to(tl.int64) * count + query) * SPLITS
        return parts + line * DIM, parts + tl.num_programs(0).to(tl.int64) * count * SPLITS * DIM + line

    @triton.jit(do_not_specialize=["window"])  # one kernel for calls of one token and of several
    def _attention_kernel(
        mixed, parts, counters, queries, keys, values, places, prefix_mask, window, sizes, scale,
        OF_GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        CHUNK: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Some queries in one chunk of places, and in all if the others are done; masses are binary logarithms."""
        wait_for_others(EARLY)
        groups, row_stride, head_stride, place_stride, prefix, mask_stride = sizes
        infinity = float("inf")
        row = (tl.program_id(0) // groups).to(tl.int64)
        group = tl.program_id(0) % groups
        query = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # position * OF_GROUP + head of the group
        position = query // OF_GROUP
        known = position < window
        own = tl.load(places + row * window + position, mask=known, other=-1).to(tl.int32)
        start, last = tl.program_id(2) * CHUNK, tl.max(own, 0)
        if start <= last:
            stop = tl.minimum(start + CHUNK, last + 1)
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
            total = total / base[:, None]
            splits = tl.minimum(last // CHUNK + 1, tl.num_programs(2))  # those that come here
            if splits == 1:
                tl.store(
                    mixed + at[:, None] * DIM + number[None], total.to(mixed.dtype.element_ty), mask=inside
                )
            else:
                count = window * OF_GROUP
                line, masses = _places_of_parts(parts, query, count, DIM, SPLITS)
                mass = tl.where(mass > 0.0, best + tl.log2(base), -infinity)
                tl.store(masses + tl.program_id(2), mass, mask=known)
                tl.store(line[:, None] + tl.program_id(2) * DIM + number[None], total, mask=inside)
                tl.debug_barrier()  # all threads have written before one of them counts
                counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                    tl.store(counter, 0)  # for the next launch
                    _combine(
                        mixed, parts, count, row, group, groups, splits, OF_GROUP, DIM, WIDTH, ROWS, SPLITS
                    )
