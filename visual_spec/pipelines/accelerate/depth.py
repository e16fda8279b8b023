"""Speed up the depth decoder of a speech model of transformers that the user already has, and undo it.

    model = CsmForConditionalGeneration.from_pretrained(...)
    visual_spec.accelerate(model)
    audio = model.generate(**inputs, output_audio=True)

These models write the K codes of every frame by a `generate` of their depth decoder: K serial steps, with the set-up of
`generate` and a cache and masks that it makes anew. Only that inner `generate` is replaced, by
`visual_spec.models.columns.depth`; the model's own calls it with every setting it takes. Logits go through the
processors that transformers itself makes of the settings, and codes are drawn in the same order from the same
generator. So codes are those of the model's own `generate`, greedy or sampled, up to rounding of logits. On a GPU the
frame is recorded as one CUDA graph.

What the frame does not know goes the model's own way: beams, an end inside a frame, scores or attentions as output,
attention other than "sdpa" and "eager", weights that are moved between devices. `summary` counts such frames.

No speculation is offered inside a frame: docs/LOG.md has the measurement. Checked with transformers 5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.columns.depth import CsmDepth, DepthDecoder, MoshiDepth, QwenDepth
from visual_spec.pipelines.accelerate.adapter import Adapter, hang, is_accelerated, is_of, take_off, unwrapped
from visual_spec.samplers.core.graph import AUTO, RecordedFunction, wants_graph
from visual_spec.samplers.core.trace import Stopwatch

# Class of transformers: (where its depth decoder is, how that is read, which argument holds the hidden state).
MODELS: dict[str, tuple[str, Callable[[Any], DepthDecoder], str]] = {
    "CsmForConditionalGeneration": ("depth_decoder", CsmDepth, "backbone_last_hidden_state"),
    "MoshiForConditionalGeneration": ("depth_decoder", MoshiDepth, "last_hidden_state"),
    "Qwen3OmniMoeTalkerForConditionalGeneration": ("code_predictor", QwenDepth, "inputs_embeds"),
    "Qwen3OmniMoeForConditionalGeneration": ("talker.code_predictor", QwenDepth, "inputs_embeds"),
}
_ATTENTION = ("sdpa", "eager")
_OUTPUTS = ("output_scores", "output_logits", "output_attentions")


@dataclass
class DepthTrace:
    """What frames cost since a model was accelerated.

    Attributes:
        model: class name of the model.
        codes: that a frame draws.
        frames: drawn here, a batch of frames counting once.
        plain: drawn by the decoder's own `generate`.
        seconds: wall time of `frames`.
    """

    model: str
    codes: int
    frames: int = 0
    plain: int = 0
    seconds: float = 0.0

    def summary(self) -> str:
        """Return one line: frames, codes, time, and what the codes are."""
        return (
            f"{self.model}: {self.frames} frames of {self.codes} codes in {self.seconds:.2f} s and {self.plain} by its "
            "own generate, the codes of its own generate"
        )


class DepthAdapter(Adapter):
    """CSM, Moshi and Qwen3-Omni of transformers: the codes of a frame in a static cache, the same codes.

    `last_trace`, a `DepthTrace`, counts frames since the model was accelerated.
    """

    takes = tuple(MODELS)
    fast_sampler = None  # all that is done is exact

    def models(self, thing: Any) -> list[Any]:
        model = unwrapped(thing)
        return [model] if is_of(model, MODELS) and _decoder(model) is not None else []

    def accelerate(self, thing: Any, sampler: Any = None) -> Any:
        """Replace the `generate` of the depth decoder. Twice changes nothing.

        Raises:
            TypeError: a sampler (these models take none).
        """
        [model] = self.models(thing)
        if sampler is not None:
            raise TypeError(
                f"{type(sampler).__name__} given; a {type(model).__name__} takes no sampler: its frames are drawn "
                "code by code. Pass the model alone."
            )
        if not is_accelerated(model):
            _, kind, argument = _entry(model)
            decoder = _decoder(model)
            frames = _Frames(decoder, kind(decoder), argument, type(model).__name__)
            hang(decoder, generate=functools.update_wrapper(functools.partial(frames), decoder.generate))
            hang(model, last_trace=frames.trace)
        return thing

    def restore(self, thing: Any) -> Any:
        for model in self.models(thing):
            take_off(_decoder(model))
            take_off(model)
        return thing

    def line(self, model: Any) -> str:
        trace = model.last_trace
        if not trace.frames + trace.plain:
            return f"{type(model).__name__}: {trace.codes} codes a frame in a static cache, the same codes; nothing yet"
        return trace.summary()


def _entry(model: Any) -> tuple[str, Callable[[Any], DepthDecoder], str]:
    return next(MODELS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in MODELS)


def _decoder(model: Any) -> Any:
    """The depth decoder; None where the model was built without its talker."""
    for name in _entry(model)[0].split("."):
        model = getattr(model, name, None)
    return model


class _Frames:
    """The `generate` of a depth decoder."""

    def __init__(self, model: Any, decoder: DepthDecoder, argument: str, name: str) -> None:
        self.model, self.decoder, self.argument = model, decoder, argument
        self.plain = model.generate
        self.trace = DepthTrace(name, decoder.steps)
        self._laws: dict[str, Any] = {}
        self._recorded: dict[str, RecordedFunction] = {}

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = kwargs.get(self.argument)
        ids: Any = kwargs.get("input_ids")
        settings = {name: kwargs[name] for name in kwargs if name not in ("input_ids", self.argument)}
        law = None
        if not args and isinstance(hidden, Tensor):
            if ids is None:
                ids = torch.empty(len(hidden), 0, dtype=torch.long, device=hidden.device)
            law = self._law(settings, ids)
        if law is None:
            self.trace.plain += 1
            return self.plain(*args, **kwargs)
        key, choose, as_output, with_states = law
        watch = Stopwatch()
        codes = self._codes(key, choose, ids, hidden)
        watch.lap("frame", codes.device)
        self.trace.frames += 1
        self.trace.seconds += watch.read()[0]
        sequences = torch.cat([ids, codes], 1)
        if not as_output:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        # Of hidden states only the first of each step are known, what was read: those Qwen3-Omni sums.
        read = [self.decoder.begin(ids, hidden)]
        read += [self.decoder.embed(step, codes[:, step], hidden) for step in range(self.decoder.steps - 1)]
        states: Any = tuple((state,) for state in read) if with_states else None
        return GenerateDecoderOnlyOutput(sequences=sequences, hidden_states=states)  # pyright: ignore[reportArgumentType]

    def _codes(self, key: str | None, choose: Any, ids: Tensor, hidden: Tensor) -> Tensor:
        def frame(ids: Tensor, hidden: Tensor) -> Tensor:
            return self.decoder.frame(ids, hidden, choose)

        if key is None or not wants_graph(AUTO, self.model):
            return frame(ids, hidden)
        if key not in self._recorded:
            self._recorded[key] = RecordedFunction(self.model, frame)
        return self._recorded[key](ids, hidden)

    def _law(self, settings: dict[str, Any], ids: Tensor) -> Any:
        """How a code is chosen with settings of `generate`, and these; None: the decoder's own `generate` knows."""
        key = repr((sorted(settings.items()), vars(self.model.generation_config), ids.shape[1], ids.device))
        if key not in self._laws:
            self._laws[key] = self._read(key, settings, ids)
        return self._laws[key]

    def _read(self, key: str, settings: dict[str, Any], ids: Tensor) -> Any:
        from transformers import LogitsProcessorList
        from transformers.generation.configuration_utils import GenerationMode

        model = self.model
        if model.config._attn_implementation not in _ATTENTION or any(
            hasattr(part, "_hf_hook") for part in model.modules()
        ):
            return None
        window = getattr(model.config, "sliding_window", None)
        if window is not None and self.decoder.cache.places > window:
            return None
        config, others = model._prepare_generation_config(
            settings.get("generation_config"),
            **{name: value for name, value in settings.items() if name != "generation_config"},
        )
        states = bool(others.pop("output_hidden_states", False) or config.output_hidden_states)
        sampled = config.get_generation_mode()
        given = ids.shape[1]
        length = config.max_length - given if config.max_new_tokens is None else config.max_new_tokens
        if (
            others
            or sampled not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            or (config.num_return_sequences or 1) != 1
            or config.eos_token_id is not None
            or length != self.decoder.steps
            or any(getattr(config, name) for name in _OUTPUTS)
            or (states and self.argument != "inputs_embeds")
        ):
            return None
        model._prepare_special_tokens(config, False, device=ids.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=given,
            logits_processor=LogitsProcessorList(),
            device=ids.device,
            model_kwargs={},
        )

        def choose(ids: Tensor, logits: Tensor) -> Tensor:
            scores = processors(ids, logits.to(torch.float32, copy=True))
            if sampled is GenerationMode.SAMPLE:
                return torch.multinomial(scores.softmax(-1), 1).squeeze(1)
            return scores.argmax(-1)

        # A sampled frame draws from PyTorch's own generator; recording that has not been tried on a GPU.
        recorded = None if sampled is GenerationMode.SAMPLE else key
        return recorded, choose, config.return_dict_in_generate, states
