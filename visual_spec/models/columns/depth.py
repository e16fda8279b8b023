"""Depth decoders: a small transformer that writes the codes of one audio frame one by one.

A backbone makes one hidden state a frame; the depth decoder reads it and writes the frame's K codes, each after the
codes before it. Every step of `frame` is a call of the decoder's own layers over one new position. Its number is known
when the frame begins, so the cache is written and read by slices of fixed buffers: no mask, no length on the device, no
wait for it. A whole frame is one function of tensors that a CUDA graph can record.
`samplers/raster/depth_window.py` draws a frame in fewer and wider calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.transformers_cache import cache_argument

# (codes before the last slot [B, m], logits [B, n, V] of the last n slots, noise) -> codes [B, n]. Sampled frames have
# exponential noise [B, n, V], greedy ones None.
Choice = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


class DepthCache:
    """Keys and values of one frame, in buffers that later frames write again. Layers call its `update`.

    Args:
        places: positions of a frame.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.position = 0
        # One pair for each layer, batch size, type and device: recorded frames know them by address.
        self._buffers: dict[tuple[int, int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **settings: object
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
    """The frames of a depth decoder.

    A subclass says what the decoder reads before its first code (`begin`), what it reads after codes (`embed`), and its
    heads.

    Args:
        model: the decoder, whose modules and weights are used as they are.
        steps: codes that a frame has to draw.
        vocab_size: V, of each of them.

    Attributes:
        prefix: positions before the first code.
    """

    prefix = 1

    def __init__(self, model: Any, layers: Any, norm: Any, steps: int, vocab_size: int) -> None:
        self.model, self.layers, self.norm = model, layers, norm
        self.steps, self.vocab_size = steps, vocab_size
        self.cache = DepthCache(self.prefix + steps - 1)

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What the first positions read, [B, prefix, C], by the ids [B, m] and the hidden states before a frame."""
        raise NotImplementedError

    def embed(self, first: int, codes: Tensor, hidden: Tensor) -> Tensor:
        """Return what stands after codes [B, n] of the steps from `first`, [B, n, C]."""
        raise NotImplementedError

    def heads(self, first: int, hidden: Tensor) -> Tensor:
        """The logits [B, n, V] of the steps from `first`, by last hidden states [B, n, C]."""
        raise NotImplementedError

    def tables(self, read: Tensor, start: int, end: int) -> dict[str, object]:
        """Return what layers read beside hidden states of the positions from `start` to `end`."""
        return {}

    def run(self, read: Tensor, start: int) -> Tensor:
        """Last hidden states [B, n, C] of what is read from position `start` on; keys and values are written there."""
        end = start + read.shape[1]
        self.cache.position = start
        tables = dict(self.tables(read, start, end), attention_mask=self._mask(read, start))
        tables[cache_argument(self.layers[0])] = self.cache
        for layer in self.layers:
            read = layer(read, **tables)
            read = read[0] if isinstance(read, tuple) else read  # layers of transformers 4
        return read if self.norm is None else self.norm(read)

    def frame(
        self, ids: Tensor, hidden: Tensor, choose: Choice, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw the codes of one frame one by one.

        Args:
            ids: what `choose` reads before the drawn codes, long [B, m]; its end is what the decoder reads.
            hidden: of the backbone.
            noise: of all steps, [B, steps, V].

        Returns:
            Codes [B, steps] and the last hidden states [B, steps, C] that they were drawn from.
        """
        read, start, states = self.begin(ids, hidden), 0, []
        for step in range(self.steps):
            states.append(self.run(read, start)[:, -1:])
            start += read.shape[1]
            code = choose(
                ids, self.heads(step, states[-1]), None if noise is None else noise[:, step : step + 1]
            )
            ids = torch.cat([ids, code], 1)
            if step + 1 < self.steps:
                read = self.embed(step, code, hidden)
        return ids[:, ids.shape[1] - self.steps :], torch.cat(states, 1)

    def _mask(self, read: Tensor, start: int) -> Tensor | None:
        """The mask of a call; one position sees all before it, and "sdpa" alone knows the mask of the first call."""
        length = read.shape[1]
        if length == 1 or (start == 0 and self.model.config._attn_implementation != "eager"):
            return None
        hidden = torch.full(
            (length, start + length), torch.finfo(read.dtype).min, dtype=read.dtype, device=read.device
        )
        return hidden.triu(start + 1)[None, None]


class _Rotary(DepthDecoder):
    """Decoders of K codes a frame that read a hidden state and the first code, and rotary tables by position."""

    prefix = 2

    def __init__(self, model: Any, codes: int) -> None:
        inner = model.model
        super().__init__(model, inner.layers, inner.norm, codes - 1, model.config.vocab_size)
        self.rotary = inner.rotary_emb
        # Cosines, sines and positions of a frame, by type and device: the same for all frames.
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, ...]] = {}

    def tables(self, read: Tensor, start: int, end: int) -> dict[str, object]:
        key = read.dtype, read.device
        if key not in self._tables:
            places = torch.arange(self.cache.places, device=read.device)[None]
            self._tables[key] = (*self.rotary(read, places), places)
        cosines, sines, places = (table[:, start:end] for table in self._tables[key])
        return dict(position_embeddings=(cosines, sines), position_ids=places)


