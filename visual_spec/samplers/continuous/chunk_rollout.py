"""Clips drawn chunk by chunk by a causal diffusion model, as long as one likes.

The loop of Self-Forcing (2506.08009, section 3): each chunk starts as noise and is cleaned in a few steps; between them
it is noised again, to the level of the next step. A pass over the clean chunk then writes its keys and values to the
cache. So a chunk of 4 steps costs 5 calls.

With a drafter, a smaller model of the same latents, a chunk is kept if a reward passes, and drawn by the large model
otherwise ("SDVG", 2604.17397). The large model then makes the clean pass only: 1 call, not 5. The law of the clip is
neither model's: the reward decides about quality.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.settings import whole
from visual_spec.samplers.core.base import STOP
from visual_spec.samplers.core.noise import CHAIN, CounterNoise, draw_keys

# Score of a drafted chunk [1, C, f, H, W], the index of the chunk beside it.
Reward = Callable[[Tensor, int], float | Tensor]


class ChunkModel(Protocol):
    """All that the loop knows of a causal video model."""

    channels: int

    def check(self, embeds: Tensor, height: int, width: int, chunk: int) -> None:
        """Refuse a prompt, a size or a chunk that the model cannot serve."""
        ...

    def begin(self, embeds: Tensor, height: int, width: int, num_frames: int) -> Any:
        """A state without frames. Its `nbytes` are those of its cache."""
        ...

    def forward(self, state: Any, latents: Tensor, timestep: float) -> Tensor:
        """The flow (noise minus clean) of the noisy chunk [B, C, f, H, W] at hand."""
        ...

    def commit(self, state: Any, latents: Tensor) -> None:
        """Write the clean chunk to the cache, and go on to the next one."""
        ...


@dataclass(frozen=True)
class ChunkSchedule:
    """The steps of a chunk.

    Args:
        chunk: latent frames of a chunk.
        steps: timesteps, from 1000 (noise) down, before the shift.
        shift: of the noise levels, `shift * u / (1 + (shift - 1) * u)`.
        first_steps: the steps of the first chunk; none: those of all. Students of one or two steps take four there
            (Causal-Forcing++, 2605.15141).
    """

    chunk: int = 3
    steps: tuple[float, ...] = (1000, 750, 500, 250)
    shift: float = 5.0
    first_steps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        whole("chunk", self.chunk)
        for name, steps in {"steps": self.steps, "first_steps": self.first_steps or self.steps}.items():
            falls = all(now > after for now, after in pairwise((*steps, 0)))
            if not steps or steps[0] > 1000 or not falls:
                raise ValueError(
                    f"{name}={tuple(steps)}; pass timesteps that fall, from at most 1000 to above 0."
                )
        if not self.shift > 0:
            raise ValueError(f"shift={self.shift}; pass a number above 0.")

    def levels(self, index: int = 1) -> list[float]:
        """The share of noise at each step of a chunk, in [0, 1]; the model's timestep is 1000 times that."""
        steps = self.steps if index else self.first_steps or self.steps
        shares = [step / 1000 for step in steps]
        return [self.shift * share / (1 + (self.shift - 1) * share) for share in shares]


@dataclass
class RolloutTrace:
    """The record of a rollout of B samples.

    Attributes:
        calls: long [B], calls of the large model for each sample, clean passes included.
        draft_calls: long [B], those of the drafter.
        kept: bool [B, chunks], the chunks that are the drafter's.
        rewards: float [B, chunks], of its chunks; nan where it drew none.
        cache_bytes: bytes of the large model's cache after each chunk, for all samples of a call.
        seconds: wall time.
    """

    calls: Tensor
    draft_calls: Tensor
    kept: Tensor
    rewards: Tensor
    cache_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> str:
        """Return one line: chunks, calls, drafted chunks, memory and time."""
        samples, chunks = self.kept.shape
        drafted = ""
        if self.draft_calls.any():
            drafted = (
                f", {int(self.kept.sum())} of {self.kept.numel()} chunks drafted by "
                f"{self.draft_calls.float().mean():.0f} calls"
            )
        most = max(self.cache_bytes, default=0) / 2**20
        return (
            f"{samples} clips of {chunks} chunks, {self.calls.float().mean():.0f} calls{drafted}, "
            f"{most:.1f} MiB of cache, {self.seconds:.2f} s"
        )


