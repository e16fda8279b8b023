"""Jacobi decoding with the noise of plain decoding: acceptance "identical", the default sampler, from top to bottom.

One call draws every slot of a window with the slot's own noise, given drafts of the slots before. The first draw is a
token of plain decoding; so is every next one, as long as the drafts before it were the tokens that were drawn. The
other draws are the drafts of the next call. `naive.identical_jacobi` is this in 17 lines. Any draft is allowed here, so
the rest of this file is about good ones:

    initial    of a slot that no call has scored: a copy of a neighbour, or as `initial_draft` says (`enter`).
    carried    what the last call drew there, after the token that was fed before the slot.
    repaired   where another token stands there since, the carried draft is stale. Then the last token that stood after
               the same two neighbours is copied (`repaired`). A draft that the last two calls drew gives way only in
               pictures where copies were right more often than such drafts (`copies_led`); no weights, no
               second model.
    pictured   the token of a whole picture that a drafter drew beforehand, where that has the same two neighbours;
               else as repaired. Slots that no call has scored are drafted from it, too.
    chosen     the token of a drafter, where it wins by the margin that the carried draft deserves (`redrafting`).

On a GPU two kernels do what `opened`, `close` and `enter` say, in one launch each (`kernels.jacobi_step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.kernels.launch import on_gpu, on_host
from visual_spec.models.core.protocol import DecodeState, TokenGrid
from visual_spec.samplers.core.checks import WIDTHS, device_of
from visual_spec.samplers.core.drafts import (
    LAST_LAW,
    LEFT,
    PREVIOUS_FRAME,
    UNIFORM,
    UP,
    Draft,
    copied_slots,
    uniform_tokens,
)
from visual_spec.samplers.core.noise import TOKEN
from visual_spec.samplers.core.state import Run, State

CARRIED: Final = "carried"
REPAIRED: Final = "repaired"
PICTURED: Final = "pictured"
CHOSEN: Final = "chosen"
DRAFTS = (CARRIED, REPAIRED, PICTURED, CHOSEN)

USUAL, NARROWEST = 32, 4  # windows without a choice of the user's: of one picture, and of the largest batches
# Positions of such a call, in all rows of the batch. On two cores of a Xeon more of them cost more than their tokens
# save: 16 pictures of `shapes` at batch 4 and 8 decode fastest with windows 16 and 8. On an EPYC these gain little.
_POSITIONS = 128
UNKNOWN: Final = -1  # a slot that no call was fed
_COPIES = {LEFT: 0, UP: 1, PREVIOUS_FRAME: 2}  # the drafts of new slots that the kernel knows, by its numbers
_HALF: Final = 1 << 32  # more than any token and any place


@dataclass
class IdenticalState(State):
    """A batch between two calls. `tokens` holds drafts for the W - 1 slots after the committed tokens.

    Attributes:
        window: W, the most slots that a call scores.
        width: slots that the next call scores, at most the window; None: the window.
        inputs: long [B, L + scratch], by slot: what the last call was fed there, `UNKNOWN` before any. None where
            drafts are carried.
        picture: long [B, L + scratch], by slot: what the drafter drew beforehand, with "pictured" drafts.
        drafter_cache: the drafter's own state, with "chosen" drafts, as `fed`.
        fed: long [B], the number of leading slots that the drafter has been fed in final form.
        steady: long [B, L + scratch], by slot: how many calls in a row left the draft as it was, at most 2; with
            "repaired" and "chosen" drafts.
        copies_ahead: long [B], with "repaired" drafts: settled slots where a copy was right and a steady draft wrong,
            less those where it was the other way round.
    """

    window: int = 1
    width: int | None = None
    inputs: Tensor | None = None
    picture: Tensor | None = None
    drafter_cache: DecodeState | None = None
    fed: Tensor | None = None
    steady: Tensor | None = None
    copies_ahead: Tensor | None = None


def prepare(settings: Any, run: Run) -> IdenticalState:
    """Return the state after the prefill. `settings`: a configuration of `SpeculativeJacobiSampler`."""
    window = run.window
    state = IdenticalState.begin(run, scratch=window, window=window)
    if window == 1:
        return state  # of plain decoding
    if settings.drafts != CARRIED:
        state.inputs = torch.full_like(state.tokens, UNKNOWN)
    if settings.drafts not in (CARRIED, PICTURED):
        state.steady = torch.zeros_like(state.tokens)
    if settings.drafts in (None, REPAIRED):
        state.copies_ahead = torch.zeros_like(state.lengths)
    if settings.drafts == PICTURED:
        from visual_spec.samplers.orders.ordered import whole_picture

        state.picture = F.pad(whole_picture(run, state.tokens[:, 0]), (0, window))
        run.lap("draft")
    if settings.drafts == CHOSEN:
        from visual_spec.samplers.core.drafters import start_drafter

        state.drafter_cache = start_drafter(run, window=window)
        state.fed = torch.zeros_like(state.lengths)
    enter(settings.initial_draft, run, state, run.view.first(run.cache.logits), state.lengths[:, None] - 1)
    return state


def step(settings: Any, run: Run, state: IdenticalState) -> None:
    """Make one call: commit the drafts that are drawn again, up to the first that is not, and one token more."""
    width = min(state.width or state.window, state.window)
    if settings.window is None and run.fixed_width is None:
        rows = len(state.lengths) * (2 if run.guided else 1)
        width = min(width, window_of_rows(rows, run.device.type))
    if width == 1 and state.drafter_cache is None:  # which would have to see every call
        from visual_spec.samplers.raster.autoregressive import plain_step

        return plain_step(run, state)
    if state.drafter_cache is None:
        now = opened(state, width, settings.redrafts, run.model.grid)
    else:
        now = chosen(settings, run, state, width)
    logits = run.score(state.cache, now.fed, now.at)  # [R, W, V]
    run.lap("model")
    state.round += 1
    drawn, near = run.draw(logits, now.slots)  # [B, W] each
    if state.drafter_cache is not None and hasattr(run.drafter, "observe"):
        run.drafter.observe(state.drafter_cache, state.cache.features, now.at)
    if not close(settings.initial_draft, run, state, now, drawn, near):
        enter(settings.initial_draft, run, state, logits[:, -1:], now.slots[:, -1:])
    run.lap("verify")


class FedWindow(NamedTuple):
    """What a call is fed, long [B, W] each but for the last two.

    Attributes:
        at, held, fed: the slots that are fed, the tokens that stand there (the newest one, then drafts), and what is
            fed in their place.
        slots: the slots that are scored, each predicted after the token before it.
        replaced, copies: of the first drafts, see `repaired`.
    """

    at: Tensor
    held: Tensor
    fed: Tensor
    slots: Tensor
    replaced: Tensor | None = None
    copies: Tensor | None = None


def opened(state: IdenticalState, width: int, count: int, grid: TokenGrid) -> FedWindow:
    """Return the next window of a state, with up to `count` drafts repaired."""
    picture, ahead = state.picture, state.copies_ahead
    steady = None if ahead is None else state.steady
    if state.inputs is not None and on_gpu(state.tokens):
        from visual_spec.kernels.jacobi_step import open_window  # kernels are imported where they run

        given = (state.tokens, state.inputs, state.lengths, steady, ahead, picture)
        back = grid.width if grid.frames == 1 else grid.height * grid.width
        return FedWindow(*open_window(*given, width, count, back))
    slots = state.next_slots(width)
    at = slots - 1
    held = state.tokens.gather(1, at)
    if state.inputs is None:
        return FedWindow(at, held, held, slots)
    young = None if steady is None else steady.gather(1, at) > 0
    given = (state.tokens, state.inputs, state.lengths, held, at, count, grid, picture, young, ahead)
    fed, replaced, copies = repaired(*given)
    return FedWindow(at, held, fed, slots, replaced, copies)


def chosen(settings: Any, run: Run, state: IdenticalState, width: int) -> FedWindow:
    """Return the next window, with drafts of a drafter where they are better."""
    from visual_spec.samplers.raster.redrafting import Chosen, redrafted

    slots = state.next_slots(width)
    at = slots - 1
    held = state.tokens.gather(1, at)
    source = Chosen(run, state, at[:, 1:], state.window, True, state.steady)
    draft = redrafted(state, at[:, 1:], Draft(held[:, 1:], None, "last call"), settings.redrafts, source)
    run.lap("draft")
    return FedWindow(at, held, torch.cat([held[:, :1], draft.tokens], 1), slots)


def close(
    initial: str, run: Run, state: IdenticalState, now: FedWindow, drawn: Tensor, near: Tensor | None
) -> bool:
    """Commit the draws of a call, and keep the others as drafts. Returns whether slots have entered the window, too."""
    if on_gpu(drawn):
        from visual_spec.kernels.jacobi_step import close_window
        from visual_spec.kernels.law import as_round

        direction = _COPIES.get(initial) if state.picture is None else _COPIES[LEFT]
        before = None if state.end is None else state.lengths.clone()
        judged = None if now.copies is None else state.copies_ahead
        counts = (state.lengths, state.target_calls, state.commit_call, state.near_ties, state.steady)
        call, grid = as_round(state.round, drawn), run.model.grid
        close_window(
            state.tokens, *counts, judged, state.picture, drawn, now.fed, now.held, now.copies, near, call,
            state.window, run.num_tokens, direction, (grid.frames, grid.height, grid.width),
        )  # fmt: skip
        if state.end is not None and before is not None:
            state.stop_at_ends(state.end, now.slots, before, run.num_tokens)
        return direction is not None
    slots = now.slots
    # A draw counts if all drafts before it are the tokens that were drawn there.
    kept = (drawn[:, :-1] == now.fed[:, 1:]).long().cumprod(1).sum(1)
    if now.copies is not None and state.copies_ahead is not None:
        state.copies_ahead += copies_led(now.copies, now.held[:, 1:], drawn, kept + 1)
    if state.steady is not None:
        same = state.tokens.gather(1, slots) == drawn
        age = (state.steady.gather(1, slots) + 1).clamp_(max=2)
        state.steady.scatter_(1, slots, age.mul_(same))
    state.tokens.scatter_(1, slots, drawn)
    state.commit(slots, kept + 1, run.num_tokens, near)
    return False


def window_of_rows(rows: int, device_type: str = "cpu") -> int:
    """Return the window of a batch of so many rows, guidance rows included: as wide as its call stays small.

    Where not even the narrowest one does, a GPU takes it, and a processor decodes plainly: at 64 and 128 rows 4 slots
    decoded `things` at 1.06 and 0.97 times plain decoding's speed, `shapes` at 0.93 and 0.88 (one EPYC core).
    """
    fitting = [width for width in WIDTHS if NARROWEST <= width <= USUAL and rows * width <= _POSITIONS]
    return max(fitting, default=1 if device_type == "cpu" else NARROWEST)


def widest(run: Run) -> int:
    """Return the most slots that a call of a run may score where no window was asked for. Asked before the prefill.

    Rows that decode plainly keep one pace and leave together, unless a text may end: no window ever opens. Such a run
    is that of `AutoregressiveSampler`, with no room for drafts in its cache and its noise.
    """
    rows = run.batch_size * (2 if run.guided else 1)
    together = run.end is None and window_of_rows(rows, device_of(run.model).type) == 1
    return 1 if together else USUAL


def enter(initial: str, run: Run, state: IdenticalState, logits: Tensor, newest: Tensor) -> None:
    """Draft the slots of the next window that no call has scored yet.

    Args:
        initial: how, see `SpeculativeJacobiSampler`; a picture stands in for every kind.
        logits: [R, 1, V] of `newest`, long [B, 1], the last slot that the last call scored.
    """
    slots = state.next_slots(state.window - 1)
    if state.picture is not None:
        drafts = state.picture.gather(1, slots)
    elif initial == UNIFORM:
        allowed = run.law.law.allowed or (0, run.model.vocab_size)
        drafts = uniform_tokens(run.noise, slots, state.round, allowed)
    elif initial == LAST_LAW:
        law = run.law(logits, newest, run.guided)  # [B, 1, V]
        drafts = run.noise.categorical(law.expand(-1, slots.shape[1], -1), slots, TOKEN)
    else:
        source = copied_slots(initial, slots, newest, run.model.grid, state.tokens)
        drafts = state.tokens.gather(1, source)
    # An earlier, wider call may have scored a slot: its draw is a better draft.
    scored = state.commit_call.gather(1, slots) > 0
    state.tokens.scatter_(1, slots, torch.where(scored, state.tokens.gather(1, slots), drafts))


def repaired(
    tokens: Tensor,
    inputs: Tensor,
    lengths: Tensor,
    fed: Tensor,
    at: Tensor,
    count: int,
    grid: TokenGrid,
    picture: Tensor | None = None,
    steady: Tensor | None = None,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Replace stale drafts by copies.

    A draft is stale if the token before it is another one than in the last call. Its copy is the last committed token
    with the same two neighbours: the token before, and the one above; in a video the one at the same place a frame
    earlier. Notes in `inputs` what is fed.

    Args:
        tokens: long [B, S], by slot.
        inputs: long [B, S], by slot: what the last call was fed.
        lengths: long [B], committed slots.
        fed: long [B, W], at the slots `at`: the newest token, then drafts.
        count: how many drafts may be replaced, from the first on.
        picture: long [B, S], by slot: a picture whose token is taken in the first place, where it has the same
            neighbours.
        steady: bool [B, W], the drafts at `at` that the last call drew again. They stay, and their copies are
            returned, to tell which of both are right. None: of no draft.
        ahead: long [B], with `steady`: in rows above 0 copies replace steady drafts, too.

    Returns:
        long [B, W], what is fed; bool [B, n], which of the first drafts are replaced, n being `count` or W - 1 if that
        is less; and the copies of steady drafts, long [B, n], where they are other tokens, `UNKNOWN` elsewhere; None
        where there are none.
    """
    back = grid.width if grid.frames == 1 else grid.height * grid.width
    young = None if steady is None or ahead is None else ~steady | (ahead > 0)[:, None]
    if not on_host(fed):
        return _repaired_at_once(tokens, inputs, lengths, fed, at, count, back, picture, steady, young)
    fed, replaced = fed.clone(), torch.zeros_like(fed[:, 1 : count + 1], dtype=torch.bool)
    marks, copies = replaced.numpy(), None
    may, ask = (None if part is None else part.numpy() for part in (young, steady))
    for row, (committed, newest) in enumerate(zip(lengths.tolist(), at[:, 0].tolist(), strict=True)):
        text, new = tokens[row].numpy(), fed[row].numpy()
        shown = None if picture is None else picture[row].numpy()
        # Of every committed token that has both neighbours: the token before it, and the far one.
        known = max(committed - back, 0)
        beside, beyond = text[back - 1 : back - 1 + known], text[:known]
        for place, last in enumerate(inputs[row, newest : newest + replaced.shape[1]].tolist()):
            slot, before = newest + 1 + place, new[place]
            if before == last:
                continue  # not stale
            far = max(slot - back, 0)
            if shown is not None and shown[slot - 1] == before and shown[far] == text[far]:
                new[place + 1], marks[row, place] = shown[slot], True
            elif slot >= back:
                alike = ((beside == before) & (beyond == text[far])).nonzero()[0]
                if not len(alike):
                    continue
                copy = text[back + alike[-1]]
                if ask is not None and ask[row, place + 1] and copy != new[place + 1]:
                    copies = (
                        torch.full_like(replaced, UNKNOWN, dtype=torch.long) if copies is None else copies
                    )
                    copies[row, place] = int(copy)
                if may is None or may[row, place + 1]:
                    new[place + 1], marks[row, place] = copy, True
    inputs.scatter_(1, at, fed)
    return fed, replaced, copies


