"""Long clips in MMPL's order: segments are planned one after the other, then all of them are filled in one batch.

A plan draws the first groups of frames of a segment: its first frame, and its key frames, the last frame among them.
The next segment starts from that last frame as it is. What lies between key frames reads the key frames of its own
segment only, so it is drawn together in all segments, as rows of one batch. Errors add up over segments,
not over frames, and only plans wait for each other.

* Xiang et al., "Macro-from-micro planning for high-quality and parallelized autoregressive long video generation",
  arXiv 2508.03334, and its public code. There segments run on several GPUs, each as soon as the plan before it is
  drawn, the start of a segment is decoded and encoded again, and the model is a Wan of 14 billion parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.masked_protocol import FrameModel
from visual_spec.models.core.settings import whole
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.frames import FrameMaskedSampler


@dataclass
class SegmentTrace:
    """The record of clips of S segments.

    Attributes:
        plan_calls: calls of each segment's plan; each waits for the one before.
        fill_calls: calls that fill all segments, S rows a clip.
    """

    plan_calls: list[int]
    fill_calls: int

    @property
    def waiting_calls(self) -> int:
        """The calls that wait for each other."""
        return sum(self.plan_calls) + self.fill_calls


@torch.no_grad()
def draw_segments(
    model: FrameModel,
    sampler: FrameMaskedSampler,
    condition: Callable[[int], Any],
    segments: int,
    *,
    law: TokenLaw,
    generator: Sequence[torch.Generator],
) -> tuple[Tensor, SegmentTrace]:
    """Draw clips of `segments` (T - 1) + 1 frames; the model draws T.

    Args:
        model: draws at least two groups of frames, the last frame before the last group.
        condition: of a number n, the condition of n rows of each sample, side by side.
        generator: one a sample. A sample does not depend on the others.

    Returns:
        tokens long [B, frames, N], and the trace.

    Raises:
        ValueError: no segment, or a model whose last frame is not planned.
    """
    whole("segments", segments)
    grid, groups, batch = model.grid, model.frame_groups, len(generator)
    frames = grid.frames
    plan = next(number for number, group in enumerate(groups, 1) if frames - 1 in group)
    filled = sum(groups[plan:], [])
    if not filled:
        raise ValueError(
            f"a {type(model).__name__} that draws its last frame last plans no segments; pass one with key_frames."
        )
    shape = (batch, frames, grid.height * grid.width)
    start, plans, calls = torch.full(shape, model.mask_id), [], []
    start[:, filled] = 0  # any tokens: a plan does not draw these frames
    for _ in range(segments):
        if plans:
            start[:, 0] = plans[-1][:, -1]
        drawn = sampler(
            model,
            condition(1),
            known_tokens=start.flatten(1),
            law=law,
            generator=[*generator],
            batch_size=batch,
        )
        plan = drawn.tokens.view(shape).cpu()
        plan[:, filled] = model.mask_id
        plans.append(plan)
        calls.append(int(drawn.trace.target_calls.max()))
    rows = torch.stack(plans, 1).view(batch * segments, -1)
    own = [one for one in generator for _ in range(segments)]
    drawn = sampler(
        model, condition(segments), known_tokens=rows, law=law, generator=own, batch_size=len(rows)
    )
    clips = drawn.tokens.cpu().view(batch, segments, *shape[1:])
    tokens = torch.cat([clips[:, 0, :1], clips[:, :, 1:].flatten(1, 2)], 1)
    return tokens, SegmentTrace(calls, int(drawn.trace.target_calls.max()))
