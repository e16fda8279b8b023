"""The window of a serving engine: test its drafts, and draft the next one.

An engine schedules, batches and pages, and keeps a draft exactly if it is the most probable token of its row. So all
that it needs of us is the token that the slot's own noise draws (`verify_window`): with all mass on it, the engine's
greedy verification is acceptance "identical". `WindowMemory` remembers what drafts are made of, and makes those
of `SpeculativeJacobiSampler`. So served pictures take as many calls as the sampler's, and have its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.drafts import LEFT, copied_tokens
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise
from visual_spec.samplers.core.state import draw_tokens
from visual_spec.samplers.raster.jacobi_identical import UNKNOWN, copies_led, repaired

_EVERY_SLOT = 2**62  # the grid is unknown, so no slot counts as past it


def verify_window(
    logits: Tensor,
    drafts: Tensor,
    keys: Tensor,
    slots: Tensor,
    law: TokenLaw,
    *,
    pairs: Tensor | None = None,
    num_drafts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Test the drafts of a window and draft the next one; made for the sampler hook of a serving engine.

    It takes and returns plain tensors and keeps nothing between calls: requests may join, leave, and move to other
    rows. Acceptance is "identical": a draft is kept if it is the token that its slot's own noise draws. So each request
    gets the tokens of `AutoregressiveSampler` for its key, whatever its drafts were, and drafts need no labels. The
    drafts are as in `SpeculativeJacobiSampler(initial_draft="last_law", drafts="carried")`.

    A request that has committed n tokens feeds its newest token and its W - 1 drafts, at slots n - 1 to n + W - 2. The
    logits after them predict slots n to n + W - 1. It then commits the first `num_sampled` of `sampled`, and continues
    at slot n + num_sampled. The caller must drop tokens past the end of the picture.

    Args:
        logits: [R, W, V], raw.
        drafts: long [B, W - 1], for all slots but the last; -1 where there is no draft.
        keys: int64 [B], one key a request (`draw_keys`).
        slots: long [B, W], the slots that the logits predict.
        law: how logits become the distribution a token is drawn from.
        pairs: long [B, 2], the conditional and the unconditional row of `logits` for each request. None: R = B, row b
            belongs to request b, and there is no guidance.
        num_drafts: D, drafts to make for the next call; None: W - 1. The prediction of a prefill is a window of W = 1.

    Returns:
        sampled: long [B, W], the token that each slot's noise draws. The first `num_sampled` are final.
        num_sampled: long [B], 1 to W: the kept drafts and one more token.
        num_rejected: long [B], W - num_sampled: how many of the fed positions the cache must drop.
        next_drafts: long [B, D], for the following slots: the tokens drawn after the refusal, then draws from the law
            of the window's last slot. A caller that knows the picture may replace the latter, from index
            W - num_sampled on, by better drafts, or ask for none and draft by a `WindowMemory`.

    Raises:
        ValueError: the law has guidance but there are no `pairs`, so that unguided logits would be taken for guided
            ones. The values of logits are not checked, because this would stall the device.
    """
    guided = pairs is not None
    if law.guided and not guided:
        raise ValueError(
            f"guidance_scale={law.guidance_scale} needs the conditional and the unconditional row of every request; "
            "pass pairs [B, 2], or a law with guidance_scale=1."
        )
    if guided:
        logits = logits.index_select(0, pairs.t().flatten())  # [2B, W, V], the conditional rows first
    batch_size, width = slots.shape
    count = width - 1 if num_drafts is None else num_drafts
    noise, checked = CounterNoise(keys, slots.device), CheckedLaw(law, _EVERY_SLOT, deferred=True)
    sampled = draw_tokens(checked, noise, logits, slots, guided)  # [B, W]
    kept = accepted_prefix(sampled[:, :-1] == drafts)
    if not count:
        return sampled, kept + 1, width - 1 - kept, drafts[:, :0]
    last = law(logits[:, -1:], guided, slots[:, -1:])  # [B, 1, V]
    later = slots[:, -1:] + torch.arange(1, count + 1, device=slots.device)  # [B, D]
    further = noise.categorical(last.expand(-1, count, -1), later, TOKEN)
    at = kept[:, None] + torch.arange(1, count + 1, device=slots.device)  # [B, D], at most W - 1 + D
    return sampled, kept + 1, width - 1 - kept, torch.cat([sampled, further], 1).gather(1, at)


