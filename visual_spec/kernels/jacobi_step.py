"""The bookkeeping of a call of Jacobi decoding, around the model and the draws: one launch before, one after.

Slots, drafts and their repair, and what a call commits are a number a slot each. As operations of PyTorch they are
about 150 launches a call, each of which waits for the one before. Here one program serves one row. The definitions are
the functions of `samplers.raster.jacobi_identical`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import triton_op

from visual_spec.kernels.launch import launcher, triton

BLOCK = 512  # committed tokens that a search reads at a time
_WARPS = 4


@triton_op("visual_spec::jacobi_open", mutates_args=("inputs",))
def open_window(
    tokens: Tensor,
    inputs: Tensor,
    lengths: Tensor,
    steady: Tensor | None,
    ahead: Tensor | None,
    picture: Tensor | None,
    width: int,
    count: int,
    back: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what a call is fed, on CUDA with Triton.

    Args:
        tokens, inputs, lengths, ahead, picture: as in `jacobi_identical.repaired`; `inputs` notes what is fed.
        steady: long [B, S], by slot: in how many calls the draft stayed; those of one and more are steady. None: see
            `repaired`.
        width: W, the positions of the call.
        count: how many drafts may be replaced, from the first on.
        back: slots from a token to its far neighbour.

    Returns:
        long [B, W] each: the slots that are fed, the tokens that stand there, and what is fed; long [B, W], the next
        slots, which are scored; bool [B, n] and long [B, n]: the drafts that are replaced, and the copies of steady
        ones, as from `repaired`, n being `count` or W - 1 if that is less.
    """
    outputs = _opened(tokens, inputs, lengths, steady, ahead, picture, width, count, back)
    if len(tokens) == 0:
        return outputs
    with torch.cuda.device_of(tokens):
        launcher(_open_kernel)[(len(tokens),)](
            *outputs, tokens, inputs, lengths, steady, ahead, picture, tokens.shape[1], width, outputs[4].shape[1],
            back, STEADY=steady is not None, PICTURE=picture is not None,
            WIDTH=1 << (width - 1).bit_length(), BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return outputs


@open_window.register_fake
def _opened(
    tokens: Tensor, inputs: Tensor, lengths: Tensor, steady: Tensor | None, ahead: Tensor | None,
    picture: Tensor | None, width: int, count: int, back: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    at, held, fed, slots = (tokens.new_empty(len(tokens), width) for _ in range(4))
    copies = tokens.new_empty(len(tokens), min(count, width - 1))
    return at, held, fed, slots, torch.empty_like(copies, dtype=torch.bool), copies


@triton_op(
    "visual_spec::jacobi_close",
    mutates_args=("tokens", "lengths", "target_calls", "commit_call", "near_ties", "steady", "ahead"),
)
def close_window(
    tokens: Tensor,
    lengths: Tensor,
    target_calls: Tensor,
    commit_call: Tensor,
    near_ties: Tensor | None,
    steady: Tensor | None,
    ahead: Tensor | None,
    picture: Tensor | None,
    drawn: Tensor,
    fed: Tensor,
    held: Tensor,
    copies: Tensor | None,
    near: Tensor | None,
    round: Tensor,
    window: int,
    num_tokens: int,
    direction: int | None,
    grid: Sequence[int],
) -> None:
    """Commit what a call has drawn, and draft the slots that enter the window, in place, on CUDA with Triton.

    Args:
        tokens, lengths, target_calls, commit_call, near_ties, steady, picture: of `IdenticalState`.
        ahead: its `copies_ahead`; None where no copies are judged.
        drawn: long [B, W], the draws of the call.
        fed, held, copies: from `open_window`.
        near: bool [B, W], draws at near-ties, where they are counted.
        round: long [], the number of the call.
        window, num_tokens: the most slots of a call, and the slots of a sample.
        direction: where drafts of new slots are copied from, see `copied_slots`: 0 for the left, 1 for above, 2 for
            earlier frames; None: they are left as they are. A picture comes first.
        grid: frames, height and width in tokens.
    """
    if len(tokens) == 0:
        return
    width, enters = drawn.shape[1], window - 1 if direction is not None or picture is not None else 0
    with torch.cuda.device_of(tokens):
        launcher(_close_kernel)[(len(tokens),)](
            tokens, lengths, target_calls, commit_call, near_ties, steady, ahead, picture, drawn.contiguous(), fed,
            held, copies, near, round, tokens.shape[1], width, 0 if copies is None else copies.shape[1], enters,
            num_tokens, grid[1] * grid[2], grid[2], TIES=near is not None, STEADY=steady is not None,
            AHEAD=ahead is not None, PICTURE=picture is not None, VIDEO=grid[0] > 1, DIRECTION=direction or 0,
            WIDTH=1 << (max(width, enters, 1) - 1).bit_length(), num_warps=_WARPS,
        )  # fmt: skip


@close_window.register_fake
def _closed(*_: object) -> None:
    return None


if triton is not None:
    from triton import language as tl

    @triton.jit
    def _open_kernel(
        at, held, fed, slots, replaced, copies, tokens, inputs, lengths, steady, ahead, picture, size, width, count,
        back, STEADY: tl.constexpr, PICTURE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """The window of one row."""
        row = tl.program_id(0).to(tl.int64)
        text, noted, out = tokens + row * size, inputs + row * size, row * width
        committed = tl.load(lengths + row)
        place = tl.arange(0, WIDTH)
        inside = place < width
        slot = committed + place
        here = tl.load(text + slot - 1, mask=inside)
        tl.store(at + out + place, slot - 1, mask=inside)
        tl.store(slots + out + place, slot, mask=inside)
        tl.store(held + out + place, here, mask=inside)
        tl.store(fed + out + place, here, mask=inside)
        tl.debug_barrier()
        over = committed >= 0  # whether copies replace steady drafts, too
        if STEADY:
            over = tl.load(ahead + row) > 0
        before = tl.load(text + committed - 1)
        number = 0
        while number < count:
            slot_here = committed + number
            draft = tl.load(text + slot_here)
            new, copy = draft, slot_here * 0 - 1
            marked = committed < 0
            if before != tl.load(noted + slot_here - 1):  # what was fed there when the draft was drawn
                far = tl.maximum(slot_here - back, 0)
                above = tl.load(text + far)
                if PICTURE:
                    shown = picture + row * size
                    marked = (tl.load(shown + slot_here - 1) == before) & (tl.load(shown + far) == above)
                    new = tl.where(marked, tl.load(shown + slot_here), draft)
                if (not marked) & (slot_here >= back):
                    best = slot_here * 0 - 1  # the last committed slot with the same two neighbours
                    start = slot_here * 0 + back
                    while start < committed:
                        other = start + tl.arange(0, BLOCK)
                        known = other < committed
                        alike = tl.load(text + other - 1, mask=known, other=-2) == before
                        alike &= tl.load(text + other - back, mask=known, other=-2) == above
                        best = tl.maximum(best, tl.max(tl.where(alike, other, -1), 0))
                        start += BLOCK
                    if best >= 0:
                        found = tl.load(text + best)
                        young = committed >= 0
                        if STEADY:
                            young = tl.load(steady + row * size + slot_here) == 0
                        copy = tl.where(young | (found == draft), copy, found)
                        marked = young | over
                        new = tl.where(marked, found, draft)
            tl.store(fed + out + number + 1, new)
            tl.store(replaced + row * count + number, marked)
            tl.store(copies + row * count + number, copy)
            before = new
            number += 1
        tl.debug_barrier()
        tl.store(noted + slot - 1, tl.load(fed + out + place, mask=inside), mask=inside)

    @triton.jit
    def _close_kernel(
        tokens, lengths, target_calls, commit_call, near_ties, steady, ahead, picture, drawn, fed, held, copies, near,
        round, size, width, judged, enters, num_tokens, frame, line, TIES: tl.constexpr, STEADY: tl.constexpr,
        AHEAD: tl.constexpr, PICTURE: tl.constexpr, VIDEO: tl.constexpr, DIRECTION: tl.constexpr,
        WIDTH: tl.constexpr,
    ):  # fmt: skip
        """What a call commits in one row."""
        row = tl.program_id(0).to(tl.int64)
        text, calls, out = tokens + row * size, commit_call + row * size, row * width
        committed = tl.load(lengths + row)
        place = tl.arange(0, WIDTH)
        inside = place < width
        slot = committed + place
        draw = tl.load(drawn + out + place, mask=inside, other=-1)
        # A draw counts if all drafts before it are the tokens that were drawn there.
        more = place < width - 1
        refused = inside & ~(more & (tl.load(fed + out + place + 1, mask=more, other=-1) == draw))
        count = tl.min(tl.where(refused, place, width), 0) + 1
        final = place < count
        if TIES:
            ties = tl.load(near + out + place, mask=inside, other=0) != 0
            ties &= final & (slot < num_tokens)
            tl.store(near_ties + row, tl.load(near_ties + row) + tl.sum(ties.to(tl.int64), 0))
        if AHEAD:
            copy = tl.load(copies + row * judged + place, mask=final & (place < judged), other=-1)
            draft = tl.load(held + out + place + 1, mask=final & (place < judged) & more, other=-1)
            won = (copy == draw).to(tl.int64) - (draft == draw).to(tl.int64)
            tl.store(ahead + row, tl.load(ahead + row) + tl.sum(tl.where(copy != -1, won, 0), 0))
        if STEADY:
            ages = steady + row * size + slot
            same = tl.load(text + slot, mask=inside) == draw
            age = tl.minimum(tl.load(ages, mask=inside, other=0) + 1, 2)
            tl.store(ages, tl.where(same, age, 0), mask=inside)
        # What enters the window: after the last slot that was scored, unless an earlier, wider call has scored it.
        newest = committed + width - 1
        now = tl.minimum(committed + count, num_tokens)
        new = now + place
        entering = (place < enters) & (new > newest)
        entering &= tl.load(calls + new, mask=entering, other=1) == 0
        if PICTURE:
            first = tl.load(picture + row * size + new, mask=entering, other=0)
        else:
            # In the newest line, or in the one above it.
            above = newest - (line - (new - newest) % line) % line
            source = tl.where(above >= 0, above, newest)
            if VIDEO:
                earlier = newest - (frame - (new - newest) % frame) % frame
                earlier = tl.where(earlier >= 0, earlier, newest)
                source = tl.where(above >= new - new % frame, above, earlier)
            if DIRECTION != 1:  # not from above
                source = tl.where(new // line == newest // line, newest, source)
            if VIDEO and DIRECTION == 2:
                earlier = newest - (frame - (new - newest) % frame) % frame
                source = tl.where(earlier >= 0, earlier, source)
            just_drawn = source >= committed
            first = tl.load(drawn + out + source - committed, mask=entering & just_drawn, other=0)
            first = tl.where(just_drawn, first, tl.load(text + source, mask=entering, other=0))
        tl.debug_barrier()  # all of the old text is read
        tl.store(text + slot, draw, mask=inside)
        tl.store(calls + slot, tl.zeros_like(draw) + tl.load(round), mask=inside)
        tl.store(text + new, first, mask=entering)
        tl.store(target_calls + row, tl.load(target_calls + row) + (committed < num_tokens).to(tl.int64))
        tl.store(lengths + row, now)