@torch.no_grad()
def roll_out(
    model: ChunkModel,
    embeds: Tensor,
    *,
    num_frames: int,
    height: int,
    width: int,
    schedule: ChunkSchedule | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    context: Tensor | None = None,
    drafter: ChunkModel | None = None,
    reward: Reward | None = None,
    threshold: float = 0.0,
    callback: Callable[[int, Tensor], Any] | None = None,
) -> tuple[Tensor, RolloutTrace]:
    """Draw clips.

    All noise is a function of a sample's key, the frame and the step, so a sample depends neither on the batch nor on
    the chunks that a drafter drew.

    Args:
        embeds: [B, T, E], the prompts.
        num_frames, height, width: latent frames, a multiple of the chunk, and latent pixels.
        schedule: None is that of Self-Forcing.
        generator: one `torch.Generator` for the batch, or a list of one a sample.
        context: [B or 1, C, n, H, W], clean frames before the clip: to go on with a clip, or as anchors. Not returned.
        drafter, reward, threshold: a drafted chunk is kept if its reward is at least the threshold; the first chunk
            is always the large model's. Samples are then drawn one after the other.
        callback: called after each chunk as (index, chunk [B, C, f, H, W]); with a drafter for each sample by itself.
            If it returns `STOP`, the clip ends there.

    Returns:
        Latents [B, C, num_frames, H, W], float32, or float64 if the prompts are; and the trace.

    Raises:
        ValueError: a size that does not fit, a drafter without a reward or with other latents, or a reward that is no
            number.
    """
    schedule = schedule or ChunkSchedule()
    chunk = schedule.chunk
    whole("num_frames", num_frames)
    if num_frames % chunk:
        near = sorted({max(num_frames // chunk, 1) * chunk, -(-num_frames // chunk) * chunk})
        raise ValueError(
            f"num_frames={num_frames} is no multiple of the chunk of {chunk} frames; pass "
            f"{' or '.join(map(str, near))}."
        )
    models = [model] if drafter is None else [model, drafter]
    if (drafter is None) != (reward is None):
        raise ValueError("a drafter needs a reward, and a reward a drafter; pass both or neither.")
    for one in models:
        one.check(embeds, height, width, chunk)
        if one.channels != model.channels:
            raise ValueError(
                f"the drafter draws latents of {one.channels} channels, the model of {model.channels}; pass a drafter "
                "of the same latents."
            )
    shape = (len(embeds), model.channels, height, width)
    if context is not None:
        given = [*context.shape[:2], *context.shape[3:]] if context.ndim == 5 else []
        if given[1:] != [*shape[1:]] or given[0] not in (1, shape[0]) or not context.shape[2]:
            raise ValueError(
                f"context is {list(context.shape)}; pass [{shape[0]} or 1, {shape[1]}, n, {height}, {width}]."
            )
        context = context.to(embeds.device).expand(len(embeds), -1, -1, -1, -1)
    keys = draw_keys(generator, len(embeds))
    start = time.perf_counter()
    options = (schedule, num_frames, height, width)
    if drafter is None or reward is None:
        latents, trace = _roll(models, embeds, keys, context, *options, None, threshold, callback)
    else:
        parts = [
            _roll(
                models,
                embeds[row : row + 1],
                keys[row : row + 1],
                None if context is None else context[row : row + 1],
                *options,
                reward,
                threshold,
                callback,
            )
            for row in range(len(embeds))
        ]
        latents = torch.cat([part for part, _ in parts])
        traces = [trace for _, trace in parts]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(trace, name) for trace in traces])
            for name in ("calls", "draft_calls", "kept", "rewards")
        }
        trace = RolloutTrace(**joined, cache_bytes=traces[0].cache_bytes)
    trace.seconds = time.perf_counter() - start
    return latents, trace


