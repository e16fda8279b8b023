"""Speed up the depth decoder of a speech model of transformers that the user already has, and undo it.

    model = CsmForConditionalGeneration.from_pretrained(...)
    visual_spec.accelerate(model)
    audio = model.generate(**inputs, output_audio=True)

These models write the K codes of every frame by a `generate` of their depth decoder: K serial steps, with the set-up of
`generate` and a cache and masks that it makes anew. Only that inner `generate` is replaced, by
`visual_spec.models.columns.depth`; the model's own calls it with every setting it takes. Logits go through the
processors that transformers itself makes of the settings. A sampled code is the largest of probability / noise: so
`torch.multinomial` draws one, and the noise comes in its order from PyTorch's own generator. So codes equal what
the model's own `generate` draws for the same seed, greedy or sampled, up to rounding of logits. On a GPU the frame is
recorded as one CUDA graph.

`accelerate(model, "depth-window")` draws a frame in fewer, wider calls
(`visual_spec.samplers.raster.depth_window`), the same codes. Its drafts are the codes of the frame before. What it
gains is up to the model: `summary` says how many codes a call it made. Its calls are not recorded.

What the frame does not know goes the model's own way: beams, an end inside a frame, scores or attentions as output,
attention other than "sdpa" and "eager", weights that are moved between devices, frames longer than a sliding window
or than a rotary embedding that follows the length of a call ("dynamic", "longrope") allows. `summary` counts them.

Checked with transformers 5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visual_spec.models.columns.depth import CsmDepth, DepthDecoder, MoshiDepth, QwenDepth
from visual_spec.models.core.settings import AUTO
from visual_spec.models.next_token.length_limits import length_limits
from visual_spec.pipelines.accelerate.adapter import Adapter, Thing, hang, is_of, unwrapped
from visual_spec.pipelines.sampler_text import parse_sampler
from visual_spec.samplers.core.checks import wants_graph
from visual_spec.samplers.core.graph import RecordedFunction
from visual_spec.samplers.core.precision import low_precision_of, near_ties_of, rounding_unit
from visual_spec.samplers.core.trace import Stopwatch, up_to_near_ties
from visual_spec.samplers.raster.depth_window import DepthWindow

# Class of transformers: (where its depth decoder is, how that is read, which argument holds the hidden state).
MODELS: dict[str, tuple[str, Callable[[Any], DepthDecoder], str]] = {
    "CsmForConditionalGeneration": ("depth_decoder", CsmDepth, "backbone_last_hidden_state"),
    "MoshiForConditionalGeneration": ("depth_decoder", MoshiDepth, "last_hidden_state"),
    "Qwen3OmniMoeTalkerForConditionalGeneration": ("code_predictor", QwenDepth, "inputs_embeds"),
    "Qwen3OmniMoeForConditionalGeneration": ("talker.code_predictor", QwenDepth, "inputs_embeds"),
    "Qwen3TTSTalkerForConditionalGeneration": ("code_predictor", QwenDepth, "inputs_embeds"),
    "Qwen3TTSForConditionalGeneration": ("talker.code_predictor", QwenDepth, "inputs_embeds"),
}
_ATTENTION = ("sdpa", "eager")
WINDOW = "depth-window"
# Processors that read a slot's scores alone: several slots of a text go through them at once.
_BY_SLOT = {
    f"{name}LogitsWarper" for name in ("Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta")
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions")


@dataclass
class DepthTrace:
    """What frames cost since a model was accelerated.

    Attributes:
        model: class name of the model.
        codes: that a frame draws.
        window: that draws them; None: one by one.
        frames: drawn here, a batch of frames counting once.
        calls: of the depth decoder for them.
        plain: drawn by the decoder's own `generate`.
        reason: why the last of those was.
        seconds: wall time of `frames`.
        low_precision: what the decoder rounds to where that is coarser than float32, such as "bfloat16": there rounding
            decides near-ties, between windows, and between them and the decoder's own `generate`. None: it decides
            nothing.
        near_ties: long [], codes where rounding may exchange the two best ones; None where they are not counted.
    """

    model: str
    codes: int
    window: DepthWindow | None = None
    frames: int = 0
    calls: int = 0
    plain: int = 0
    reason: str = ""
    seconds: float = 0.0
    low_precision: str | None = None
    near_ties: Tensor | None = None

    def summary(self) -> str:
        """Return one line: frames, codes, time, and what the codes are."""
        rate = self.frames * self.codes / max(self.calls, 1)
        why = f" ({self.reason})" if self.plain else ""
        near = None if self.near_ties is None else int(self.near_ties)
        return (
            f"{self.model}: {self.frames} frames of {self.codes} codes in {self.calls} calls ({rate:.2f} codes a call) "
            f"and {self.seconds:.2f} s, {self.plain} by its own generate{why}; "
            + up_to_near_ties("the codes of its own generate", self.low_precision, near)
        )

    def met(self, low_precision: str | None, near: Tensor | None) -> None:
        """Count the near-ties of a frame, where the decoder rounds to a type that is coarser than float32."""
        self.low_precision = low_precision
        if near is not None:
            count = near.sum()  # stays on the device: a frame does not wait for it
            self.near_ties = count if self.near_ties is None else self.near_ties + count


def check_window(sampler: object, model: str) -> None:
    """Refuse what draws no frames.

    Raises:
        TypeError: it is neither None nor a `DepthWindow`.
    """
    if not isinstance(sampler, DepthWindow | None):
        raise TypeError(
            f"{type(sampler).__name__} given; a {model} takes no sampler but {WINDOW!r}, which draws a frame's codes."
        )


class DepthAdapter(Adapter):
    """CSM, Moshi, Qwen3-Omni and Qwen3-TTS: the codes of a frame in a static cache, the same codes.

    `last_trace`, a `DepthTrace`, counts frames since the model was accelerated.
    """

    takes = tuple(MODELS)
    fast_sampler = None  # all that is done is exact

    def models(self, thing: object) -> list[Any]:
        model = unwrapped(thing)
        return [model] if is_of(model, MODELS, "") and self.decoder_of(model) is not None else []

    def read_text(self, text: str) -> DepthWindow:
        name, settings = parse_sampler(text)
        if name != WINDOW or settings.keys() - {"window"}:
            raise TypeError(
                f"{text!r} given; a depth decoder takes {WINDOW!r} or '{WINDOW}:window=N', or no sampler."
            )
        return DepthWindow(**settings)

    def accelerate(self, thing: Thing, sampler: DepthWindow | None = None) -> Thing:
        """Replace the `generate` of the depth decoder. Calling it again swaps the window.

        Raises:
            TypeError: a sampler that is no `DepthWindow`.
        """
        [model] = self.models(thing)
        check_window(sampler, type(model).__name__)
        self.restore(thing)
        _, kind, argument = _entry(model)
        decoder = self.decoder_of(model)
        frames = _Frames(decoder, kind(decoder), argument, type(model).__name__, sampler)
        hang(decoder, generate=functools.update_wrapper(functools.partial(frames), decoder.generate))
        hang(model, last_trace=frames.trace)
        return thing

    def parts(self, model: Any) -> tuple[object, ...]:
        return self.decoder_of(model), model

    def line(self, model: Any) -> str:
        trace = model.last_trace
        return trace.summary() if trace.frames + trace.plain else self.promised(model)

    def expects(self, model: Any) -> str:
        trace = model.last_trace
        drawn = "one by one" if trace.window is None else f"by {trace.window}"
        same = up_to_near_ties("the same codes", low_precision_of(self.decoder_of(model)))
        return f"{trace.codes} codes a frame in a static cache, {drawn}, {same}"

    def decoder_of(self, model: object) -> Any:
        """The decoder of the codes of a frame; None where the model was built without its talker."""
        for name in _entry(model)[0].split("."):
            model = getattr(model, name, None)
        return model


def _entry(model: object) -> tuple[str, Callable[[Any], DepthDecoder], str]:
    return next(MODELS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in MODELS)


class _Law(NamedTuple):
    """How the codes of a frame are chosen."""

    key: str  # of all that it was read from
    score: Callable[[Tensor, Tensor], Tensor]  # of ids [B, m] and logits [B, n, V]
    low: str | None  # what the decoder rounds to
    sampled: bool
    as_output: bool
    with_states: bool


class _Frames:
    """The `generate` of a depth decoder."""

    def __init__(
        self, model: Any, decoder: DepthDecoder, argument: str, name: str, window: DepthWindow | None
    ) -> None:
        self.model, self.decoder, self.argument, self.window = model, decoder, argument, window
        self.plain = model.generate
        self.trace = DepthTrace(name, decoder.steps, window)
        self._laws: dict[str, _Law | str] = {}
        self._recorded: dict[str, RecordedFunction] = {}
        self._last: Tensor | None = None  # codes of the frame before

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = kwargs.get(self.argument)
        ids: Any = kwargs.get("input_ids")
        settings = {name: kwargs[name] for name in kwargs if name not in ("input_ids", self.argument)}
        law = f"it got no {self.argument} by name"
        if not args and isinstance(hidden, Tensor):
            if ids is None:
                ids = torch.empty(len(hidden), 0, dtype=torch.long, device=hidden.device)
            law = self._law(settings, ids)
        if isinstance(law, str):
            self.trace.plain += 1
            self.trace.reason = law
            return self.plain(*args, **kwargs)
        watch = Stopwatch()
        noise = draw_noise(self.decoder, len(ids), ids.device) if law.sampled else None
        made = self._codes(law, ids, hidden, noise)
        codes = check_codes(made[:, : self.decoder.steps], self.trace.model)
        watch.lap("frame", codes.device)
        self.trace.met(law.low, None if law.low is None else made[:, self.decoder.steps :])
        self.trace.frames += 1
        self.trace.seconds += watch.read()[0]
        sequences = torch.cat([ids, codes], 1)
        if not law.as_output:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        # Of hidden states only the first of each step are known, what was read: those Qwen3-Omni sums.
        states = None
        if law.with_states:
            read = self.decoder.embed(0, codes[:, :-1], hidden).split(1, 1)
            states = tuple((state,) for state in (self.decoder.begin(ids, hidden), *read))
        return GenerateDecoderOnlyOutput(sequences=sequences, hidden_states=states)  # pyright: ignore[reportArgumentType]

    def _codes(self, law: _Law, ids: Tensor, hidden: Tensor, noise: Tensor | None) -> Tensor:
        """The codes of a frame, [B, steps]; -1 where a hidden state is no number. Where the decoder rounds to the type
        `low`, [B, 2 steps]: after the codes those that are near-ties."""

        def choose(ids: Tensor, logits: Tensor, noise: Tensor | None) -> Tensor:
            scores = law.score(ids, logits)
            return (scores if noise is None else scores.softmax(-1) / noise).argmax(-1)

        def marked(codes: Tensor, states: Tensor, ids: Tensor, noise: Tensor | None = None) -> Tensor:
            found = codes.where(states.isfinite().all(-1), -1)
            if law.low is None:
                return found
            scores = law.score(torch.cat([ids, codes[:, :-1]], 1), self.decoder.heads(0, states))
            largest = scores.masked_fill(scores.isinf(), 0).abs().amax(-1)
            near = near_ties_of(scores, noise, largest * rounding_unit(law.low))
            return torch.cat([found, near.long()], 1)

        if self.window is not None:
            self._last, states, calls = self.window.frame(
                self.decoder, ids, hidden, choose, noise, self._last
            )
            self.trace.calls += calls
            return marked(self._last, states, ids, noise)

        def frame(*tensors: Tensor) -> Tensor:
            ids, hidden, *noise = tensors
            return marked(*self.decoder.frame(ids, hidden, choose, *noise), ids, *noise)

        self.trace.calls += self.decoder.steps
        inputs = (ids, hidden) if noise is None else (ids, hidden, noise)
        if not wants_graph(AUTO, self.model):
            return frame(*inputs)
        if law.key not in self._recorded:
            self._recorded[law.key] = RecordedFunction(self.model, frame)
        return self._recorded[law.key](*inputs)

    def _law(self, settings: dict[str, object], ids: Tensor) -> _Law | str:
        """How a code is chosen with settings of `generate`, and these; or, where the decoder's own `generate` has to
        draw, why."""
        low = low_precision_of(self.model)
        key = repr(
            (sorted(settings.items()), vars(self.model.generation_config), ids.shape[1], ids.device, low)
        )
        if key not in self._laws:
            self._laws[key] = self._read(key, low, settings, ids)
        return self._laws[key]

    def _read(self, key: str, low: str | None, settings: dict[str, object], ids: Tensor) -> _Law | str:
        from transformers import LogitsProcessorList
        from transformers.generation.configuration_utils import GenerationMode

        model = self.model
        if model.config._attn_implementation not in _ATTENTION:
            return (
                f"attention {model.config._attn_implementation!r}; {' and '.join(_ATTENTION)} take our masks"
            )
        if any(hasattr(part, "_hf_hook") for part in model.modules()):
            return "hooks of accelerate move its parts between devices"
        # A cache of all places, whose rotary tables are computed at once, gives other codes beyond these.
        limits = [most for most, _ in length_limits(model, model)]
        limits.append(getattr(model.config, "sliding_window", None) or self.decoder.cache.places)
        if self.decoder.cache.places > min(limits):
            return f"its positions change beyond {min(limits)} places, and a frame has {self.decoder.cache.places}"
        config, others = model._prepare_generation_config(
            settings.get("generation_config"),
            **{name: value for name, value in settings.items() if name != "generation_config"},
        )
        states = bool(others.pop("output_hidden_states", False) or config.output_hidden_states)
        sampled = config.get_generation_mode()
        given = ids.shape[1]
        length = config.max_length - given if config.max_new_tokens is None else config.max_new_tokens
        refused = {
            f"it does not take {', '.join(others)}": others,
            "it draws by beams, or with an assistant": sampled
            not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
            f"num_return_sequences={config.num_return_sequences}": (config.num_return_sequences or 1) != 1,
            f"eos_token_id={config.eos_token_id} may end a frame": config.eos_token_id is not None,
            f"{length} codes asked for, a frame has {self.decoder.steps}": length != self.decoder.steps,
            f"one of {', '.join(_OUTPUTS)} is asked for": any(getattr(config, name) for name in _OUTPUTS),
            "hidden states are asked for": states and self.argument != "inputs_embeds",
        }
        for reason, holds in refused.items():
            if holds:
                return reason
        model._prepare_special_tokens(config, False, device=ids.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=given,
            logits_processor=LogitsProcessorList(),
            device=ids.device,
            model_kwargs={},
        )

        by_slot = all(type(processor).__name__ in _BY_SLOT for processor in processors)

        def score(ids: Tensor, logits: Tensor) -> Tensor:
            logits = logits.to(torch.float32, copy=True)
            count = logits.shape[1]
            if by_slot:
                return processors(ids, logits.flatten(0, 1)).view_as(logits)  # pyright: ignore[reportArgumentType]
            texts = [ids[:, : ids.shape[1] - count + 1 + slot] for slot in range(count)]
            rows = [processors(text, logits[:, slot]) for slot, text in enumerate(texts)]  # pyright: ignore[reportArgumentType]
            return torch.stack(list(map(torch.as_tensor, rows)), 1)

        sampled = sampled is GenerationMode.SAMPLE
        return _Law(key, score, low, sampled, config.return_dict_in_generate, states)


def draw_noise(
    decoder: DepthDecoder, rows: int, device: torch.device, generator: torch.Generator | None = None
) -> Tensor:
    """The noise of a frame's steps as `torch.multinomial` draws it step by step, [rows, steps, V]."""
    draws = [torch.empty(rows, decoder.vocab_size, device=device) for _ in range(decoder.steps)]
    return torch.stack([draw.exponential_(generator=generator) for draw in draws], 1)


def check_codes(codes: Tensor, model: str) -> Tensor:
    """Return the codes of a frame.

    Raises:
        FloatingPointError: a code is -1, since its hidden state is no number.
    """
    bad = (codes < 0).any(1)
    if bool(bad.any()):
        raise FloatingPointError(
            f"{model}: hidden states of row {bad.nonzero()[0].item()} of a frame are not finite; check the weights, or "
            "load them in float32."
        )
    return codes
