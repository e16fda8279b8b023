"""Coupled Jacobi decoding of the codes inside one frame of a depth decoder.

A frame has K slots, and each slot has its noise before the frame begins. A call scores all open slots on drafts of the
codes before them. A slot's code counts where all codes before it are drafts that stand; what the call made of the slots
after those are the next drafts. So codes equal what `DepthDecoder.frame` draws with the same noise, in fewer calls, up
to rounding of logits: a wide call may round unlike a narrow one (docs/results/music.md, near-ties).

Coupling by the slots' noise works as in speculative Jacobi decoding (`jacobi.py`). No public code speculates inside a
frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.settings import Within, read_fields


@dataclass(frozen=True)
class DepthWindow:
    """Draws a frame by windows.

    Args:
        window: slots that a call scores; None: all that are open. A head of its own for every slot makes wide calls of
            some models dear.
    """

    window: Annotated[int | None, Within(1, none="all open slots")] = None

    def __post_init__(self) -> None:
        read_fields(self)

    @torch.no_grad()
    def frame(
        self,
        decoder: Any,
        ids: Tensor,
        hidden: Tensor,
        choose: Any,
        noise: Tensor | None = None,
        drafts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, int]:
        """Draw the codes of one frame.

        Args:
            decoder: a `visual_spec.models.columns.depth.DepthDecoder`; the other arguments go to its `frame`.
            drafts: long [B, steps], such as the codes of the frame before, on any device; None, or of another number of
                rows: zeros.

        Returns:
            Codes [B, steps], the last hidden states [B, steps, C] that they were drawn from, and calls of the decoder.
        """
        steps, batch = decoder.steps, len(ids)
        codes = ids.new_zeros(batch, steps)
        if drafts is not None and len(drafts) == batch:
            codes.copy_(drafts)
        final = torch.zeros(batch, dtype=torch.long, device=ids.device)  # slots of a row whose codes stand
        states = torch.empty(0)
        first = calls = 0  # the first open slot of the slowest row
        while first < steps:
            last = steps if self.window is None else min(first + self.window, steps)
            # A slot is scored at the position of the code before it; the decoder's own beginning is before slot 0.
            before, start = max(first - 1, 0), decoder.prefix + first - 1
            parts = [decoder.embed(before, codes[:, before : last - 1], hidden)] if last > 1 else []
            if first == 0:
                parts, start = [decoder.begin(ids, hidden), *parts], 0
            scored = decoder.run(torch.cat(parts, 1), start)[:, first - last :]
            part = None if noise is None else noise[:, first:last]
            made = choose(torch.cat([ids, codes[:, : last - 1]], 1), decoder.heads(first, scored), part)

            slots = torch.arange(first, last, device=ids.device)
            is_open = slots >= final[:, None]
            stands = ~is_open | (made == codes[:, first:last])
            final = first + stands.long().cumprod(1).sum(1)
            final += final < last  # the first slot whose draft fell has its code now
            if not calls:
                states = scored.new_zeros(batch, steps, scored.shape[-1])
            codes[:, first:last] = torch.where(is_open, made, codes[:, first:last])
            states[:, first:last] = torch.where(is_open[..., None], scored, states[:, first:last])
            first, calls = int(final.min()), calls + 1
        return codes, states, calls