class CsmDepth(_Rotary):
    """CSM's: reads the backbone's hidden state and the frame's first code, and draws the other K - 1."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.config.num_codebooks)

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        first = self.model.model.embed_tokens(ids[:, -1])
        return self.model.model.inputs_embeds_projector(torch.stack([hidden.to(first.dtype), first], 1))

    def embed(self, first: int, codes: Tensor, hidden: Tensor) -> Tensor:
        inner, steps = self.model.model, torch.arange(codes.shape[1], device=codes.device)
        return inner.inputs_embeds_projector(
            inner.embed_tokens(codes + (first + 1 + steps) * self.vocab_size)
        )

    def heads(self, first: int, hidden: Tensor) -> Tensor:
        weight = self.model.codebooks_head.weight[first : first + hidden.shape[1]]
        return torch.einsum("bnc,ncv->bnv", hidden, weight)


class MoshiDepth(DepthDecoder):
    """Moshi's: reads the frame's text token with the backbone's hidden state, and draws all K codes.

    Every position has weights of its own, and every position reads the hidden state.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(
            model, model.layers, None, model.config.num_codebooks, model.lm_heads.weight.shape[1]
        )

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.model.text_embed_tokens(ids[:, -1:]) + self._projected(0, 1, hidden)

    def embed(self, first: int, codes: Tensor, hidden: Tensor) -> Tensor:
        steps = range(codes.shape[1])
        embeds = torch.stack([self.model.embed_tokens[first + i](codes[:, i]) for i in steps], 1)
        return embeds + self._projected(first + 1, len(steps), hidden)

    def heads(self, first: int, hidden: Tensor) -> Tensor:
        weight = self.model.lm_heads.weight[first : first + hidden.shape[1]]
        return torch.einsum("bnc,nvc->bnv", hidden, weight)

    def tables(self, read: Tensor, start: int, end: int) -> dict[str, object]:
        places = torch.arange(start, end, device=read.device)
        return dict(codebook_idx=places, position_ids=places[None])

    def _projected(self, first: int, count: int, hidden: Tensor) -> Tensor:
        """The hidden state [B, 1, C] as `count` positions read it."""
        return torch.einsum(
            "bic,ndc->bnd", hidden, self.model.input_projections.weight[first : first + count]
        )


class QwenDepth(_Rotary):
    """The code predictor of Qwen3-Omni's and Qwen3-TTS's talkers.

    It reads hidden state and first code as embeddings, and draws K - 1 codes. Where it is narrower than its talker, as
    Qwen3-TTS's are, it projects what it reads.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.config.num_code_groups)
        self.project = getattr(model, "small_to_mtp_projection", nn.Identity())

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.project(hidden)

    def embed(self, first: int, codes: Tensor, hidden: Tensor) -> Tensor:
        tables = self.model.model.codec_embedding
        return self.project(torch.stack([tables[first + i](codes[:, i]) for i in range(codes.shape[1])], 1))

    def heads(self, first: int, hidden: Tensor) -> Tensor:
        steps = range(hidden.shape[1])
        return torch.stack([self.model.lm_head[first + i](hidden[:, i]) for i in steps], 1)


class MiniMaxDepth(DepthDecoder):
    """MiniMax-Music 3's of diffusers: reads hidden states and first codes of two rows of guidance, draws K - 1 codes.

    Its blocks take no cache, so they are written out here.

    Args:
        embed_first: embeds the first code, [B] to [B, C]: the language model's table.
    """

    prefix = 2

    def __init__(self, model: Any, embed_first: Callable[[Tensor], Tensor]) -> None:
        config = model.config
        super().__init__(model, model.layers, model.norm, config.num_codebooks - 1, config.audio_vocab_size)
        self.embed_first = embed_first

    def begin(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.model.projection(torch.stack([hidden, self.embed_first(ids[:, -1])], 1))

    def embed(self, first: int, codes: Tensor, hidden: Tensor) -> Tensor:
        steps = torch.arange(codes.shape[1], device=codes.device)
        return self.model.projection(self.model.audio_embeddings(codes + (first + steps) * self.vocab_size))

    def heads(self, first: int, hidden: Tensor) -> Tensor:
        steps = range(hidden.shape[1])
        return torch.stack([self.model.audio_heads[first + i](hidden[:, i]) for i in steps], 1)

    def run(self, read: Tensor, start: int) -> Tensor:
        self.cache.position, end = start, start + read.shape[1]
        hidden = read + self.model.pos_embedding(torch.arange(start, end, device=read.device))
        places = torch.arange(end, device=read.device)
        visible = places <= places[start:, None]
        for index, layer in enumerate(self.layers):
            attention, read = layer.attn, layer.input_layernorm(hidden)
            query, keys, values = (
                project(read).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
                for project in (attention.to_q, attention.to_k, attention.to_v)
            )
            mixed = F.scaled_dot_product_attention(
                query, *self.cache.update(keys, values, index), attn_mask=visible
            )
            hidden = hidden + attention.to_out(mixed.transpose(1, 2).flatten(2))
            read = layer.post_attention_layernorm(hidden)
            hidden = hidden + layer.down_proj(F.silu(layer.gate_proj(read)) * layer.up_proj(read))
        return self.norm(hidden)
