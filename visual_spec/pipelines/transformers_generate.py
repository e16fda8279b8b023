"""`generate` of transformers decoding with our samplers, by its own hook `custom_generate`. The model is not changed.

    ids = model.generate(**inputs, custom_generate=visual_spec.custom_generate, window=32)     # a callable
    ids = model.generate(**inputs, custom_generate=folder, trust_remote_code=True, window=32)  # a folder

A language model is told its codes, too: `codes=(first, last + 1), end=end`.

The folder is written by `save_custom_generate`. Lying in a model's own folder, it replaces `generate` of the model that
`from_pretrained(folder, trust_remote_code=True)` loads. That is the way for MusicGen, whose `generate` has no hook.

It takes the models and settings of `visual_spec.accelerate`, and gives equal tokens. After a call,
`model.last_trace` says what it cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import visual_spec
from visual_spec.pipelines.accelerate.adapter import Adapter, unwrapped
from visual_spec.pipelines.accelerate.codes import CodeAdapter, generate_codes
from visual_spec.pipelines.accelerate.images import ImageAdapter, generate_images
from visual_spec.pipelines.accelerate.music import MusicAdapter, generate_audio
from visual_spec.pipelines.base import check_sampler
from visual_spec.pipelines.sampler_text import make_sampler, read_sampler

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# What transformers prepares for its own loops and ours do not read: they have a cache, positions and a length of their
# own.
_PREPARED = (
    "assistant_model assistant_tokenizer cache cache_position custom_generate inputs_embeds logits_to_keep "
    "mm_encoder_outputs past_key_values position_ids stopping_criteria synced_gpus tokenizer trust_remote_code "
    "use_cache use_model_defaults"
).split()
# Logits processors that the generation config asks for; `law_of` reads them there.
_KNOWN = (
    "ClassifierFreeGuidanceLogitsProcessor TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper "
    "UnbatchedClassifierFreeGuidanceLogitsProcessor"
).split()
# And of a language model of codes.
_RULES = (
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor NoRepeatNGramLogitsProcessor "
    "RepetitionPenaltyLogitsProcessor"
).split()


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    *,
    window: int | str | None = None,
    sampler: object = None,
    image_guidance_scale: float | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
    drafter: object = None,
    layout: str | None = None,
    image_sizes: object = None,
    codes: object = None,
    end: int | None = None,
    output_logprobs: bool | None = None,
    **given: Any,
) -> Any:
    """Decode for `model.generate(**inputs, custom_generate=visual_spec.custom_generate)`.

    Args:
        model: a Janus, Emu3, Chameleon or GLM-Image of transformers; or a causal language model, with `codes`.
        input_ids: long [B, T]; one row for each sequence to return, as `generate` hands them on.
        window: W of the sampler: slots that one call scores. None: the sampler's own.
        sampler: a sampler, or its text, in place of the fast one of `accelerate`.
        image_guidance_scale: in place of `guidance_scale`; for Janus, whose `generate` drops that on the way here.
        generator, callback, drafter, layout, image_sizes: as in `generate_images`.
        codes, end: of a language model, as in `visual_spec.accelerate`.
        output_logprobs: as in `generate_images`.
        given: what `generate` hands on: the mask, the generation config, and what else the processor made.

    Returns:
        What `generate_images` of an accelerated model returns, or `generate` of an accelerated language model.

    Raises:
        TypeError: a model that is not supported, or a logits processor, streamer or input that no sampler here knows.
        ValueError: both a window and a sampler; or as `generate_images`.
    """
    processors = list(given.pop("logits_processor", ()))
    given |= _negative_prompt(processors, 0 if input_ids is None else len(input_ids))
    if CodeAdapter().models(model):
        given["logits_processor"] = [
            part for part in processors if type(part).__name__ not in _KNOWN + _RULES
        ]
    else:
        _check_processors(processors)
    given = {name: value for name, value in given.items() if name not in _PREPARED}
    config = given.get("generation_config")
    if config is not None and (config.num_return_sequences or 1) > 1:  # `generate` has repeated the rows
        given["num_return_sequences"] = 1
    own = dict(
        generator=generator, callback=callback, drafter=drafter, layout=layout, image_sizes=image_sizes
    )
    own |= dict(codes=codes, end=end, output_logprobs=output_logprobs)
    own |= dict(window=window, sampler=sampler, image_guidance_scale=image_guidance_scale)
    return generate(input_ids, model=model, **own, **given)


def generate(
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    model: PreTrainedModel,
    window: int | str | None = None,
    sampler: object = None,
    image_guidance_scale: float | None = None,
    **given: Any,
) -> Any:
    """Decode in place of `model.generate`: what `custom_generate/generate.py` of a folder holds.

    Args:
        inputs, generation_config: as of `generate`; the `input_ids`.
        model: as in `custom_generate`, or a MusicGen or MusicGen Melody.
        given: the other arguments of `generate`. None counts as left out.

    Returns:
        As `custom_generate`; or what `generate_audio` of an accelerated MusicGen returns.

    Raises:
        TypeError, ValueError: as `custom_generate`, and as `generate_audio` of an accelerated MusicGen.
    """
    model = unwrapped(model)
    given = {name: value for name, value in given.items() if value is not None}
    if inputs is not None:
        given["input_ids"] = inputs
    if image_guidance_scale is not None:
        given["guidance_scale"] = image_guidance_scale
    adapter, decode, windowed = _decoder(model)
    chosen = _sampler(window, sampler, adapter.fast_sampler or windowed, windowed)
    check_sampler(chosen, adapter.calls)
    return decode(model, generation_config=generation_config, sampler=chosen, **given)


def _decoder(model: object) -> tuple[Adapter, Callable[..., Any], str]:
    """The adapter that decodes with a model, its function, and its sampler that has a window."""
    decoders = (
        (MusicAdapter(), generate_audio, "column-jacobi"),
        (ImageAdapter(), generate_images, "speculative-jacobi"),
        (CodeAdapter(), generate_codes, "speculative-jacobi"),
    )
    for adapter, decode, windowed in decoders:
        if adapter.models(model):
            return adapter, decode, windowed
    takes = ", ".join(name for adapter, *_ in decoders for name in adapter.takes)
    raise TypeError(f"cannot decode a {type(model).__name__}; pass one of {takes}.")


def save_custom_generate(folder: str | os.PathLike) -> Path:
    """Write `custom_generate/generate.py` and `requirements.txt` into a folder, such as a saved model's.

    Returns:
        The folder, to be passed as `custom_generate=` or to `from_pretrained`, with `trust_remote_code=True`.
    """
    path = Path(folder) / "custom_generate"
    path.mkdir(parents=True, exist_ok=True)
    lines = [
        '"""Decodes with visual_spec; see visual_spec.pipelines.transformers_generate."""',
        "",
        f"from {generate.__module__} import generate  # noqa: F401",
        "",
    ]
    (path / "generate.py").write_text("\n".join(lines))
    # transformers reads digits and dots alone: of a version in development it would refuse the requirement.
    released = all(part.isdecimal() for part in visual_spec.__version__.split("."))
    least = f">={visual_spec.__version__}" if released else ""
    (path / "requirements.txt").write_text(f"visual-spec{least}\n")
    return Path(folder)


def _sampler(window: int | str | None, sampler: object, usual: str, windowed: str) -> object:
    if window is not None and sampler is not None:
        raise ValueError(f"window={window!r} and sampler={sampler!r} given; pass one of them.")
    if window is not None:
        return make_sampler(windowed, window=window)
    chosen = usual if sampler is None else sampler
    return read_sampler(chosen) if isinstance(chosen, str) else chosen


def _negative_prompt(processors: Sequence[object], rows: int) -> dict[str, Any]:
    """The prompts that guidance leads away from: `generate` hands them to its own processor only."""
    for part in processors:
        context = getattr(part, "unconditional_context", None)
        if context is not None and context["input_ids"] is not None:
            names = {"input_ids": "negative_prompt_ids", "attention_mask": "negative_prompt_attention_mask"}
            times = max(1, rows // len(context["input_ids"]))
            return {
                name: context[key].repeat_interleave(times, 0)
                for key, name in names.items()
                if context[key] is not None
            }
    return {}


def _check_processors(processors: Sequence[object]) -> None:
    """Refuse logits processors that are not of the generation config."""
    strange = [type(part).__name__ for part in processors if type(part).__name__ not in _KNOWN]
    if strange:
        raise TypeError(
            f"logits processors {', '.join(strange)} given; the law of a token is guidance_scale, temperature, top_k "
            "and top_p of the generation config. Leave them out."
        )
