"""Stacked codebook patterns: what a step of one is fed, and which steps later frames still see.

Le Lan et al., "Stack-and-delay: a new codebook pattern for music generation", 2309.08804. A frame is decoded level by
level, as in a flat pattern. Each step is fed the stack of its frame so far, and only the last one, the whole stack,
stays for later frames: the steps before it serve their own frame. No public code was found. Positions count steps here.

The paper's stack-and-delay runs one stream of positions for each level, side by side. A model of columns has one
position a step, so it decodes `CodebookPattern.stack` only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_spec.models.columns.patterns import CodebookPattern


class Stacks:
    """The tables of a stacked pattern. Place 0 is the empty step, place s + 1 is step s.

    Args:
        pattern: stacked, one pass without delays.
        num_frames: T, frames of the clip.
        special: the id of an entry without a token.
        window: places after the last step.

    Raises:
        ValueError: the pattern is not stacked, or decodes several frames side by side.
    """

    def __init__(self, pattern: CodebookPattern, num_frames: int, special: int, window: int = 0) -> None:
        check_stacked(pattern)
        frames, steps = pattern.frames_by_step(num_frames), pattern.steps_by_frame(num_frames)
        own, count = frames.amax(0), frames.shape[1]  # [S], the frame of each step
        sources = steps[:, own].T  # [S, K]
        self.special = special
        self.sources = torch.where(sources <= torch.arange(count)[:, None], sources, -1)
        self.sources = torch.cat([self.sources, torch.full((window, pattern.codebooks), -1)])
        self.frames = torch.cat([torch.tensor([-1]), own, -2 - torch.arange(window)])  # by place
        self.kept = torch.cat(
            [torch.tensor([True]), pattern.retained(num_frames), torch.zeros(window).bool()]
        )

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
        """Return what is fed at `steps [B, W]`, long [B, W, K]: the stack of their frame so far.

        Args:
            held: long [B, S', K], the tokens by step.
        """
        sources = self.sources[steps]  # [B, W, K]
        rows = torch.arange(len(held), device=held.device)[:, None, None]
        books = torch.arange(held.shape[2], device=held.device)
        return torch.where(sources < 0, self.special, held[rows, sources.clamp(min=0), books])

    def seen(self, places: Tensor, size: int) -> Tensor:
        """Return which of the first `size` places a query at `places [R, W]` may see, bool [R, W, size]."""
        return self.kept[:size] | (self.frames[:size] == self.frames[places][..., None])


def check_stacked(pattern: CodebookPattern) -> None:
    """Refuse a stacked pattern that needs several positions a step.

    Raises:
        ValueError: the pattern is not stacked, or decodes several frames side by side.
    """
    if not pattern.stacked or any(pattern.delays) or any(pattern.passes):
        raise ValueError(
            f"a stacked pattern with delays {pattern.delays} and passes {pattern.passes}: stack-and-delay runs "
            f"{pattern.codebooks} streams side by side, and this model has one position a step. Pass 'stack', which "
            "decodes a frame after the other, or 'delay'."
        )
