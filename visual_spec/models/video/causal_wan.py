"""Wan of diffusers, made causal over chunks of frames from outside.

Self-Forcing (2506.08009) trains Wan 2.1 to draw chunk by chunk: frames of a chunk see each other and all frames before
them. Weights and modules are `WanTransformer3DModel`'s; only self-attention differs. So its attention processors
are replaced: inside a call of `CausalWan` they read the cache and the chunk, elsewhere they do what the plain ones do.

Cached keys are rotated whenever they are read, five times a chunk. A rotated copy would double the memory of keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor

from visual_spec.models.video.frame_cache import (
    CachePolicy,
    FrameCache,
    HeadBudgets,
    RollingWindow,
    SinkWindow,
)

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanAttention


class Rotary:
    """The rotary table of Wan for any place: frames, rows and columns turn parts of a head's channels.

    Args:
        head_dim: D. Rows and columns have 2 * (D // 6) channels each, frames the rest.
        length: places along an axis.
    """

    def __init__(self, head_dim: int, length: int, device: torch.device) -> None:
        side = 2 * (head_dim // 6)
        self.length = length
        self.cos, self.sin = [], []
        for dim in (head_dim - 2 * side, side, side):
            # float32 as the model's own table, whatever the model is cast to.
            cos, sin = get_1d_rotary_pos_embed(
                dim, length, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64
            )
            self.cos.append(cos[:, 0::2].to(device))
            self.sin.append(sin[:, 0::2].to(device))

    def __call__(self, states: Tensor, places: Tensor) -> Tensor:
        """Rotate states [B, N, H, D] by their places long [B or 1, N, 3]."""
        axes = places.unbind(-1)
        cos, sin = (
            torch.cat([part[axis] for part, axis in zip(table, axes, strict=True)], -1)[:, :, None]
            for table in (self.cos, self.sin)
        )  # [B or 1, N, 1, D / 2]
        even, odd = states[..., 0::2], states[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return turned.flatten(-2).type_as(states)


@dataclass
class HeadGroup:
    """The heads of a layer that share a policy, and what they remember."""

    policy: CachePolicy
    heads: Tensor
    cache: FrameCache

    def of(self, states: Tensor) -> Tensor:
        """These heads' part of states [B, n, H, D]."""
        return states if len(self.heads) == states.shape[2] else states[:, :, self.heads]

    def scores(self, query: Tensor, rotary: Rotary, first: int, last: int, frames: int) -> Tensor:
        """Products [B, last - first] of cached keys with the sum of the queries of the last `frames` frames."""
        sums = torch.cat([self.cache.query_sums, self.frame_sums(query)], 1)[:, -frames:].sum(1)  # [B, H, D]
        keys = rotary(self.cache.keys[:, first:last], self.cache.places[:, first:last])
        return torch.einsum("bnhd,bhd->bn", keys.to(sums.dtype), sums)

    def frame_sums(self, query: Tensor) -> Tensor:
        """Queries [B, n, H, D] summed over each frame: [B, f, H, D], in float32 at least."""
        wide = torch.promote_types(query.dtype, torch.float32)
        return query.unflatten(1, (-1, self.cache.frame_tokens)).sum(2, dtype=wide)


@dataclass
class CausalState:
    """What a rollout carries from chunk to chunk.

    Attributes:
        embeds: [B, T, E], the prompt.
        layers: the groups of heads of each layer.
        grid: rows and columns of a frame's tokens.
        frame: the first frame of the chunk at hand.
        opened: whether that chunk was read, and room made for it.
    """

    embeds: Tensor
    layers: list[list[HeadGroup]]
    grid: tuple[int, int]
    rotary: Rotary
    frame: int = 0
    opened: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(group.cache.nbytes for groups in self.layers for group in groups)


@dataclass
class ChunkCall:
    """One call, as a layer sees it: its groups of heads, and the places [1, n, 3] of the chunk's tokens."""

    groups: list[HeadGroup]
    places: Tensor
    rotary: Rotary
    state: CausalState
    frames: int
    commit: bool


class CausalProcessor:
    """Attention processor: inside a call, over cached frames and the chunk; elsewhere, the plain processor."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.call: ChunkCall | None = None
        # diffusers sets these two on processors: `set_attention_backend` and context parallelism.
        self._attention_backend = getattr(plain, "_attention_backend", None)
        self._parallel_config = getattr(plain, "_parallel_config", None)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles of a transformer have plain processors."""
        return copy.copy, (self.plain,)

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: object,
    ) -> Tensor:
        call = self.call
        if call is None:
            return self.plain(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
        if getattr(attn, "fused_projections", False):
            query, key, value = attn.to_qkv(hidden_states).chunk(3, -1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query, key, value = (
            states.unflatten(2, (attn.heads, -1)) for states in (attn.norm_q(query), attn.norm_k(key), value)
        )  # [B, n, H, D]
        query = call.rotary(query, call.places)
        parts = [self._attend(call, group, *map(group.of, (query, key, value))) for group in call.groups]
        out = torch.cat(parts, 2)
        if len(parts) > 1:  # the heads in their own order
            out = out[:, :, torch.cat([group.heads for group in call.groups]).argsort()]
        out = out.flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](out))

    def _attend(self, call: ChunkCall, group: HeadGroup, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention [B, n, H, D] of some heads over what they remember and the chunk itself."""
        cache, rotary = group.cache, call.rotary
        if cache.tokens and not call.state.opened:  # later calls of the chunk read the same frames
            group.policy.make_room(
                cache,
                call.state.frame,
                call.frames,
                lambda first, last, frames: group.scores(query, rotary, first, last, frames),
            )
        if isinstance(group.policy, RollingWindow):
            held, places, mixed = group.policy.read(cache, call.state.frame, call.frames, call.commit)
        else:
            held, places, mixed = cache.keys, cache.places, cache.values
        keys = torch.cat([rotary(held, places), rotary(key, call.places)], 1)
        values = torch.cat([mixed, value], 1)
        if call.commit:
            cache.append(key, value, call.places.expand(len(key), -1, -1))
            cache.query_sums = group.frame_sums(query)
        return dispatch_attention_fn(
            query, keys, values, dropout_p=0.0, is_causal=False, backend=self._attention_backend
        )


class CausalWan:
    """A `WanTransformer3DModel` that draws chunk after chunk.

    Args:
        transformer: text to video, one frame a token in time. Its processors are replaced until `release`.
        policy: which frames its layers remember.
    """

    def __init__(self, transformer: Any, policy: CachePolicy | HeadBudgets) -> None:
        self.check_model(transformer, policy)
        config = transformer.config
        self.transformer, self.policy = transformer, policy
        self.channels: int = config.in_channels
        self.patch: tuple[int, int] = tuple(config.patch_size[1:])
        self.processors = [CausalProcessor(block.attn1.processor) for block in transformer.blocks]
        for block, processor in zip(transformer.blocks, self.processors, strict=True):
            block.attn1.set_processor(processor)

    def release(self) -> None:
        """Give the transformer its processors back: the very objects it had."""
        for block, processor in zip(self.transformer.blocks, self.processors, strict=True):
            block.attn1.set_processor(processor.plain)

    @staticmethod
    def check_model(transformer: Any, policy: CachePolicy | HeadBudgets) -> None:
        """Refuse a transformer that cannot be made causal, or a policy for another one, by ValueError."""
        config = transformer.config
        if config.image_dim is not None or config.in_channels != config.out_channels:
            raise ValueError(
                "this Wan takes pictures beside text; pass one that draws from text alone, such as Wan 2.1 T2V."
            )
        if config.patch_size[0] != 1:
            raise ValueError(f"patch_size={tuple(config.patch_size)}; pass a model with one frame a patch.")
        if isinstance(policy, HeadBudgets) and len(policy.policies) != config.num_attention_heads:
            raise ValueError(
                f"{len(policy.policies)} policies for {config.num_attention_heads} heads; pass one a head."
            )

    def check(self, embeds: Tensor, height: int, width: int, chunk: int) -> None:
        """Refuse a prompt, a size in latent pixels or a chunk that model or policy cannot serve, by ValueError."""
        wide = self.transformer.config.text_dim
        if embeds.ndim != 3 or embeds.shape[-1] != wide or not embeds.numel():
            raise ValueError(f"prompt_embeds are {list(embeds.shape)}; pass [B, T, {wide}].")
        self.check_size(height, width, chunk)

    def check_size(self, height: int, width: int, chunk: int) -> None:
        """As `check`, without a prompt."""
        for name, size, patch in zip(("height", "width"), (height, width), self.patch, strict=True):
            if size < 1 or size % patch:
                raise ValueError(f"{name}={size} latent pixels; pass a multiple of {patch}.")
        for policy in self._groups():
            policy.check(chunk)

    def begin(self, embeds: Tensor, height: int, width: int, num_frames: int) -> CausalState:
        """An empty state for clips of at most `num_frames` frames of height x width latent pixels."""
        config, grid = self.transformer.config, (height // self.patch[0], width // self.patch[1])
        like = torch.empty(0, dtype=self.transformer.dtype, device=embeds.device)
        groups = self._groups()

        def held(policy: CachePolicy, heads: list[int]) -> HeadGroup:
            sizes = len(embeds), len(heads), config.attention_head_dim, grid[0] * grid[1]
            cache = FrameCache(like, *sizes, policy.dtype)
            return HeadGroup(policy, torch.tensor(heads, device=embeds.device), cache)

        reach = max(policy.reach for policy in groups)
        return CausalState(
            embeds=embeds.to(like.dtype),
            layers=[[held(*item) for item in groups.items()] for _ in self.processors],
            grid=grid,
            rotary=Rotary(config.attention_head_dim, max(num_frames + reach, *grid), embeds.device),
        )

    def forward(
        self, state: CausalState, latents: Tensor, timestep: float | Tensor, commit: bool = False
    ) -> Tensor:
        """The flow [B, C, f, H, W] of a noisy chunk after the frames in the cache.

        Args:
            latents: [B, C, f, H, W] at the noise level of `timestep`, from 1000 (noise) to 0 (clean).
            timestep: one for all samples, or [B]; or [B or 1, f], one for each frame.
            commit: also write the chunk to the cache, and go on to the next one.
        """
        frames = latents.shape[2]
        levels = torch.as_tensor(timestep, dtype=torch.float32, device=latents.device)
        if levels.ndim == 2:  # diffusers' Wan takes one for each token
            levels = levels.repeat_interleave(state.grid[0] * state.grid[1], 1)
        with self._calls(state, frames, commit):
            flow = self.transformer(
                hidden_states=latents.to(self.transformer.dtype),
                timestep=levels.expand(len(latents), *levels.shape[1:]),
                encoder_hidden_states=state.embeds,
                return_dict=False,
            )[0]
        state.opened = not commit
        state.frame += frames if commit else 0
        return flow.to(latents.dtype)

    def cut(self, state: CausalState, embeds: Tensor) -> None:
        """Go on with another shot: prompts [B, T, E] from the next chunk on, and the frames as `SinkWindow` says."""
        state.embeds = embeds.to(state.embeds)
        gap = max((policy.cut_gap for policy in self._groups() if isinstance(policy, SinkWindow)), default=0)
        state.frame += gap
        head_dim = self.transformer.config.attention_head_dim
        state.rotary = Rotary(head_dim, state.rotary.length + gap, embeds.device)
        for group in (group for groups in state.layers for group in groups):
            group.cache.pins.append(group.cache.written)

    def commit(self, state: CausalState, latents: Tensor) -> None:
        """Write a clean chunk to the cache, by a pass at timestep 0, and go on to the next one."""
        self.forward(state, latents, 0.0, commit=True)

    def _groups(self) -> dict[CachePolicy, list[int]]:
        if isinstance(self.policy, HeadBudgets):
            return self.policy.groups()
        return {self.policy: list(range(self.transformer.config.num_attention_heads))}

    @contextmanager
    def _calls(self, state: CausalState, frames: int, commit: bool) -> Iterator[None]:
        axes = (state.frame + torch.arange(frames), *map(torch.arange, state.grid))
        places = torch.cartesian_prod(*axes)[None].to(state.embeds.device)  # [1, n, 3]
        try:
            for processor, groups in zip(self.processors, state.layers, strict=True):
                processor.call = ChunkCall(groups, places, state.rotary, state, frames, commit)
            yield
        finally:
            for processor in self.processors:
                processor.call = None
