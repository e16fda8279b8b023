"""Speed up MiniMax-Music 3 of diffusers, a modular pipeline that the user already has, and undo it.

    visual_spec.accelerate(pipe)
    waves = pipe(prompt=..., lyrics=..., output="audios")

Only the block that writes codes is wrapped. While it runs, two modules compute less, and the loop, its draws and their
generator stay those of diffusers. So codes and hidden states are those of diffusers, up to rounding:

* The head of the language model is computed for 16,384 codes and the end, in place of the whole vocabulary.
* The depth decoder keeps keys and values: 8 positions a frame in place of 2 + 3 + ... + 8 = 35.

The block still waits once a frame for the drawn code, to see the end. Checked with diffusers 0.42.1.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.columns.depth import DepthCache
from visual_spec.pipelines.accelerate.adapter import Adapter, hang, is_accelerated, is_of, take_off, unwrapped
from visual_spec.pipelines.accelerate.depth import DepthTrace
from visual_spec.samplers.core.trace import Stopwatch

PIPELINE = "MiniMaxMusic3ModularPipeline"
_STEP = "MiniMaxMusic3AutoregressiveStep"
_CONSTANTS = ("_AUDIO_CODE_OFFSET", "_SEMANTIC_VOCAB_SIZE", "_AUDIO_END_TOKEN_ID")


class MiniMaxMusicAdapter(Adapter):
    """MiniMax-Music 3 of diffusers: a cache for its depth decoder and fewer rows of the head, the same codes."""

    takes = (PIPELINE,)
    fast_sampler = None  # all that is done is exact

    def models(self, thing: Any) -> list[Any]:
        pipe = unwrapped(thing)
        return [pipe] if is_of(pipe, (PIPELINE,), "diffusers") else []

    def accelerate(self, thing: Any, sampler: Any = None) -> Any:
        """Wrap the block that writes codes. Twice changes nothing.

        Raises:
            TypeError: a sampler (this pipeline takes none), or a pipeline or release without that block.
        """
        [pipe] = self.models(thing)
        if sampler is not None:
            raise TypeError(
                f"{type(sampler).__name__} given; a {PIPELINE} takes no sampler: its frames are drawn code by code. "
                "Pass the pipeline alone."
            )
        if is_accelerated(pipe):
            return thing
        place = _place(pipe._blocks)
        if place is None:
            raise TypeError(
                f"this {PIPELINE} has no {_STEP} as diffusers 0.42 has it; pass one that writes codes, such as "
                "MiniMaxMusic3Blocks().init_pipeline(...)."
            )
        parent, name = place
        blocks = parent.sub_blocks.copy()
        trace = DepthTrace(PIPELINE, 7)
        blocks[name] = _Step(blocks[name], trace)
        hang(parent, sub_blocks=blocks)
        hang(pipe, last_trace=trace)
        return thing

    def restore(self, thing: Any) -> Any:
        for pipe in self.models(thing):
            place = _place(pipe._blocks)
            if place is not None:
                take_off(place[0])
            take_off(pipe)
        return thing

    def line(self, model: Any) -> str:
        return model.last_trace.summary()


def _place(blocks: Any) -> tuple[Any, str] | None:
    """The block that holds the one that writes codes, and its name there."""
    for name, block in blocks.sub_blocks.items():
        if isinstance(block, _Step):
            return blocks, name
        if type(block).__name__ == _STEP:
            constants = vars(import_module(type(block).__module__))
            return (blocks, name) if all(constant in constants for constant in _CONSTANTS) else None
        inner = _place(block)
        if inner is not None:
            return inner
    return None


class _Step:
    """The block of diffusers; while it runs, two modules compute less."""

    def __init__(self, block: Any, trace: DepthTrace) -> None:
        self.block, self.trace = block, trace

    def __getattr__(self, name: str) -> Any:
        if name == "block":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.block, name)

    def __call__(self, components: Any, state: Any) -> Any:
        head, decoder = components.language_model.lm_head, components.rvq_depth_decoder
        offset, codes, end = (vars(import_module(type(self.block).__module__))[name] for name in _CONSTANTS)
        self.trace.codes = decoder.config.num_codebooks - 1
        moved = any(
            hasattr(part, "_hf_hook") or hasattr(part, "_diffusers_hook")
            for model in (components.language_model, decoder)
            for part in model.modules()
        )
        watch = Stopwatch()
        try:
            if not moved and type(head) is nn.Linear and head.bias is None:
                hang(head, forward=functools.partial(_some_rows, head, offset, codes, end))
            if not moved and all(layer.attn.processor._attention_backend is None for layer in decoder.layers):
                hang(decoder, forward=_Cached(decoder))
            result = self.block(components, state)
        finally:
            cached = vars(decoder).get("forward")
            take_off(head)
            take_off(decoder)
        watch.lap("codes", components._execution_device)
        self.trace.seconds += watch.read()[0]
        frames = state.get("frame_hiddens").shape[1]
        if isinstance(cached, _Cached):
            self.trace.frames += frames
        else:
            self.trace.plain += frames
        return result


def _some_rows(head: Any, offset: int, codes: int, end: int, hidden: Tensor) -> Tensor:
    """Logits [..., V]; those of ids that are never drawn are minus infinity."""
    logits = hidden.new_full((*hidden.shape[:-1], len(head.weight)), -torch.inf)
    logits[..., offset : offset + codes] = F.linear(hidden, head.weight[offset : offset + codes])
    logits[..., end : end + 1] = F.linear(hidden, head.weight[end : end + 1])
    return logits


class _Cached:
    """The depth decoder's `forward`, for inputs [B, n, C] that grow by a position from call to call."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.cache = DepthCache(decoder.config.num_codebooks)
        self.length = 0

    def __call__(self, inputs_embeds: Tensor) -> Tensor:
        """The last hidden states, [B, 1 or n, C]: the loop reads the last one."""
        length = inputs_embeds.shape[1]
        start = self.length if length == self.length + 1 and length > 2 else 0
        self.length, self.cache.position = length, start
        places = torch.arange(start, length, device=inputs_embeds.device)
        hidden = inputs_embeds[:, start:] + self.decoder.pos_embedding(places)
        for index, layer in enumerate(self.decoder.layers):
            attention, read = layer.attn, layer.input_layernorm(hidden)
            query, keys, values = (
                project(read).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
                for project in (attention.to_q, attention.to_k, attention.to_v)
            )
            keys, values = self.cache.update(keys, values, index)
            mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=start == 0)
            hidden = hidden + attention.to_out(mixed.transpose(1, 2).flatten(2))
            read = layer.post_attention_layernorm(hidden)
            hidden = hidden + layer.down_proj(F.silu(layer.gate_proj(read)) * layer.up_proj(read))
        return self.decoder.norm(hidden)
