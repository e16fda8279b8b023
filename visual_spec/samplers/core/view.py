"""What a slot holds: one token. `ColumnView` has the same methods for columns of K tokens.

Samplers of chains are written for entries, the tokens of a slot one after the other. Laws are [B, N * K, V] and drafts
long [B, N * K], where K is 1 here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.drafts import Label
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.core.verification import draw_tokens

Law = Callable[[Tensor, Tensor, bool], Tensor]


class TokenView:
    """Slots of one token each, N slots a call."""

    codebooks = 1
    carries_drafts = False  # whether an initial draft copies a draft that was drawn just now

    def empty(self, slots: Tensor, length: int) -> Tensor:
        """Return the tokens of `length` slots, all 0."""
        return slots.new_zeros(len(slots), length)

    def first(self, logits: Tensor) -> Tensor:
        """Return the logits [R, 1, V] of slot 0, from those of a prefill: [R, V], or [R, P, V] of P slots."""
        return logits[:, None] if logits.dim() == 2 else logits[:, :1]

    def entries(self, slots: Tensor) -> Tensor:
        """Return the counters of the noise of all entries, long [B, N * K], for slots [B, N]."""
        return slots

    def read(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Return the entries long [B, N * K] at slots [B, N]."""
        return tokens.gather(1, slots)

    def write(self, tokens: Tensor, slots: Tensor, entries: Tensor) -> None:
        """Write entries long [B, N * K] at slots [B, N]."""
        tokens.scatter_(1, slots, entries)

    def fed(self, entries: Tensor, slots: Tensor) -> Tensor:
        """Return entries long [B, N * K] at slots [B, N] as the model takes them: long [B, N], or [B, N, K]."""
        return entries

    def laws(self, law: Law, logits: Tensor, slots: Tensor, guided: bool) -> Tensor:
        """Return laws [B, N * K, V] from the logits of a call, which predict slots [B, N]."""
        return law(logits, slots, guided)

    def draw(
        self, law: CheckedLaw, noise: CounterNoise, logits: Tensor, slots: Tensor, guided: bool
    ) -> Tensor:
        """Draw the entries long [B, N * K] of slots [B, N] with the noise of plain decoding."""
        return draw_tokens(law, noise, logits, slots, guided)

    def forced(self, drafts: Tensor, label: Label | None, slots: Tensor) -> tuple[Tensor, Label | None]:
        """Return drafts long [B, N * K] and their label, where the model's pattern decides: for tokens, nowhere."""
        return drafts, label


TOKENS: Any = TokenView()
