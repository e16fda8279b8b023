"""Depth decoders: a small transformer that writes the codes of one audio frame one by one.

A backbone makes one hidden state a frame; the depth decoder reads it and writes the frame's K codes, each after the
codes before it. Every step here is a call of the decoder's own layers over one new position. Its number is known when
the frame begins, so the cache is written and read by slices of fixed buffers: no mask, no length on the device, no
wait for it. A whole frame is one function of tensors that a CUDA graph can record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# (codes so far [B, n], logits [B, V]) -> the next code [B]
Choice = Callable[[Tensor, Tensor], Tensor]


class DepthCache:
    """Keys and values of one frame, in buffers that later frames write again. Layers call its `update`.

    Args:
        places: positions of a frame.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.position = 0
        # One pair for each layer, batch size, type and device: recorded frames know them by address.
        self._buffers: dict[Any, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, n, d] at the position, and return all up to there."""
        place = (layer, len(keys), keys.dtype, keys.device)
        if place not in self._buffers:
            batch, heads, _, size = keys.shape
            shapes = (batch, heads, self.places, size), (batch, heads, self.places, values.shape[-1])
            self._buffers[place] = keys.new_zeros(shapes[0]), values.new_zeros(shapes[1])
        end = self.position + keys.shape[2]
        kept_keys, kept_values = self._buffers[place]
        kept_keys[:, :, self.position : end] = keys
        kept_values[:, :, self.position : end] = values
        return kept_keys[:, :, :end], kept_values[:, :, :end]


class DepthDecoder:
    """The frames of a depth decoder of transformers.

    A subclass says what the decoder reads before its first code (`begin`), after a code (`embed`), and its head.

    Args:
        model: the decoder, whose modules and weights are used as they are.

    Attributes:
        steps: codes that a frame has to draw.
        prefix: positions before the first of them.
    """

    prefix = 1

    def __init__(self, model: Any, layers: Any, norm: Any, steps: int) -> None:
        self.model, self.layers, self.norm, self.steps = model, layers, norm, steps
        self.cache = DepthCache(self.prefix + steps - 1)

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What the first call reads, [B, prefix, C], of the ids [B, n] and the hidden states before a frame."""
        raise NotImplementedError

    def embed(self, step: int, code: Tensor, hidden: Tensor) -> Tensor:
        """What is read, [B, 1, C], after the code [B] that a step has drawn."""
        raise NotImplementedError

    def head(self, step: int, hidden: Tensor) -> Tensor:
        """The logits [B, V] of a step's code from the last hidden state [B, C]."""
        raise NotImplementedError

    def tables(self, embeds: Tensor) -> Callable[[int, int], dict[str, Any]]:
        """What layers read beside hidden states, as a function of the first and last position of a call."""
        return lambda start, end: {}

    def frame(self, ids: Tensor, hidden: Tensor, choose: Choice) -> Tensor:
        """Draw the codes of one frame, [B, steps].

        Args:
            ids: what `choose` reads before the drawn codes, long [B, n]; its end is what the decoder reads.
            hidden: of the backbone.
            choose: draws a code from the codes so far and the logits.
        """
        read = self.begin(ids, hidden)
        given, position, tables = ids.shape[1], 0, self.tables(read)
        for step in range(self.steps):
            end = position + read.shape[1]
            state, self.cache.position = read, position
            extra = dict(tables(position, end), past_key_values=self.cache, attention_mask=self._mask(read))
            for layer in self.layers:
                state = layer(state, **extra)
            state = state[:, -1]
            logits = self.head(step, state if self.norm is None else self.norm(state))
            code = choose(ids, logits)
            ids = torch.cat([ids, code[:, None]], 1)
            position = end
            if step + 1 < self.steps:
                read = self.embed(step, code, hidden)
        return ids[:, given:]

    def _mask(self, read: Tensor) -> Tensor | None:
        """The mask of a call's positions; "sdpa" makes its own, and one position sees all before it."""
        length = read.shape[1]
        if length == 1 or self.model.config._attn_implementation != "eager":
            return None
        hidden = torch.full(
            (length, length), torch.finfo(read.dtype).min, dtype=read.dtype, device=read.device
        )
        return hidden.triu(1)[None, None]


class _Rotary(DepthDecoder):
    """Decoders whose layers read rotary tables by position."""

    rotary: Any

    def tables(self, embeds: Tensor) -> Callable[[int, int], dict[str, Any]]:
        places = torch.arange(self.cache.places, device=embeds.device)[None]
        cos, sin = self.rotary(embeds, places)
        return lambda start, end: dict(
            position_embeddings=(cos[:, start:end], sin[:, start:end]), position_ids=places[:, start:end]
        )


class CsmDepth(_Rotary):
    """CSM's: reads the backbone's hidden state and the frame's first code, and draws the other K - 1."""

    prefix = 2

    def __init__(self, model: Any) -> None:
        inner = model.model
        super().__init__(model, inner.layers, inner.norm, model.config.num_codebooks - 1)
        self.rotary = inner.rotary_emb

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        first = self.model.model.embed_tokens(ids[:, -1])
        return self.model.model.inputs_embeds_projector(torch.stack([hidden.to(first.dtype), first], 1))

    def embed(self, step: int, code: Tensor, hidden: Tensor) -> Tensor:
        inner = self.model.model
        offset = (step + 1) * self.model.config.vocab_size
        return inner.inputs_embeds_projector(inner.embed_tokens(code[:, None] + offset))

    def head(self, step: int, hidden: Tensor) -> Tensor:
        return hidden @ self.model.codebooks_head.weight[step]


class MoshiDepth(DepthDecoder):
    """Moshi's: reads the frame's text token with the backbone's hidden state, and draws all K codes.

    Every position has weights of its own, and every position reads the hidden state.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.layers, None, model.config.num_codebooks)

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.model.text_embed_tokens(ids[:, -1:]) + self._projected(0, hidden)

    def embed(self, step: int, code: Tensor, hidden: Tensor) -> Tensor:
        return self.model.embed_tokens[step](code[:, None]) + self._projected(step + 1, hidden)

    def head(self, step: int, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.lm_heads.weight[step])

    def tables(self, embeds: Tensor) -> Callable[[int, int], dict[str, Any]]:
        places = torch.arange(self.cache.places, device=embeds.device)
        return lambda start, end: dict(codebook_idx=places[start:end], position_ids=places[None, start:end])

    def _projected(self, place: int, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.input_projections.weight[place])


class QwenDepth(_Rotary):
    """The code predictor of Qwen3-Omni's talker: reads hidden state and first code as embeddings, draws K - 1 codes."""

    prefix = 2

    def __init__(self, model: Any) -> None:
        inner = model.model
        super().__init__(model, inner.layers, inner.norm, model.config.num_code_groups - 1)
        self.rotary = inner.rotary_emb

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, step: int, code: Tensor, hidden: Tensor) -> Tensor:
        return self.model.model.codec_embedding[step](code[:, None])

    def head(self, step: int, hidden: Tensor) -> Tensor:
        return self.model.lm_head[step](hidden)
