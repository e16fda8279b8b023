"""A LlamaGen that fills in frames: full attention within a frame, causal attention between frames.

After Lumos-1 (Yuan et al., arXiv 2507.08801, sections 3.1 and 3.3): a decoder of Llama's kind whose positions predict
the very slots they stand at. A frame is drawn from hidden tokens, and reads what the cache holds of the frames before.
The last row of the token embedding is the mask.

With `key_frames`, the order of MMPL (Xiang et al., "Macro-from-micro planning", arXiv 2508.03334, and its public code)
over such frames: the first frame, then all key frames together, then all others together. Those between two key frames
see each other, the first frame, and the key frames up to those that end them; so the parts of a clip do not wait for
each other. With `fill_in_turn` they do, as in the release: a part also sees the parts before it.

Rotary table and place embeddings are our LlamaGen's over frames, not Lumos-1's MM-RoPE; so this class reads no
official weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_blocks import FeedForward, LlamaGenState, Shared, turns_of


@dataclass
class FrameState(MaskedState):
    """One batch between two calls.

    Attributes:
        held: keys and values of the prefix and of all frames, by slot; the next frame's are written again by
            every call.
        groups: the frames of each group (`frame_groups`), long `[frames of the group]` each.
        seen: bool `[T, T]`, from `seen_frames`.
        frames: how many groups of frames are written for good.
    """

    held: LlamaGenState
    groups: list[Tensor]
    seen: Tensor
    frames: int = 0

    def select(self, samples: Tensor) -> None:
        self.held.select(samples)


class FrameMaskedTransformer(SavedModel):
    """A `FrameModel` over the frames of a clip.

    Args:
        vocab_size: number of image codes. The mask has the next id.
        dim, num_layers, num_heads, grid_size, num_frames, prefix_length, num_classes, caption_dim: as of
            `LlamaGenTransformer`; at least two frames.
        feed_forward_dim: hidden width of the SwiGLU layers; None: `LlamaGenTransformer`'s.
        key_frames: the frames that are drawn together after the first one, rising, the last frame among them; the
            others are drawn after them. None: frame after frame.
        fill_in_turn: whether the frames between key frames are drawn part after part, and see the parts before.

    Raises:
        ValueError: fewer than two frames, other key frames, parts without key frames, or as `LlamaGenTransformer`.
    """

    _repeated_blocks = ["TransformerBlock"]
    _no_split_modules = ["TransformerBlock"]

    stored_as = (torch.float8_e4m3fn,)  # by `python scripts/train frames`

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 16384,
        dim: Count = 768,
        num_layers: int = 12,
        num_heads: Count = 12,
        grid_size: Count = 16,
        num_frames: Count = 8,
        prefix_length: Count = 1,
        num_classes: Count | None = None,
        caption_dim: Count | None = None,
        feed_forward_dim: int | None = None,
        key_frames: Sequence[int] | None = None,
        fill_in_turn: bool = False,
    ):
        super().__init__()
        if num_frames < 2:
            raise ValueError(
                f"num_frames={num_frames} given; this model draws clips, pass at least 2 (pictures: "
                "MaskedImageTransformer)."
            )
        if key_frames is not None:
            rising = [0, *key_frames, num_frames]
            if rising != sorted(set(rising)) or rising[-2] != num_frames - 1:
                raise ValueError(
                    f"key_frames={list(key_frames)} of {num_frames} frames; pass rising frames from 1 on, the last one "
                    f"{num_frames - 1}, e.g. [1, {num_frames // 2}, {num_frames - 1}]."
                )
        elif fill_in_turn:
            raise ValueError(
                "fill_in_turn=True without key_frames, between which parts lie; pass both, or neither."
            )
        self.transformer = LlamaGenTransformer(
            vocab_size=vocab_size,
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            grid_size=grid_size,
            num_frames=num_frames,
            prefix_length=prefix_length,
            num_classes=num_classes,
            caption_dim=caption_dim,
            zero_prefix_keys=False,
        )
        self.transformer.tok_embeddings = nn.Embedding(vocab_size + 1, dim)
        nn.init.normal_(self.transformer.tok_embeddings.weight, std=0.02)
        if feed_forward_dim is not None:
            for block in self.transformer.layers:
                block.feed_forward = FeedForward(dim, feed_forward_dim)
        self.grid, self.frame_tokens = self.transformer.grid, grid_size**2
        self.vocab_size = self.mask_id = vocab_size

    @property
    def frame_groups(self) -> list[list[int]]:
        """The frames that are drawn together, in the order in which they are drawn."""
        frames, keys = range(self.grid.frames), self.config["key_frames"]
        if keys is None:
            return [[frame] for frame in frames]
        parts = [list(range(start + 1, end)) for start, end in pairwise([0, *keys]) if end - start > 1]
        return [[0], list(keys), *(parts if self.config["fill_in_turn"] else [sum(parts, [])])]

    def seen_frames(self, device: torch.device | None = None) -> Tensor:
        """Which frames (columns) a frame (row) sees, itself included: bool `[T, T]` on a device; None: the CPU."""
        frames, keys = torch.arange(self.grid.frames, device=device), self.config["key_frames"]
        if keys is None:
            return frames[:, None] >= frames
        runs = [key for key in keys if key - 1 not in keys]  # first frames of runs of key frames
        run = torch.stack([frames >= first for first in runs]).sum(0)  # a part is ended by the run after it
        key = torch.stack([frames == one for one in keys]).any(0)
        earlier = (frames == 0) | (key & (run[:, None] + 1 >= run)) | (key[:, None] & key)
        same = (run[:, None] >= run) if self.config["fill_in_turn"] else (run[:, None] == run)
        return torch.where(frames[:, None] == 0, frames == 0, earlier | same & ~key[:, None])

    def first_frames(self, count: int) -> Self:
        """Return this model over the first `count` frames only, with the same weights.

        Raises:
            ValueError: the model has not so many frames, or fewer of a model with key frames, whose early frames see
                some of later ones.
        """
        if count == self.grid.frames:
            return self
        if self.config["key_frames"] is not None:
            raise ValueError(
                f"num_frames={count} of a model that draws key frames first; pass {self.grid.frames}, or leave it out."
            )
        shorter = copy(self)
        shorter.grid = self.transformer.first_frames(count).grid
        return shorter

    # -- decoding: the contract of `FrameModel` ----------------------------------------------------------------------

    @decodes
    def prepare(self, condition: TextCondition | Tensor, *, batch_size: int, guided: bool) -> FrameState:
        """Run the prefix, and allocate the cache of all frames; see `FrameModel`."""
        held = self.transformer.prefill(condition, batch_size=batch_size, guided=guided, window=0)
        device = held.cache.keys.device
        groups = [
            torch.stack([torch.full((), frame, device=device) for frame in group])
            for group in self.frame_groups
        ]
        return FrameState(guided, device, held, groups, self.seen_frames(device))

    @decodes
    def forward(self, state: FrameState, tokens: Tensor) -> Tensor:
        """Score every slot of the next group of frames, given its tokens `[B, N]`: logits `[R, N, V]`.

        Some tokens are hidden. N counts the slots of all frames of the group, frame after frame.
        """
        return wide(self.transformer.output(self._fed(state, tokens)))

    @decodes
    def write(self, state: FrameState, tokens: Tensor) -> None:
        """Make `tokens [B, N]` or `[R, N]`, some of them hidden, what later frames see of the next group."""
        self._fed(state, tokens)
        state.frames += 1

    def _fed(self, state: FrameState, tokens: Tensor) -> Tensor:
        """Return what the head reads at the slots of the next group, `[R, N, dim]`."""
        held, count = state.held, self.frame_tokens
        cache, prefix_mask = held.cache, held.prefix_mask
        rows, prefix = prefix_mask.shape
        tokens = tokens.repeat(rows // len(tokens), 1)  # [R, N]
        own = state.groups[state.frames]
        held_frames = 1 + max(map(max, self.frame_groups[: state.frames + 1]))
        slots = own[:, None] * count + torch.arange(count, device=tokens.device)
        slots = slots.flatten().expand(rows, -1)
        size = prefix + held_frames * count
        cache.at(prefix + slots, size)
        visible = state.seen[own, :held_frames]
        visible = visible.repeat_interleave(count, 0).repeat_interleave(count, 1)
        seen = F.pad(visible, (prefix, 0), value=True).repeat(rows, 1, 1, 1)
        seen[..., :prefix] = prefix_mask[:, None, None]
        hidden = self.transformer.embed(tokens, slots)
        mask = hidden.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        turns = turns_of(held.rotary[slots[:1]])
        features, _ = self.transformer.run(hidden, cache, Shared(turns, cache.places, mask, prefix_mask))
        return features

    # -- training ----------------------------------------------------------------------------------------------------

    def predictions(
        self, tokens: Tensor, condition: TextCondition | Tensor, dropped: Tensor | None = None
    ) -> Tensor:
        """Logits `[B, L, V]` of clips, or of first frames, `tokens [B, L]`, some of them hidden; with gradients.

        A slot sees all slots of the frames that its own frame sees, as they are given.

        `dropped`, bool [B]: rows whose condition is replaced by the unconditional one.
        """
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        frame = slots // self.frame_tokens
        seen = self.seen_frames(tokens.device)[frame[:, None], frame]
        trunk = self.transformer.forced(tokens, slots, seen, condition, dropped)
        return self.transformer.output(self.transformer.norm(trunk[:, 1:]))