def copies_led(copies: Tensor, drafts: Tensor, drawn: Tensor, num_final: Tensor) -> Tensor:
    """Of the slots that a call settled: how often a copy was right, less how often the draft was; long [B].

    Args:
        copies: long [B, n], from `repaired`.
        drafts, drawn: long [B, n] or more, the drafts beside them, and what the call drew there.
        num_final: long [B], how many of the draws are final.
    """
    size = copies.shape[1]
    final = torch.arange(size, device=copies.device) < num_final[:, None]
    truth = drawn[:, :size]
    won = (copies == truth).long() - (drafts[:, :size] == truth).long()
    return (won * (final & (copies != UNKNOWN))).sum(1)


def _repaired_at_once(
    tokens: Tensor,
    inputs: Tensor,
    lengths: Tensor,
    fed: Tensor,
    at: Tensor,
    count: int,
    back: int,
    picture: Tensor | None,
    steady: Tensor | None,
    young: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `repaired`, by operations that depend on no token. `back`: slots from a token to its far neighbour."""
    slots, drafts = at[:, 1 : count + 1], fed[:, 1 : count + 1, None]  # [B, n], [B, n, 1]
    size = tokens.shape[1]
    far = (slots - back).clamp(min=0)
    # [B, n], [B, S]: the far neighbours of the slots, and of the committed tokens; one that is not there equals none.
    above = tokens.gather(1, far)
    places = torch.arange(size, device=tokens.device)
    others = torch.where((places >= back) & (places < lengths[:, None]), tokens.roll(back, 1), -2)
    alike = others[:, None] == torch.where(slots >= back, above, -1)[..., None]  # [B, n, S]
    may = alike if young is None else alike & young[:, 1 : count + 1, None]
    # All tokens that a slot may get, each with its rank above and its id below 2 ** 32; and the token that must stand
    # before the slot for it. The carried draft is the last of them; after the token that it was drawn for, the first.
    ranked = [torch.where(may, (places * _HALF + tokens)[:, None], drafts)]  # [B, n, S]
    wanted = [tokens.roll(1, 1)[:, None].expand(alike.shape)]
    if picture is not None:
        same = (picture.gather(1, far) == above)[..., None]
        ranked.append(torch.where(same, size * _HALF + picture.gather(1, slots)[..., None], drafts))
        wanted.append(picture.gather(1, slots - 1)[..., None])
    ranked.append((size + 1) * _HALF + drafts)
    wanted.append(inputs.gather(1, slots - 1)[..., None])
    numbers, before = torch.cat(ranked, 2), torch.cat(wanted, 2)  # [B, n, S + 1]
    last_fed = wanted[-1][..., 0]
    # Each slot's choice depends on the one before it. All are made at once, again and again: after i rounds the first i
    # stand.
    found = drafts[..., 0]
    for _ in range(slots.shape[1]):
        found = torch.where(before == fed[:, : slots.shape[1], None], numbers, drafts).amax(2)  # [B, n]
        fed = torch.cat([fed[:, :1], found & (_HALF - 1), fed[:, slots.shape[1] + 1 :]], 1)
    inputs.scatter_(1, at, fed)
    copies = None
    if steady is not None:
        newest = fed[:, : slots.shape[1]]
        # [B, n]
        source = torch.where(alike & (tokens.roll(1, 1)[:, None] == newest[..., None]), places, -1).amax(-1)
        copies = tokens.gather(1, source.clamp(min=0))
        disputed = (
            (source >= 0) & (copies != drafts[..., 0]) & steady[:, 1 : count + 1] & (newest != last_fed)
        )
        copies = copies.where(disputed, UNKNOWN)
    return fed, (found >= _HALF) & (found < (size + 1) * _HALF), copies
