"""Speed up MiniMax-Music 3 of diffusers, a modular pipeline that the user already has, and undo it.

    visual_spec.accelerate(pipe)
    waves = pipe(prompt=..., lyrics=..., output="audios")

Only the block that writes codes is wrapped. While it runs, two things compute less, and the loop, its draws and their
generator stay diffusers' own. So codes and hidden states equal diffusers' own, up to rounding:

* The head of the language model is computed for 16,384 codes and the end, in place of the whole vocabulary.
* The depth decoder keeps keys and values: 8 positions a frame in place of 2 + 3 + ... + 8 = 35. With
  `accelerate(pipe, "depth-window")` it draws a frame in fewer calls (`visual_spec.samplers.raster.depth_window`).

The block still waits once a frame for the drawn code, to see the end. Checked with diffusers 0.42.1.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.columns.depth import MiniMaxDepth
from visual_spec.pipelines.accelerate.adapter import Thing, hang, is_of, take_off, unwrapped
from visual_spec.pipelines.accelerate.depth import (
    DepthAdapter,
    DepthTrace,
    check_codes,
    check_window,
    draw_noise,
)
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.precision import low_precision_of, near_ties_of, rounding_of, rounding_unit
from visual_spec.samplers.core.trace import Stopwatch
from visual_spec.samplers.raster.depth_window import DepthWindow

PIPELINE = "MiniMaxMusic3ModularPipeline"
_STEP = "MiniMaxMusic3AutoregressiveStep"
_FRAME = "_generate_depth_codes"  # what its loop calls for the codes of a frame
# What is read from its module beside that.
_NAMES = (
    "_AUDIO_CODE_OFFSET",
    "_SEMANTIC_VOCAB_SIZE",
    "_AUDIO_END_TOKEN_ID",
    "_AR_CFG_SCALE",
    "_AR_SAMPLING_TOP_K",
)


class MiniMaxMusicAdapter(DepthAdapter):
    """MiniMax-Music 3 of diffusers: a cache for its depth decoder and fewer rows of the head, the same codes."""

    takes = (PIPELINE,)

    def models(self, thing: object) -> list[Any]:
        pipe = unwrapped(thing)
        return [pipe] if is_of(pipe, (PIPELINE,), "diffusers") else []

    def accelerate(self, thing: Thing, sampler: DepthWindow | None = None) -> Thing:
        """Wrap the block that writes codes. Calling it again swaps the window.

        Raises:
            TypeError: a sampler that is no `DepthWindow`, or a pipeline or release without that block.
        """
        [pipe] = self.models(thing)
        check_window(sampler, PIPELINE)
        self.restore(thing)
        place = _place(pipe._blocks)
        if place is None:
            raise TypeError(
                f"this {PIPELINE} has no {_STEP} as diffusers 0.42 has it; pass one that writes codes, such as "
                "MiniMaxMusic3Blocks().init_pipeline(...)."
            )
        parent, name = place
        blocks = parent.sub_blocks.copy()
        trace = DepthTrace(PIPELINE, 7, sampler)
        blocks[name] = _Step(blocks[name], trace, sampler)
        hang(parent, sub_blocks=blocks)
        hang(pipe, last_trace=trace)
        return thing

    def decoder_of(self, model: Any) -> Any:
        return model.rvq_depth_decoder

    def parts(self, model: Any) -> tuple[object, ...]:
        place = _place(model._blocks)
        return (model,) if place is None else (place[0], model)


def _place(blocks: Any) -> tuple[Any, str] | None:
    """The block that holds the one that writes codes, and its name there."""
    for name, block in blocks.sub_blocks.items():
        if isinstance(block, _Step):
            return blocks, name
        if type(block).__name__ == _STEP:
            known = vars(import_module(type(block).__module__))
            return (blocks, name) if known.keys() >= {*_NAMES, _FRAME} else None
        inner = _place(block)
        if inner is not None:
            return inner
    return None


class _Step:
    """The block of diffusers; while it runs, the head and the depth decoder compute less."""

    def __init__(self, block: Any, trace: DepthTrace, window: DepthWindow | None) -> None:
        self.block, self.trace, self.window = block, trace, window

    def __getattr__(self, name: str) -> Any:
        if name == "block":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.block, name)

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        head, decoder = components.language_model.lm_head, components.rvq_depth_decoder
        known = vars(import_module(type(self.block).__module__))
        offset, codes, end, scale, most = (known[name] for name in _NAMES)
        self.trace.codes = decoder.config.num_codebooks - 1
        moved = any(
            hasattr(part, "_hf_hook") or hasattr(part, "_diffusers_hook")
            for model in (components.language_model, decoder)
            for part in model.modules()
        )
        cached = not moved and all(
            layer.attn.processor._attention_backend is None for layer in decoder.layers
        )
        run: Any = self.block
        if cached:
            # The loop of diffusers, where the name of its function for the codes of a frame means ours.
            loop: Any = inspect.unwrap(type(run).__call__)
            names = loop.__globals__ | {
                _FRAME: _FrameCodes(decoder, offset, scale, most, self.window, self.trace)
            }
            run = functools.partial(FunctionType(loop.__code__, names), run)
        watch = Stopwatch()
        try:
            if not moved and type(head) is nn.Linear and head.bias is None:
                hang(head, forward=functools.partial(_some_rows, head, offset, codes, end))
            result = run(components, state)
        finally:
            take_off(head)
        watch.lap("codes", components._execution_device)
        self.trace.seconds += watch.read()[0]
        frames = state.get("frame_hiddens").shape[1]
        if cached:
            self.trace.frames += frames
        else:
            self.trace.plain += frames
        return result


def _some_rows(head: nn.Linear, offset: int, codes: int, end: int, hidden: Tensor) -> Tensor:
    """Logits [..., V], minus infinity for ids that are never drawn."""
    logits = hidden.new_full((*hidden.shape[:-1], len(head.weight)), -torch.inf)
    logits[..., offset : offset + codes] = F.linear(hidden, head.weight[offset : offset + codes])
    logits[..., end : end + 1] = F.linear(hidden, head.weight[end : end + 1])
    return logits


class _FrameCodes:
    """Draws the codes of frames in place of the function of diffusers, by its law and its draws.

    Args:
        offset: id of the first code in the language model's vocabulary.
        scale, most: guidance and top-k of the law.
    """

    def __init__(
        self,
        decoder: nn.Module,
        offset: int,
        scale: float,
        most: int,
        window: DepthWindow | None,
        trace: DepthTrace,
    ) -> None:
        self.decoder, self.offset, self.scale, self.most = decoder, offset, scale, most
        self.window, self.trace = window, trace
        self._last: Tensor | None = None  # codes of the frame before

    def __call__(
        self,
        language_model: Any,
        decoder: Any,
        hidden: Tensor,
        first: Tensor,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """Codes [2, K], with the first ones [2], and the hidden states [1, (K - 1) * C] of the others' draws."""
        embed = language_model.model.embed_tokens
        depth = MiniMaxDepth(decoder, lambda code: embed(code + self.offset))
        noise = draw_noise(depth, 1, hidden.device if generator is None else generator.device, generator)
        ids = first[:, None]
        if self.window is None:
            codes, states = depth.frame(ids, hidden, self._choose, noise)
            self.trace.calls += depth.steps
        else:
            codes, states, calls = self.window.frame(depth, ids, hidden, self._choose, noise, self._last)
            self.trace.calls += calls
        self._last = check_codes(codes.where(states.isfinite().all(-1), -1), PIPELINE)
        low = low_precision_of(decoder)
        near = None if low is None else self._near_ties(depth.heads(0, states), noise, rounding_unit(low))
        self.trace.met(low, near)
        return torch.cat([ids, codes], 1), states[:1].flatten(1)

    def _choose(self, ids: Tensor, logits: Tensor, noise: Tensor | None) -> Tensor:
        assert noise is not None
        shares = self._scores(logits).softmax(-1)
        shares = shares / shares.sum(-1, keepdim=True)
        return (shares.to(noise.device) / noise).argmax(-1).to(ids.device).expand(2, -1)

    def _near_ties(self, logits: Tensor, noise: Tensor, unit: float) -> Tensor:
        rounding = rounding_of(logits, TokenLaw(guidance_scale=self.scale), True, unit)
        return near_ties_of(self._scores(logits), noise, rounding)

    def _scores(self, logits: Tensor) -> Tensor:
        """Guided logits [1, n, V] of both rows' [2, n, V], minus infinity where the law leaves codes out."""
        conditional, unconditional = logits.float().split(1)
        values = torch.nan_to_num(
            unconditional + (conditional - unconditional) * self.scale, nan=-1e9, posinf=1e9, neginf=-1e9
        )
        least = values.topk(min(self.most, values.shape[-1])).values[..., -1:]
        return values.masked_fill(values < least, -torch.inf)