@dataclass
class WindowMemory:
    """What the next drafts of a batch of pictures are made of. Axis 0 of all tensors is the picture.

    The drafts are as in `SpeculativeJacobiSampler(initial_draft="left", drafts="repaired")`: what the last call drew
    for a slot; where the token before has changed since, a copy of the last token with the same two neighbours
    (`jacobi_identical.repaired`), of what two calls in a row drew only where copies lead; a copy of a neighbour where
    no call has been yet.

    Attributes:
        tokens: long [B, S], by slot: committed tokens, then drafts, then scratch.
        inputs: long [B, S], by slot: what the last call was fed there, `UNKNOWN` before any.
        lengths: long [B], committed slots.
        reached: long [B], the first slot that no call has predicted.
        newest: long [B], the last slot that the last call predicted.
        steady: long [B, S], by slot: calls in a row that drew the token that stood there, at most 2.
        copies: long [B, S], by slot: copies of steady drafts, from `repaired`, `UNKNOWN` elsewhere.
        ahead: long [B], see `jacobi_identical.copies_led`.
    """

    tokens: Tensor
    inputs: Tensor
    lengths: Tensor
    reached: Tensor
    newest: Tensor
    steady: Tensor
    copies: Tensor
    ahead: Tensor

    @classmethod
    def begin(cls, batch_size: int, num_tokens: int, window: int, device: torch.device | str = "cpu") -> Self:
        """Return the memory of pictures that have no token yet.

        `window`: W, the most slots that a call predicts. Calls may predict up to 3 W slots past the picture.
        """
        tokens = torch.zeros(batch_size, num_tokens + 3 * window + 1, dtype=torch.long, device=device)
        lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        unknown, places = torch.full_like(tokens, UNKNOWN), (lengths, lengths.clone(), lengths.clone())
        return cls(tokens, unknown, *places, torch.zeros_like(tokens), unknown.clone(), lengths.clone())

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Return the memory of all pictures of several memories, in order."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in _names(cls)))

    def split(self) -> list[Self]:
        """Return the memory of each picture."""
        parts = zip(*(getattr(self, name).split(1) for name in _names(type(self))), strict=True)
        return [type(self)(*part) for part in parts]

    def settle(self, slots: Tensor, sampled: Tensor, num_sampled: Tensor) -> None:
        """Note what a call drew: the results of `verify_window`.

        Args:
            slots: long [B, W], the slots that the call predicted.
            sampled: long [B, W].
            num_sampled: long [B], how many of them are final.
        """
        drafts = self.tokens.gather(1, slots)
        self.ahead = self.ahead + copies_led(self.copies.gather(1, slots), drafts, sampled, num_sampled)
        age = (self.steady.gather(1, slots) + 1).clamp(max=2)
        self.steady.scatter_(1, slots, torch.where(drafts == sampled, age, 0))
        self.tokens.scatter_(1, slots, sampled)
        self.lengths = slots[:, 0] + num_sampled
        self.reached = torch.maximum(self.reached, slots[:, -1] + 1)
        self.newest = slots[:, -1]

    def drafts(self, count: int, grid: TokenGrid, redrafts: int = 12) -> Tensor:
        """Return drafts for the `count` slots after the committed ones, long [B, count].

        `redrafts`: how many of the first slots may be drafted anew; see `SpeculativeJacobiSampler`.
        """
        slots = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        known = slots < self.reached[:, None]
        copied = copied_tokens(LEFT, self.tokens, slots, self.newest[:, None], grid)
        drafts = torch.where(known, self.tokens.gather(1, slots), copied)
        self.tokens.scatter_(1, slots, drafts)
        if not count:
            return drafts
        at = torch.cat([slots[:, :1] - 1, slots], 1)
        held, steady = self.tokens.gather(1, at), self.steady.gather(1, at) > 0
        fed, _, copies = repaired(
            self.tokens, self.inputs, self.lengths, held, at, redrafts, grid, None, steady, self.ahead
        )
        self.copies.fill_(UNKNOWN)
        if copies is not None:
            self.copies.scatter_(1, slots[:, : copies.shape[1]], copies)
        return fed[:, 1:]


def _names(kind: type) -> list[str]:
    return [part.name for part in fields(kind)]
