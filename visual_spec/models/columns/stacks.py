"""Stacked codebook patterns: what a step of one is fed, and which steps later frames still see.

Le Lan et al., "Stack-and-delay: a new codebook pattern for music generation", 2309.08804. A frame is decoded level by
level, as in a flat pattern. Each step is fed the stack of its frame so far, and only the last one, the whole stack,
stays for later frames: the steps before it serve their own frame. No public code was found. Positions count steps here.

In stack-and-delay K frames are decoded side by side, each at another level. A step then has K positions, its streams.
Each is fed the stack of its own frame, and predicts the next level of it; the stream of the whole stack predicts the
first level of the frame that starts. All streams see the whole stacks so far, and the stacks of their own frame.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.columns.patterns import CodebookPattern


class Stacks:
    """The tables of a stacked pattern. Place 0 is the empty step, place s + 1 is step s.

    Of N streams, position p * N + n is stream n of place p. The whole stack is stream 0: the others see it.

    Args:
        pattern: `CodebookPattern.stack` (N = 1) or `CodebookPattern.stack_delay` (N = K).
        num_frames: T, frames of the clip.
        special: the id of an entry without a token.
        window: places after the last step.

    Raises:
        ValueError: the pattern is another one.
    """

    def __init__(self, pattern: CodebookPattern, num_frames: int, special: int, window: int = 0) -> None:
        self.special, self.streams = special, streams_of(pattern)
        frames, steps = pattern.frames_by_step(num_frames), pattern.steps_by_frame(num_frames)
        own = frames.amax(0)[:, None] if self.streams == 1 else frames.flip(0).T  # [S, N], -1: none
        sources = steps[:, own].permute(1, 2, 0)  # [S, N, K]
        so_far = (sources <= torch.arange(len(own))[:, None, None]) & (own >= 0)[..., None]
        self.sources = F.pad(sources.where(so_far, -1), (0, 0, 0, 0, 0, window), value=-1)
        places = F.pad(own, (0, 0, 1, window), value=-1)  # [1 + S + window, N]
        alone = -1 - torch.arange(places.numel())  # sees its own position only
        self.frames = places.flatten().where(places.flatten() >= 0, alone)
        whole = F.pad(pattern.retained(num_frames), (1, 0), value=True)
        self.kept = F.pad(whole[:, None], (0, self.streams - 1, 0, window)).flatten()

    def to(self, device: torch.device) -> Stacks:
        """Return these tables on a device."""
        self.sources, self.frames, self.kept = (
            table.to(device) for table in (self.sources, self.frames, self.kept)
        )
        return self

    def buffers(self) -> list[Tensor]:
        """Return the tables, in a fixed order."""
        return [self.sources, self.frames, self.kept]

    def columns(self, held: Tensor, steps: Tensor) -> Tensor:
        """Return what is fed at `steps [B, W]`, long [B, W * N, K]: the stacks of their frames so far.

        Args:
            held: long [B, S', K], the tokens by step.
        """
        sources = self.sources[steps].flatten(1, 2)  # [B, W * N, K]
        rows = torch.arange(len(held), device=held.device)[:, None, None]
        books = torch.arange(held.shape[2], device=held.device)
        return torch.where(sources < 0, self.special, held[rows, sources.clamp(min=0), books])

    def seen(self, positions: Tensor, size: int) -> Tensor:
        """Return which of the first `size` positions a query at `positions [R, W]` may see, bool [R, W, size]."""
        return self.kept[:size] | (self.frames[:size] == self.frames[positions][..., None])


def streams_of(pattern: CodebookPattern) -> int:
    """Return N, the positions of a step: 1, but K of stack-and-delay.

    Raises:
        ValueError: the pattern is stacked in another way.
    """
    if not pattern.stacked:
        return 1
    known = (
        CodebookPattern.stack(pattern.codebooks),
        CodebookPattern.stack_delay(pattern.codebooks, pattern.frame_order),
    )
    if pattern not in known:
        raise ValueError(f"{pattern} is stacked; pass CodebookPattern.stack or CodebookPattern.stack_delay.")
    return pattern.codebooks if any(pattern.delays) else 1
