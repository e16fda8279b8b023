"""Speed up a MusicGen or MusicGen Melody of transformers that the user already has, and undo it.

    model = MusicgenForConditionalGeneration.from_pretrained(...)
    visual_spec.accelerate(model)  # or another sampler: accelerate(model, "column-jacobi:window=4")
    waves = model.generate_audio(**processor(text=prompts, padding=True, return_tensors="pt"), max_new_tokens=503)

As `visual_spec.pipelines.accelerate.images` for images: `accelerate` hangs functions on the object and touches
nothing else. `generate` always plays here, so it is routed to `generate_audio`, and calls of it are accelerated
unchanged.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

from visual_spec.models.columns.encodec import decode_codes, encode_waves
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import WHOLE_MODELS, MusicCondition, text_condition
from visual_spec.models.core.offload import loads_groups
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.accelerate.adapter import (
    Adapter,
    Thing,
    check_needs,
    hang,
    is_accelerated,
    is_of,
    tell,
    unwrapped,
)
from visual_spec.pipelines.accelerate.arguments import (
    LiveStream,
    by_name,
    logprobs_asked,
    read_request,
    returned,
)
from visual_spec.pipelines.accelerate.images import law_of
from visual_spec.samplers.registry import COLUMNS, check_sampler

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils.generic import ModelOutput

    from visual_spec.samplers.core.base import Sampler

_INPUTS = ("encoder_outputs", "input_values", "padding_mask", "input_features", "decoder_input_ids")


class MusicAdapter(Adapter):
    """MusicGen and MusicGen Melody of transformers.

    A model gets `generate_audio`, `sampler` and, after a clip, `last_trace` and `last_codes` (long [B, K, T]).
    """

    takes = WHOLE_MODELS
    calls = (COLUMNS,)
    # Plain decoding in a static cache: no sampler of the same codes has been faster (docs/results/music.md).
    fast_sampler = "columns"
    options = ("drafter",)
    kin = ("Musicgen*",)

    def models(self, thing: object) -> list[Any]:
        model = unwrapped(thing)
        return [model] if is_of(model, WHOLE_MODELS) else []

    def accelerate(self, thing: Thing, sampler: Sampler, drafter: object = None) -> Thing:
        """Play with a sampler of columns; `drafter` as for `generate_audio`.

        Raises:
            TypeError: a bare language model, or a sampler that decodes no columns.
            ValueError: a sampler that lacks its drafter.
        """
        for model in self.models(thing):
            check_sampler(sampler, self.calls)
            check_needs(sampler, drafter, "a ColumnEagleDrafter trained for this model or a smaller MusicGen")
            MusicgenColumnModel(model, 1)  # refuses attention that takes no mask
            hang(
                model,
                sampler=sampler,
                drafter=drafter,
                last_trace=None,
                last_codes=None,
                generate_audio=functools.partial(generate_audio, model),
                generate=functools.partial(by_name, generate_audio, model),
            )
            return thing
        kind = type(unwrapped(thing)).__name__
        raise TypeError(f"cannot accelerate a {kind}; pass a {' or a '.join(WHOLE_MODELS)}.")


@loads_groups
def generate_audio(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    encoder_outputs: ModelOutput | Sequence[Tensor] | None = None,
    input_values: Tensor | None = None,
    padding_mask: Tensor | None = None,
    input_features: Tensor | None = None,
    decoder_input_ids: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
    drafter: object = None,
    streamer: BaseStreamer | None = None,
    sampler: Sampler | None = None,
    output_logprobs: bool = False,
    **settings: Any,
) -> Any:
    """Play with an accelerated model.

    Args:
        input_ids, attention_mask: [B, T], from the model's processor. No mask: nothing is padding.
        encoder_outputs: in place of `input_ids`, as `get_unconditional_inputs` gives them.
        input_values, padding_mask: a clip to go on from, [B, C, N] at the codec's rate, from the processor. Not of a
            Melody, whose `generate` takes its codes only.
        input_features: of a Melody, the chroma of a tune to follow, [B, L, chroma], from the processor.
        decoder_input_ids: or its codes, [B * K, P], without the special id in front.
        generation_config: in place of `model.generation_config`.
        generator: one `torch.Generator` for the batch, or a list of one a clip; None is PyTorch's default one.
        callback: called after every target call, as (index, committed columns [B]).
        drafter: for `DraftedColumnSampler`: a `ColumnEagleDrafter` trained for this model, or a smaller MusicGen that
            reads the same text features. None: the one passed to `accelerate`.
        streamer: of transformers; gets the codes as they are committed, in the order of `generate`: long [B * K, 1] or
            more steps that are known, then [B * K] a step, with the special id where a codebook waits.
        sampler: in place of `model.sampler`, for this call; then the model need not be accelerated.
        output_logprobs: keep the log-probability of each drawn token: `model.last_trace.logprobs` under the law that it
            was drawn from, `model_logprobs` under the model without guidance, both over the codes. With
            return_dict_in_generate the output has them, too, by column [B, S, K], 0 where a codebook waits.
        settings: of `generate`: do_sample, temperature, top_k, top_p, guidance_scale, max_new_tokens or max_length (in
            steps: a clip of T frames takes T + lag of them, and one for the empty step in front), num_return_sequences,
            return_dict_in_generate. Without a length, as many steps as `generate` takes. What it takes beside these has
            to be neutral (`arguments.NEUTRAL`).

    Returns:
        The waves that `generate` returns, [B, C, N]. With return_dict_in_generate they are the `sequences` of a
        `GenerateEncoderDecoderOutput`.

    Raises:
        TypeError: no prompt, or an input that this model does not take.
        ValueError: a setting out of range, or one that no sampler here knows; too few or too many steps.
        FloatingPointError: logits that define no law; names the slot.
    """
    if (input_ids is None) == (encoder_outputs is None):
        passed = "neither" if input_ids is None else "both"
        raise TypeError(f"{passed} of input_ids and encoder_outputs given; pass what the processor makes.")
    prefixed = any(kind.__name__ == WHOLE_MODELS[1] for kind in type(model).__mro__)
    hung = is_accelerated(model)
    if prefixed and (input_values is not None or encoder_outputs is not None):
        raise TypeError("MusicGen Melody takes no input_values and no encoder_outputs; see its generate.")
    if not prefixed and input_features is not None:
        raise TypeError("MusicGen takes no input_features; MusicGen Melody follows a tune.")
    request = read_request(model, generation_config, settings, "MusicGen", _INPUTS)
    config, law = request.config, law_of(request.config, 1.0)
    if encoder_outputs is None:
        text = text_condition(model, input_ids, attention_mask)  # type: ignore[arg-type]
    else:
        features = encoder_outputs[0]
        mask = torch.ones(features.shape[:2]) if attention_mask is None else attention_mask
        text = TextCondition(features, mask.bool())
    codes = _known_codes(model, len(text.features), input_values, padding_mask, decoder_input_ids)
    length = _num_steps(model, config, codes.shape[-1], request.asked)
    # Without the empty step at the start, and the lag of the last codebook at the end.
    frames = length - _num_books(model)
    count = config.num_return_sequences or 1
    start = _delayed(model, codes.repeat_interleave(count, 0), length)[0]
    condition = MusicCondition(
        *(part.repeat_interleave(count, 0) for part in (text.features, text.mask, codes)),
        melody=None if input_features is None else input_features.repeat_interleave(count, 0),
    )
    columns = MusicgenColumnModel(model, frames, prompt_frames=codes.shape[-1])
    drafts, drafter = {}, vars(model).get("drafter") if drafter is None else drafter
    if drafter is not None:
        # A model of transformers is made to answer calls; one of ours answers them.
        wrapped = not isinstance(drafter, SavedModel)
        drafts["drafter"] = (
            MusicgenColumnModel(drafter, frames, prompt_frames=codes.shape[-1]) if wrapped else drafter
        )
    live = LiveStream(streamer, start)

    def steps_of(tokens: Tensor, ready: int) -> Tensor:
        steps = _delayed(model, columns.codes(tokens, condition), length)[1]
        return steps[:, start.shape[1] : 1 + columns.first_step + ready]

    chosen = model.sampler if sampler is None else sampler
    kept = logprobs_asked(chosen, output_logprobs)
    with live.watching(steps_of):
        result = chosen(
            columns,
            condition,
            law=law,
            generator=generator,
            batch_size=len(condition.features),
            callback=callback,
            **kept,
            **drafts,
        )
    drawn = columns.codes(result.tokens, condition)
    tell(model, hung, last_trace=result.trace, last_codes=drawn)
    waves = decode_codes(model.audio_encoder, drawn, columns.num_channels)
    live.end(steps_of(result.tokens, columns.grid.width))
    return returned(waves, config, result.trace, "GenerateEncoderDecoderOutput")


def _known_codes(
    model: Any, batch: int, waves: Tensor | None, mask: Tensor | None, codes: Tensor | None
) -> Tensor:
    """Codes [B, K, P] to go on from; P = 0 without any."""
    books = model.decoder.config.num_codebooks
    if codes is not None:
        if waves is not None:
            raise TypeError("both of input_values and decoder_input_ids given; pass one of them.")
        if codes.ndim != 2 or len(codes) != batch * books:
            raise ValueError(
                f"decoder_input_ids {tuple(codes.shape)} given; pass [{batch * books}, P]: {books} codebooks of each "
                "clip."
            )
        by_clip = rearrange(codes, "(b k) p -> b k p", k=books)
        special = model.decoder.config.vocab_size
        return by_clip[..., 1:] if bool((by_clip[..., 0] == special).all()) else by_clip
    if waves is None:
        return torch.zeros(batch, books, 0, dtype=torch.long, device=model.device)
    if mask is not None:
        waves = waves * mask.view(len(mask), -1, mask.shape[-1])
    return encode_waves(model.audio_encoder, waves).to(model.device)


def _num_books(model: Any) -> int:
    """Codebooks of a channel."""
    return model.decoder.config.num_codebooks // model.decoder.config.audio_channels


def _num_steps(model: Any, config: GenerationConfig, known: int, asked: dict[str, Any]) -> int:
    """The steps that `generate` would make, with the empty one at the start and the steps of `known` frames."""
    config = copy.deepcopy(config)
    by_default = asked.get("max_length") is None
    if config.max_length is None:
        config.max_length = 20  # of transformers, where nothing is said
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=by_default,
        has_default_min_length=True,
        model_input_name="input_ids",
        inputs_tensor=None,
        input_ids_length=1 + known,
    )
    length, books = config.max_length, _num_books(model)
    for name, steps in (("min_new_tokens", length - 1 - known), ("min_length", length)):
        if asked.get(name) is not None and asked[name] > steps:
            raise ValueError(f"{name}={asked[name]}, but a clip of {steps} steps is asked for; leave it out.")
    if length - books <= known or length < 2 * books - 1:
        least = max(known + 1 + books, 2 * books - 1)
        raise ValueError(
            f"max_length={length} steps, of which {1 + known} are known; pass at least {least} (max_new_tokens="
            f"{least - 1 - known}), so that every codebook has a frame."
        )
    return length


def _delayed(model: Any, codes: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Codes [B, K, P] as `generate` sees them: the steps that are wholly known, and all, long [B * K, steps]."""
    special = model.decoder.config.vocab_size
    flat = torch.nn.functional.pad(rearrange(codes, "b k p -> (b k) p"), (1, 0), value=special)
    return model.decoder.build_delay_pattern_mask(flat, special, max_length=length)