def _roll(
    models: list[ChunkModel],
    embeds: Tensor,
    keys: Tensor,
    context: Tensor | None,
    schedule: ChunkSchedule,
    num_frames: int,
    height: int,
    width: int,
    reward: Reward | None,
    threshold: float,
    callback: Callable[[int, Tensor], Any] | None,
) -> tuple[Tensor, RolloutTrace]:
    """One rollout of samples that share their calls. `models`: the large one, and a drafter if there is a reward."""
    batch, channels, chunk = len(embeds), models[0].channels, schedule.chunk
    chunks, before = num_frames // chunk, 0 if context is None else context.shape[2]
    states = [model.begin(embeds, height, width, before + num_frames) for model in models]
    pairs = list(zip(models, states, strict=True))
    for piece in () if context is None else context.split(chunk, 2):
        for model, state in pairs:
            model.commit(state, piece)
    noise = _FrameNoise(keys, embeds, (batch, channels, chunk, height, width))
    trace = RolloutTrace(
        calls=torch.full((batch,), -(-before // chunk)),
        draft_calls=torch.zeros(batch, dtype=torch.long),
        kept=torch.zeros(batch, chunks, dtype=torch.bool),
        rewards=torch.full((batch, chunks), torch.nan),
    )
    drawn: list[Tensor] = []
    for index in range(chunks):
        latents, levels = None, schedule.levels(index)
        if reward is not None and index > 0:
            latents = _draw(*pairs[1], noise, index, levels)
            trace.draft_calls += len(levels)
            trace.rewards[:, index] = score = _score(reward, latents, index)
            trace.kept[:, index] = score >= threshold
        if latents is None or not trace.kept[0, index]:
            latents = _draw(*pairs[0], noise, index, levels)
            trace.calls += len(levels)
        for model, state in pairs:
            model.commit(state, latents)
        trace.calls += 1
        trace.draft_calls += len(pairs) - 1
        trace.cache_bytes.append(states[0].nbytes)
        drawn.append(latents)
        if callback is not None and callback(index, latents) is STOP:
            break
    return torch.cat(drawn, 2), trace


class _FrameNoise:
    """Normal noise [B, C, f, H, W] of a chunk before a step."""

    def __init__(self, keys: Tensor, embeds: Tensor, shape: tuple[int, ...]) -> None:
        self.noise, self.shape = CounterNoise(keys, embeds.device), shape
        self.dtype = torch.promote_types(embeds.dtype, torch.float32)

    def __call__(self, index: int, step: int) -> Tensor:
        batch, channels, chunk, height, width = self.shape
        frames = index * chunk + torch.arange(chunk, device=self.noise.keys.device)
        values = self.noise.normal(
            frames.expand(batch, -1), channels * height * width, CHAIN, step, self.dtype
        )  # [B, f, C * H * W]
        return values.view(batch, chunk, channels, height, width).transpose(1, 2)


def _draw(model: ChunkModel, state: Any, noise: _FrameNoise, index: int, levels: list[float]) -> Tensor:
    """A clean chunk [B, C, f, H, W]: from noise, through the levels, noised again between them."""
    latents = clean = noise(index, 0)
    for step, level in enumerate(levels):
        if step:
            latents = (1 - level) * clean + level * noise(index, step)
        # The flow is noise minus clean, and latents are (1 - level) * clean + level * noise.
        clean = latents - level * model.forward(state, latents, 1000 * level)
    return clean


def _score(reward: Reward, latents: Tensor, index: int) -> float:
    score = float(reward(latents, index))
    if score != score:
        raise ValueError(f"the reward of chunk {index} is nan; return a number.")
    return score
