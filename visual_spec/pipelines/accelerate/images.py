"""Speed up an image generator of transformers that the user already has, and undo it.

    model = JanusForConditionalGeneration.from_pretrained(...)
    visual_spec.accelerate(model, "speculative-jacobi")
    ids = model.generate_images(**processor(text=prompt, generation_mode="image", return_tensors="pt"))
    pictures = model.decode_images(ids)

`accelerate` hangs functions on the object and touches nothing else: no weight, no class, no module. `generate_images`
takes what the processor makes and the settings that `generate` takes, falls back to the generation config as `generate`
does, and returns the ids that `generate` returns. Where `generate` itself draws pictures (Janus with
`generation_mode="image"`, Emu3 with `image_sizes` or the documented `prefix_allowed_tokens_fn`, GLM-Image always) it is
routed to `generate_images`, so that pipelines which call it, such as `diffusers.GlmImagePipeline`, are accelerated
unchanged. A compiled model, a PEFT model and a pipeline of transformers stand for the model inside.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_spec.families import image_models
from visual_spec.models.core.offload import loads_groups
from visual_spec.models.core.transformers_cache import CACHES, ImagePrompt, Prompt
from visual_spec.models.next_token.cached_decoder import CachedDecoder
from visual_spec.pipelines.accelerate.adapter import (
    Adapter,
    Thing,
    check_needs,
    hang,
    is_accelerated,
    plain,
    tell,
    unwrapped,
)
from visual_spec.pipelines.accelerate.arguments import (
    LiveStream,
    bound_arguments,
    logprobs_asked,
    noise_of,
    read_request,
    returned,
)
from visual_spec.pipelines.accelerate.drawn_noise import DrawnNoise
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.registry import RASTER_TREE_ORDER, check_sampler

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer

    from visual_spec.samplers.core.base import Sampler


def image_model_class(model: object) -> Any:
    """The class that draws with a transformers model (by the name of its class, or of a parent), or None."""
    known, homes = image_models(), ("transformers.", "visual_spec.")
    for parent in type(model).__mro__:
        if parent.__name__ in known and parent.__module__.startswith(homes):
            module, _, name = known[parent.__name__].partition(":")
            return getattr(importlib.import_module(module), name)
    return None


class ImageAdapter(Adapter):
    """Image generators of transformers, alone or among the components of a diffusers pipeline.

    A model gets `generate_images`, `decode_images`, `sampler` and, after a picture, `last_trace`. `generate` of a
    Chameleon writes text; it goes on doing so, and warns.
    """

    takes = tuple(image_models())
    calls = RASTER_TREE_ORDER
    fast_sampler = "speculative-jacobi:window=auto"
    options = ("drafter",)

    def models(self, thing: object) -> list[Any]:
        inner = unwrapped(thing)
        parts = getattr(inner, "components", None)
        candidates = map(unwrapped, parts.values()) if isinstance(parts, dict) else [inner]
        return [part for part in candidates if image_model_class(part) is not None]

    def accelerate(self, thing: Thing, sampler: Sampler, drafter: object = None) -> Thing:
        """Draw with a sampler of next-token models; `drafter`, for samplers that need one: a smaller model of the same
        class.

        Raises:
            TypeError: a sampler or a drafter that does not fit; names those that do.
            ValueError: a sampler that lacks its drafter, or needs the codebook of the picture's decoder.
        """
        models = self.models(thing)
        check_sampler(sampler, self.calls)
        check_needs(sampler, drafter, f"a smaller {type(models[0]).__name__}")
        for model in models:
            _check_drafter(model, drafter)
        for model in models:
            hang(
                model,
                sampler=sampler,
                drafter=drafter,
                last_trace=None,
                generate_images=functools.partial(generate_images, model),
                decode_images=functools.partial(decode_images, model),
                generate=functools.partial(_generate, model),
            )
        return thing


def _check_drafter(model: object, drafter: object) -> None:
    if drafter is not None and image_model_class(drafter) is not image_model_class(model):
        raise TypeError(f"drafter is a {type(drafter).__name__}; pass a smaller {type(model).__name__}.")


@loads_groups
def generate_images(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    negative_prompt_ids: Tensor | None = None,
    negative_prompt_attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
    drafter: object = None,
    streamer: BaseStreamer | None = None,
    stream_tokens: int | None = None,
    sampler: Sampler | None = None,
    output_logprobs: bool = False,
    **inputs: Any,
) -> Any:
    """Draw pictures with an accelerated model.

    Args:
        input_ids, attention_mask: [B, T], left-padded, from the model's processor. No mask: nothing is padding.
        negative_prompt_ids, negative_prompt_attention_mask: the unconditional prompts [B, T'], for Chameleon,
            Lumina-mGPT and Emu3; left out, the official programs' values are used.
        generation_config: in place of `model.generation_config`.
        generator: one `torch.Generator` for the batch, or a list of one a picture. None: PyTorch's default one; a Janus
            uses it as `generate` does, so that for the seed sampled ids equal those that `generate` returns.
        callback: called after every target call, as (index, committed tokens [B]).
        drafter: for samplers that need one: a smaller model of the same class; None: the one passed to `accelerate`.
        streamer: of transformers; gets the prompt and then the tokens, as they are committed
            (`visual_spec.pipelines.accelerate.arguments.LiveStream`).
        stream_tokens: how many tokens after the prompt the streamer gets at most; None: all.
        sampler: in place of `model.sampler`, for this call; then the model need not be accelerated.
        output_logprobs: keep the log-probability of each drawn token: `model.last_trace.logprobs` under the law that it
            was drawn from, `model_logprobs` under the model without guidance, both over the tokens of pictures. With
            return_dict_in_generate the output has them, too, [B, L] in the order of drawing.
        inputs: what else the processor makes (`image_sizes`, `image_grid_thw`, `images_per_sample`, `pixel_values`),
            `layout` for Lumina-mGPT, and settings of `generate`: do_sample, temperature, top_k, top_p,
            guidance_scale, num_return_sequences, return_dict_in_generate. The picture decides about the length. What
            `generate` takes beside these has to be neutral (`arguments.NEUTRAL`).

    Returns:
        The ids that `generate` returns, long: of Janus the image tokens [B, height * width], of the others prompt and
        picture. With return_dict_in_generate they are the `sequences` of a `GenerateDecoderOnlyOutput`.

    Raises:
        TypeError: an input that this model does not take, or takes and did not get.
        ValueError: a setting out of range, or one that no sampler here knows.
        FloatingPointError: logits that define no law; names the slot.
    """
    kind, hung = image_model_class(model), is_accelerated(model)
    if input_ids is None:
        raise TypeError(f"input_ids is missing; pass what {kind.family}'s processor makes.")
    known = set(inspect.signature(kind.plan).parameters) - {"model", "prompt", "guided", "negative"}
    passed = {name: inputs.pop(name) for name in list(inputs) if name in known}
    request = read_request(model, generation_config, inputs, kind.family, known)
    config = request.config
    law = law_of(config, kind.guidance_scale, kind.least_kept)
    prompt = prompt_of(input_ids, attention_mask, config.pad_token_id)
    if negative_prompt_ids is not None:
        if "negative" not in inspect.signature(kind.plan).parameters:
            raise TypeError(f"{kind.family} takes no negative prompt; leave negative_prompt_ids out.")
        passed["negative"] = prompt_of(negative_prompt_ids, negative_prompt_attention_mask)
    stage, condition = kind.plan(model, prompt, guided=law.guided, **passed)
    _check_length(request.asked, before=input_ids.shape[1], new=stage.new_tokens)
    count = config.num_return_sequences or 1
    condition = condition.repeat(count)
    helper, drafter = None, vars(model).get("drafter") if drafter is None else drafter
    _check_drafter(model, drafter)
    if drafter is not None:
        helper = kind.plan(drafter, prompt, guided=law.guided, **passed)
        helper = helper[0], helper[1].repeat(count)
    start = input_ids.shape[1] if stage.returns_prompt else 0
    live = LiveStream(streamer, input_ids.repeat_interleave(count, 0), stream_tokens)
    traces, chosen = [], model.sampler if sampler is None else sampler
    kept = logprobs_asked(chosen, output_logprobs)
    while True:
        more = {} if helper is None else {"drafter": helper[0], "drafter_condition": helper[1]}
        noise = noise_of(stage, chosen, law, generator, condition.prompt.ids)
        with live.watching(functools.partial(_known, stage, condition, start)):
            result = chosen(
                stage,
                condition,
                law=law,
                generator=noise,
                batch_size=len(condition.prompt.ids),
                callback=callback,
                **kept,
                **more,
            )
        traces.append(result.trace)
        if isinstance(noise, DrawnNoise):
            noise.rewind(result.tokens.shape[1])
        following = stage.next_stage(condition, result.tokens)
        if following is None:
            break
        stage, condition = following
        helper = None if helper is None else helper[0].next_stage(helper[1], result.tokens)
    from visual_spec.pipelines.traces import joined_traces

    trace = joined_traces(traces)
    tell(model, hung, last_trace=trace)
    ids = stage.output(condition, result.tokens)
    # `generate` returns the placeholders of pictures, not their tokens
    if passed.get("pixel_values") is not None:
        ids[:, : input_ids.shape[1]] = input_ids.to(ids.device).repeat_interleave(count, 0)
    live.end(ids[:, start:])
    return returned(ids, config, trace)


def _known(stage: CachedDecoder, condition: ImagePrompt, start: int, tokens: Tensor, ready: int) -> Tensor:
    """The ids from place `start` on that `generate_images` will return, as far as `ready` image tokens settle them."""
    before = condition.prompt.ids.shape[1] if stage.returns_prompt else 0
    return stage.output(condition, tokens)[:, start : before + stage.settled_ids(ready)]


def _check_length(settings: Mapping[str, Any], *, before: int, new: int) -> None:
    """Refuse lengths asked for in a call that are not the picture's: `new` tokens after `before` ones of a prompt."""
    least = {"max_new_tokens": new, "max_length": before + new}
    most = {"min_new_tokens": new, "min_length": before + new}
    for name, tokens in (least | most).items():
        asked = settings.get(name)
        if asked is not None and (asked < tokens if name in least else asked > tokens):
            prompt = "" if tokens == new else f" after a prompt of {before}"
            raise ValueError(f"{name}={asked}, but the picture has {new} tokens{prompt}; leave it out.")


@loads_groups
def decode_images(model: Any, ids: Any, **inputs: Any) -> Tensor:
    """Pixels of what `generate_images` returned, through the model's own decoder.

    Args:
        ids: the ids, or the output that holds them.
        inputs: `image_sizes` as passed to `generate_images` (Emu3, Lumina-mGPT); `vq_decoder`, a
            `visual_spec.models.next_token.chameleon_vq.ChameleonVQDecoder` (Chameleon, Anole, Lumina-mGPT) or
            `visual_spec.models.next_token.movq.MoVQDecoder` (Lumina-mGPT 2.0).

    Returns:
        float [B, 3, H, W] in [-1, 1].

    Raises:
        TypeError: GLM-Image, whose tokens are decoded by `diffusers.GlmImagePipeline`; an input of another model.
    """
    kind = image_model_class(model)
    return kind.pixels(model, ids if isinstance(ids, Tensor) else ids.sequences, **inputs)


def law_of(config: GenerationConfig, default_guidance: float, least_kept: int = 1) -> TokenLaw:
    """The law that `generate` samples image tokens from under a generation config.

    Args:
        least_kept: ids that top-k and top-p keep at least.

    Raises:
        ValueError: guidance between 0 and 1; top-p where it keeps more than one id at least.
    """

    def setting(name: str, default: Any) -> Any:
        value = getattr(config, name, None)
        return default if value is None else value

    scale = setting("guidance_scale", default_guidance)
    if scale < 1:
        raise ValueError(f"guidance_scale={scale}; pass 1 (no guidance) or more.")
    if not setting("do_sample", False):
        return TokenLaw(guidance_scale=scale, temperature=0.0)
    top_k, top_p = setting("top_k", 50), setting("top_p", 1.0)  # 50 is transformers' own default
    if top_p < 1 and least_kept > 1:
        raise ValueError(f"top_p={top_p}: this model keeps {least_kept} ids at least; pass top_p=1.")
    return TokenLaw(
        guidance_scale=scale,
        temperature=setting("temperature", 1.0),
        top_k=max(top_k, least_kept) if top_k else 0,
        top_p=top_p,
    )


def _generate(model: object, *args: object, **kwargs: object) -> Any:
    """`generate` of an accelerated model: pictures by `generate_images`, text as before."""
    kind = image_model_class(model)
    plain_generate = functools.partial(plain(model, "generate"), *args, **kwargs)
    if kind.writes_text:
        warnings.warn(
            f"generate of a {kind.family} writes text and is not accelerated; draw pictures with "
            "model.generate_images(**inputs).",
            stacklevel=3,
        )
        return plain_generate()
    asked = bound_arguments(model, args, kwargs)
    # What is already in a cache, or has no ids, is no prompt of a picture.
    if asked.get("input_ids") is None or any(asked.get(name) is not None for name in CACHES):
        return plain_generate()
    if kind.lays_out(asked):
        return _generate_constrained(model, plain_generate, asked)
    if not kind.asks_for_pictures(asked):
        return plain_generate()
    asked.pop("generation_mode", None)
    return generate_images(model, **asked)


def _generate_constrained(model: Any, plain_generate: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
    """`generate` of an accelerated Emu3 with `prefix_allowed_tokens_fn`, the constraint of its documentation: by
    `generate_images` if the function lays out one picture, else as before, with a warning."""
    from visual_spec.models.next_token.emu3_constraint import NoLayoutError

    settings = {name: value for name, value in kwargs.items() if name != "image_sizes"}
    allowed, ids = settings.pop("prefix_allowed_tokens_fn"), settings.pop("input_ids", None)
    streamer = settings.pop("streamer", None)
    config = settings.get("generation_config") or model.generation_config
    try:
        if not isinstance(ids, Tensor) or settings.get("pixel_values") is not None:
            raise NoLayoutError("the prompt is not one of text")
        count = settings.get("num_return_sequences", config.num_return_sequences) or 1
        kind = image_model_class(model)
        constraint = kind.constraint(
            model, allowed, ids.repeat_interleave(count, 0), _most_new_tokens(settings, config, ids.shape[1])
        )
    except NoLayoutError as error:
        warnings.warn(
            f"generate with this prefix_allowed_tokens_fn is not accelerated: {error}. Leave it out and leave "
            "image_sizes in: model.generate(**inputs, image_sizes=...).",
            stacklevel=3,
        )
        return plain_generate()
    size, new = [(constraint.height, constraint.width)], constraint.new_tokens
    output = generate_images(model, ids, image_sizes=size, streamer=streamer, stream_tokens=new, **settings)
    whole = output if isinstance(output, Tensor) else output.sequences
    drawn = whole[:, : ids.shape[1] + new]
    constraint.check(drawn.to(ids.device))
    if isinstance(output, Tensor):
        return drawn
    output.sequences = drawn
    return output


def _most_new_tokens(settings: Mapping[str, Any], config: GenerationConfig, before: int) -> int:
    """Tokens that `generate` makes at most after a prompt of `before` tokens; 20 is its own default."""
    if (new := settings.get("max_new_tokens", config.max_new_tokens)) is not None:
        return new
    length = settings.get("max_length", config.max_length)
    return 20 if length is None else length - before


def prompt_of(ids: Tensor, mask: Tensor | None, pad: int | None = None) -> Prompt:
    """Prompts [B, T]. Without a mask nothing is padding; `pad`: the id of padding that this refuses."""
    if mask is None:
        if pad is not None and bool((ids[..., :1] == pad).any()):
            raise ValueError("input_ids start with padding; pass the processor's attention_mask too.")
        mask = torch.ones_like(ids)
    return Prompt(ids, mask.to(ids.device))
