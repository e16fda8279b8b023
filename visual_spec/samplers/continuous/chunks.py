"""Clips drawn chunk by chunk by a causal diffusion model, as long as one likes.

The loop of Self-Forcing (2506.08009, section 3): each chunk starts as noise and is cleaned in a few steps; between them
it is noised again, to the level of the next step. A pass over the clean chunk then writes its keys and values to the
cache. So a chunk of 4 steps costs 5 calls. LongLive 2.0 (2605.18739) goes from level to level by a solver instead.

Rolling Forcing (2509.25161) cleans as many chunks together as there are steps: the first one is nearly clean, the last
one noise. A call moves all of them by a step, and the first one leaves. So a chunk costs 2 calls, of 5 chunks and of 1
with 5 steps, and what is drawn next can still mend what was drawn last.

With a smaller model of the same latents, a chunk that this one drew is kept if a reward passes, and drawn by the large
model otherwise ("SDVG", 2604.17397). The large model then makes the clean pass only: 1 call, not 5. The law of the clip
is neither model's: the reward decides about quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Protocol

import torch
import torch.nn.functional as F
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import Tensor

from visual_spec.models.core.settings import Count, OneOf, Within, register_to_config, whole
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import check_returned
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHAIN, CounterNoise
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.core.trace import LOSSY, DecodeTrace, SampleResult

RENOISE, UNIPC, ROLLING = "renoise", "unipc", "rolling"


def _check_falling(name: str, timesteps: Any, settings: Mapping[str, Any]) -> None:
    if isinstance(timesteps, Sequence) and any(now <= after for now, after in pairwise(timesteps)):
        raise ValueError(f"{name}={timesteps}; pass timesteps that fall, from at most 1000 to above 0.")


Timesteps = Annotated[int | Sequence[float], Within(above=0, most=1000), _check_falling]


class ChunkModel(Protocol):
    """All that the sampler knows of a causal video model."""

    channels: int

    def check(self, embeds: Tensor, height: int, width: int, chunk: int) -> None:
        """Refuse a prompt, a size or a chunk that the model cannot serve."""
        ...

    def begin(self, embeds: Tensor, height: int, width: int, num_frames: int) -> Any:
        """A state without frames. Its `nbytes` is the size of its cache."""
        ...

    def forward(self, state: Any, latents: Tensor, timestep: float | Tensor) -> Tensor:
        """The flow (noise minus clean) of the next frames [B, C, f, H, W], which are noisy.

        `timestep` is one for all, or [1, f] with one for each frame.
        """
        ...

    def cut(self, state: Any, embeds: Tensor) -> None:
        """Go on with another shot, of another prompt."""
        ...

    def commit(self, state: Any, latents: Tensor) -> None:
        """Write the clean chunk to the cache, and go on to the next one."""
        ...


@dataclass
class ChunkTrace(DecodeTrace):
    """A `DecodeTrace` of clips. Slots are latent frames, and `commit_call` is the chunk of each.

    `target_calls` counts the calls of the large model, clean passes included.

    Attributes:
        draft_calls: long [B], calls of the smaller model.
        kept: bool [B, chunks], the chunks that the smaller model drew.
        rewards: float [B, chunks], of the chunks that it drew or tried; nan where it did not.
        cache_bytes: bytes of the large model's cache after each chunk, for all samples of a call.
    """

    draft_calls: Tensor = field(kw_only=True)
    kept: Tensor = field(kw_only=True)
    rewards: Tensor = field(kw_only=True)
    cache_bytes: list[int] = field(kw_only=True)

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
            f"{samples} clips of {chunks} chunks, {self.target_calls.float().mean():.0f} calls{drafted}, "
            f"{most:.1f} MiB of cache, {self.seconds:.2f} s"
        )


@dataclass
class ChunkGroup:
    """Samples that share their calls: the whole batch, or one where a reward chooses between two models.

    Attributes:
        rows: their places in the batch.
        states: of the large model, then of the smaller one.
        noisy: of a rolling window, float [b, C, f, H, W] each: the chunks after the last clean one, at their levels.
    """

    rows: slice
    states: list[Any]
    noisy: list[Tensor] = field(default_factory=list)


@dataclass
class ChunkCache:
    """The models, the large one first, and their groups of samples."""

    models: list[ChunkModel]
    groups: list[ChunkGroup]
    device: torch.device


@dataclass
class ChunkState:
    """A batch between two chunks.

    Attributes:
        chunks: float [B, f, C, H, W] each, clean.
        target_calls, draft_calls, kept, rewards, cache_bytes: see `ChunkTrace`.
    """

    target_calls: Tensor
    draft_calls: Tensor
    kept: Tensor
    rewards: Tensor
    chunks: list[Tensor] = field(default_factory=list)
    cache_bytes: list[int] = field(default_factory=list)

    @property
    def round(self) -> int:
        """The number of chunks so far, which is the index of the next one."""
        return len(self.chunks)

    @property
    def tokens(self) -> Tensor:
        """The frames so far: float [B, frames, C, H, W]."""
        return torch.cat(self.chunks, 1)

    @property
    def commit_call(self) -> Tensor:
        """The chunk of each frame so far: long [B, frames]."""
        each = self.chunks[0].shape[1]
        return torch.arange(self.round).repeat_interleave(each).expand(len(self.kept), -1)


class ChunkWiseSampler(Sampler[ChunkModel, ChunkState]):
    """Draws clips chunk by chunk.

    Args:
        chunk: latent frames of a chunk.
        steps: of a chunk: how many even ones, or timesteps that fall, from 1000 (noise) down, before the shift.
        shift: of the noise levels, `shift * u / (1 + (shift - 1) * u)`.
        first_steps: of the first chunk; None: as the others. Students of one or two steps take four there
            (Causal-Forcing++, 2605.15141).
        solver: "renoise" noises a clean chunk again between steps; "unipc" adds no noise: diffusers'
            `UniPCMultistepScheduler`, with even steps from 999 on; "rolling" noises again, as many chunks in a call as
            there are steps, each at a level of its own. It takes neither `first_steps` nor a `draft_model`.

    A call takes `num_frames`, a multiple of the chunk, `height` and `width`, in latent frames and pixels. Its condition
    is the prompts [B, T, E]; the law is `TokenLaw()`, for guidance is in the weights. It returns latents float
    [B, C, num_frames, height, width], float32, or float64 if the prompts are. `context`, [B or 1, C, n, H, W], holds
    clean frames before the clip: to go on with a clip, or as anchors; they are not returned. `start`, [B or 1, C, n, H,
    W], holds the clean frames that the clip begins with, fewer than a chunk: an encoded picture. `cuts` has the prompts
    [B, T, E] of further shots, by the chunk that begins each; the cache's policy says what it keeps. `draft_model`
    drafts all chunks but the first, and a draft is kept if its `reward`, a function of the chunk [1, C, f, H, W] and
    its index, is at least the `threshold` (0); samples then make their calls one by one. The callback gets each chunk
    [B, C, f, H, W].

    All noise is a function of a sample's key, the frame and the step, so a sample depends neither on the batch nor on
    the chunks that the smaller model drew.
    """

    no_logprobs = (
        "whose tokens are vectors: they have a density, and what makes them tells no more than samples"
    )
    takes = (
        "num_frames",
        "height",
        "width",
        "context",
        "start",
        "cuts",
        "draft_model",
        "reward",
        "threshold",
    )
    law_names = ("chunk", "steps", "shift", "first_steps", "solver")
    keeps = LOSSY  # a law of its own
    records_steps = False

    @register_to_config
    def __init__(
        self,
        chunk: Count = 3,
        steps: Timesteps = 4,
        shift: Annotated[float, Within(above=0)] = 5.0,
        first_steps: Timesteps | None = None,
        solver: Annotated[str, OneOf((RENOISE, UNIPC, ROLLING))] = RENOISE,
    ) -> None:
        pass

    def levels(self, index: int = 1) -> list[float]:
        """The share of noise at each step of a chunk, in [0, 1]; the model's timestep is 1000 times that."""
        steps, shift = self.config["steps"], self.config["shift"]
        if index == 0 and self.config["first_steps"] is not None:
            steps = self.config["first_steps"]
        first = 999 if self.config["solver"] == UNIPC else 1000  # the last but one of 1,000 levels is 0
        timesteps = (
            [first * left / steps for left in range(steps, 0, -1)] if isinstance(steps, int) else steps
        )
        shares = [step / 1000 for step in timesteps]
        return [shift * share / (1 + (shift - 1) * share) for share in shares]

    def check(self, model: ChunkModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        if law != TokenLaw():
            raise ValueError(f"{law} given, but guidance is in the weights of the model; pass TokenLaw().")
        self.check_length(parts["num_frames"])
        small, reward, context = (parts.get(name) for name in ("draft_model", "reward", "context"))
        if (small is None) != (reward is None):
            raise ValueError("a drafter needs a reward, and a reward a drafter; pass both or neither.")
        if self.config["solver"] == ROLLING and (small is not None or self.config["first_steps"] is not None):
            raise ValueError(
                'solver="rolling" takes neither a drafter nor first_steps; leave them out, or pass "renoise".'
            )
        if small is not None and small.channels != model.channels:
            raise ValueError(
                f"the drafter draws latents of {small.channels} channels, the model of {model.channels}; pass a "
                "drafter of the same latents."
            )
        for name, most in (("context", None), ("start", self.config["chunk"] - 1)):
            frames = parts.get(name)
            if frames is None:
                continue
            high, wide, own = parts["height"], parts["width"], [*frames.shape]
            fits = frames.ndim == 5 and [own[1], *own[3:]] == [model.channels, high, wide]
            if not fits or own[0] not in (1, batch_size) or not own[2] or own[2] > (most or own[2]):
                raise ValueError(
                    f"{name} is {own}; pass [{batch_size} or 1, {model.channels}, n, {high}, {wide}]"
                    f"{'' if most is None else f', n at most {most}'}."
                )
        if parts.get("start") is not None and self.config["solver"] == ROLLING:
            raise ValueError('solver="rolling" begins with noise; pass "renoise" or "unipc" with start.')
        chunks = self.check_length(parts["num_frames"])
        for index, embeds in (parts.get("cuts") or {}).items():
            if index not in range(1, chunks) or len(embeds) != batch_size:
                raise ValueError(
                    f"a cut at chunk {index!r} with prompts {list(embeds.shape)}; pass chunks from 1 to {chunks - 1}, "
                    f"and [{batch_size}, T, E]."
                )

    def check_length(self, num_frames: Any) -> int:
        """Return the number of chunks.

        Raises:
            ValueError: the frames are no multiple of the chunk; names those next to it.
        """
        chunk = self.config["chunk"]
        whole("num_frames", num_frames)
        if num_frames % chunk:
            near = sorted({max(num_frames // chunk, 1) * chunk, -(-num_frames // chunk) * chunk})
            raise ValueError(
                f"num_frames={num_frames} is no multiple of the chunk of {chunk} frames; pass "
                f"{' or '.join(map(str, near))}."
            )
        return num_frames // chunk

    def plan(self, run: Run) -> None:
        run.view, run.num_tokens = None, run.parts["num_frames"]

    def planned_calls(self, model: ChunkModel, parts: dict[str, Any]) -> int:
        return self.check_length(parts["num_frames"])

    # -- the loop

    def prefill(self, run: Run) -> ChunkCache:
        """Read the context, in a state for each model and group of samples."""
        condition, batch_size, parts = run.condition, run.batch_size, run.parts
        small, context, chunk = parts.get("draft_model"), parts.get("context"), self.config["chunk"]
        size = parts["height"], parts["width"]
        models = [run.model] if small is None else [run.model, small]
        together = len(self.levels()) if self.config["solver"] == ROLLING else 1
        for one in models:
            for embeds in (condition, *(parts.get("cuts") or {}).values()):
                one.check(embeds, *size, min(chunk * together, parts["num_frames"]))
        if context is not None:
            context = context.to(condition.device).expand(batch_size, -1, -1, -1, -1)
        frames = parts["num_frames"] + (0 if context is None else context.shape[2])
        each = batch_size if small is None else 1
        cache = ChunkCache(models, [], condition.device)
        for rows in (slice(row, row + each) for row in range(0, batch_size, each)):
            group = ChunkGroup(rows, [one.begin(condition[rows], *size, frames) for one in models])
            cache.groups.append(group)
            for piece in () if context is None else context[rows].split(chunk, 2):
                self._commit(cache, group, piece)
        return cache

    def prepare(self, run: Run) -> ChunkState:
        """Draw the first chunk, which is the large model's."""
        context = run.parts.get("context")
        size = run.batch_size, run.num_tokens // self.config["chunk"]
        read = 0 if context is None else -(-context.shape[2] // self.config["chunk"])
        state = ChunkState(
            target_calls=torch.full((run.batch_size,), read),
            draft_calls=torch.zeros(run.batch_size, dtype=torch.long),
            kept=torch.zeros(size, dtype=torch.bool),
            rewards=torch.full(size, torch.nan),
        )
        self.step(run, state)
        return state

    def step(self, run: Run, state: ChunkState) -> None:
        """Draw a chunk of every sample, and write it to the caches."""
        groups = run.cache.groups
        drawn = torch.cat([self._draw(run, state, group) for group in groups])
        state.chunks.append(drawn.transpose(1, 2))
        state.cache_bytes.append(groups[0].states[0].nbytes)
        run.lap("model")

    def _draw(self, run: Run, state: ChunkState, group: ChunkGroup) -> Tensor:
        """A clean chunk [b, C, f, H, W] of a group, by the smaller model if the reward passes."""
        rows, index, latents = group.rows, state.round, None
        rolling = self.config["solver"] == ROLLING
        if (embeds := (run.parts.get("cuts") or {}).get(index)) is not None:
            for model, held in zip(run.cache.models, group.states, strict=True):
                model.cut(held, embeds[rows])
        calls = 1 if rolling and index else len(self.levels(index))
        if len(group.states) > 1 and index > 0:
            latents = self._clean(run, group, 1, index)
            score = float(run.parts["reward"](latents, index))
            if score != score:
                raise ValueError(f"the reward of chunk {index} is nan; return a number.")
            state.draft_calls[rows] += calls
            state.rewards[rows, index] = score
            state.kept[rows, index] = score >= run.parts.get("threshold", 0.0)
        if latents is None or not state.kept[rows, index].all():
            latents = self._rolled(run, group, index) if rolling else self._clean(run, group, 0, index)
            state.target_calls[rows] += calls
        self._commit(run.cache, group, latents)
        state.target_calls[rows] += 1
        state.draft_calls[rows] += len(group.states) - 1
        return latents

    def _clean(self, run: Run, group: ChunkGroup, number: int, index: int) -> Tensor:
        """A clean chunk by model `number`: from noise, through the levels, noised again between them."""
        model, state = run.cache.models[number], group.states[number]
        latents = clean = self._noise(run, group, index, 0)
        start = run.parts.get("start") if index == 0 else None
        known = 0 if start is None else start.shape[2]
        if start is not None:
            start = start.to(latents).expand(len(latents), -1, -1, -1, -1)
        levels = self.levels(index)
        solver = None if self.config["solver"] == RENOISE else _unipc(levels, latents.device)
        for step, level in enumerate(levels):
            if solver is not None:
                latents = clean
            elif step:
                latents = (1 - level) * clean + level * self._noise(run, group, index, step)
            timestep = asked = 1000 * level if solver is None else int(1000 * level)
            if start is not None:  # these frames are clean at every step
                latents = torch.cat([start, latents[:, :, known:]], 2)
                asked = F.pad(latents.new_zeros(1, known), (0, latents.shape[2] - known), value=timestep)
            flow = model.forward(state, latents, asked)
            check_returned(flow, len(latents), False, *latents.shape[1:])
            # The flow is noise minus clean, latents are (1 - level) * clean + level * noise.
            if solver is None:
                clean = latents - level * flow
            else:
                clean = solver.step(flow, timestep, latents, return_dict=False)[0]
        return clean if start is None else torch.cat([start, clean[:, :, known:]], 2)

    def _rolled(self, run: Run, group: ChunkGroup, index: int) -> Tensor:
        """Clean chunk `index`, and the chunks after it by one step: before the first one, by as many as the window has.

        Call w takes chunk c at step w - c, so a chunk of noise enters with each call, until there is none left.
        """
        model, state, chunk = run.cache.models[0], group.states[0], self.config["chunk"]
        levels, chunks, clean = self.levels(), run.num_tokens // chunk, list[Tensor]()
        for call in range(len(levels)) if index == 0 else [index + len(levels) - 1]:
            if call < chunks:
                group.noisy.append(self._noise(run, group, call, 0))
            latents = torch.cat(group.noisy, 2)
            steps = [call - index - place for place in range(len(group.noisy))]
            level = latents.new_tensor([levels[step] for step in steps]).repeat_interleave(chunk)
            flow = model.forward(state, latents, 1000 * level[None])
            check_returned(flow, len(latents), False, *latents.shape[1:])
            clean = [*(latents - level[:, None, None] * flow).split(chunk, 2)]
            group.noisy = [
                (1 - levels[step + 1]) * part
                + levels[step + 1] * self._noise(run, group, call - step, step + 1)
                for part, step in zip(clean, steps, strict=True)
                if step + 1 < len(levels)
            ]
        return clean[0]

    def _noise(self, run: Run, group: ChunkGroup, index: int, step: int) -> Tensor:
        """The noise [b, C, f, H, W] of a chunk before a step."""
        counter, chunk = CounterNoise(run.noise.keys[group.rows], run.device), self.config["chunk"]
        frames = (index * chunk + torch.arange(chunk, device=run.device)).expand(len(counter.keys), -1)
        place = run.model.channels, run.parts["height"], run.parts["width"]
        dtype = torch.promote_types(run.condition.dtype, torch.float32)
        values = counter.normal(frames, place[0] * place[1] * place[2], CHAIN, step, dtype)
        return values.unflatten(2, place).transpose(1, 2)

    def _commit(self, cache: ChunkCache, group: ChunkGroup, latents: Tensor) -> None:
        for model, state in zip(cache.models, group.states, strict=True):
            model.commit(state, latents)

    # -- after each chunk, and at the end

    def progress(self, run: Run, state: ChunkState) -> Tensor:
        return state.chunks[-1].transpose(1, 2)

    def committed(self, run: Run, state: ChunkState) -> Tensor:
        return torch.ones_like(state.commit_call, dtype=torch.bool)  # all that there are

    def result(self, run: Run, state: ChunkState, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        whole_trace = ChunkTrace(**trace, rewards=state.rewards, cache_bytes=state.cache_bytes)
        return SampleResult(tokens.transpose(1, 2).contiguous(), whole_trace)


def _unipc(levels: Sequence[float], device: Any) -> Any:
    """UniPC (2302.04867) over these levels, as in Wan's program, of which diffusers' levels differ by 1e-3."""
    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    solver.set_timesteps(len(levels), device=device)
    solver.sigmas = torch.tensor([*levels, 0.0])
    solver.timesteps = (1000 * solver.sigmas[:-1]).long().to(device)
    return solver
