"""Have a Wan of diffusers draw clips chunk by chunk, as long as one likes, and undo it.

    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", transformer=transformer)
    visual_spec.accelerate(pipe, "deep-forcing")
    frames = pipe.generate_video("a cat on a fence", num_frames=321).frames

The model must have been trained to be causal, such as Self-Forcing's, which
`visual_spec.models.video.self_forcing_checkpoint` loads: a bidirectional Wan runs, but draws nothing of use.

The second argument is a policy of the cache (`visual_spec.models.video.frame_cache`), or its text, such as
`sink-window:sink=3,window=12`. `accelerate` hangs functions on the pipeline and its transformer, and replaces the
processors of self-attention; `restore` puts the very objects back.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.pipelines.accelerate.adapter import (
    Adapter,
    Thing,
    hang,
    is_accelerated,
    is_of,
    take_off,
    tell,
    unwrapped,
)
from visual_spec.pipelines.accelerate.arguments import check_neutral
from visual_spec.pipelines.chunk_video import read_policy
from visual_spec.pipelines.output import check_pixels
from visual_spec.samplers.continuous.chunks import RENOISE, ChunkWiseSampler
from visual_spec.samplers.core.law import TokenLaw

if TYPE_CHECKING:
    from diffusers.image_processor import PipelineImageInput
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
    from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline

    from visual_spec.models.video.frame_cache import CachePolicy, HeadBudgets

# Arguments of the pipeline's own call that chunk by chunk have no meaning, and the values beside None that do nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_kwargs": ({},),
    "callback_on_step_end": (),
    "callback_on_step_end_tensor_inputs": (["latents"],),
    "guidance_scale": (1.0,),
    "guidance_scale_2": (1.0,),
    "latents": (),
    "negative_prompt": (),
    "negative_prompt_embeds": (),
    "num_inference_steps": (),
}


class VideoAdapter(Adapter):
    """A Wan of diffusers, made causal with a cache of frames. Calling `accelerate` again swaps the cache's policy.

    The transformer gets `generate_latents` and `last_trace`, the pipeline `generate_video`. Outside of these the
    transformer does what it did: the pipeline's own call draws without a cache, and warns.
    """

    takes = ("WanTransformer3DModel", "WanPipeline")
    fast_sampler = "full"  # what the weights were trained in

    def models(self, thing: object) -> list[WanTransformer3DModel]:
        model = unwrapped(thing)
        if is_of(model, ["WanPipeline"], "diffusers"):
            model = unwrapped(model.transformer)
        return [model] if is_of(model, ["WanTransformer3DModel"], "diffusers") else []

    def read_text(self, text: str) -> CachePolicy | HeadBudgets:
        return read_policy(text)

    def accelerate(self, thing: Any, sampler: CachePolicy | HeadBudgets) -> Any:
        """`sampler` is a policy: one of `POLICIES`, or `HeadBudgets`.

        Raises:
            TypeError: it is none.
            ValueError: a Wan that takes pictures, or one of two transformers.
        """
        (transformer,) = self.models(thing)
        read_policy(sampler)
        if getattr(thing, "transformer_2", None) is not None:
            raise ValueError("this pipeline has two transformers (Wan 2.2); pass one of Wan 2.1.")
        CausalWan.check_model(transformer, sampler)
        self.restore(thing)
        latents = functools.partial(generate_latents, transformer)
        hang(transformer, causal=CausalWan(transformer, sampler), generate_latents=latents, last_trace=None)
        if is_of(thing, ["WanPipeline"], "diffusers"):
            video, check = functools.partial(generate_video, thing), functools.partial(_warned_check, thing)
            hang(thing, generate_video=video, check_inputs=check)
        return thing

    def restore(self, thing: Thing) -> Thing:
        for transformer in filter(is_accelerated, self.models(thing)):
            transformer.causal.release()
            take_off(transformer)
        take_off(thing)
        return thing

    def line(self, model: WanTransformer3DModel) -> str:
        return f"{model.causal.policy}: {super().line(model)}"

    def expects(self, model: WanTransformer3DModel) -> str:
        return f"generate_video draws clips of any length, cache policy {model.causal.policy}"


def generate_latents(
    transformer: WanTransformer3DModel,
    prompt_embeds: Tensor,
    *,
    num_frames: int = 21,
    height: int = 60,
    width: int = 104,
    drafter: object = None,
    chunk: int = 3,
    steps: int | Sequence[float] = 4,
    shift: float = 5.0,
    first_steps: int | Sequence[float] | None = None,
    solver: str = RENOISE,
    **options: Any,
) -> Tensor:
    """Draw latents with an accelerated transformer.

    Args:
        prompt_embeds: [B, T, E], on the device where the clip is drawn.
        num_frames, height, width: in latent frames and pixels.
        drafter: an accelerated Wan of the same latents, smaller; with `reward` and `threshold`.
        chunk, steps, shift, first_steps, solver: settings of `visual_spec.samplers.continuous.chunks.ChunkWiseSampler`.
        options: generator, context, start, cuts, reward, threshold, callback, as in a call of it.

    Returns:
        float [B, C, num_frames, height, width].

    Raises:
        TypeError: a drafter that is not accelerated.
        ValueError: as `ChunkWiseSampler` and its call.
    """
    helper = None
    if drafter is not None:
        inner = next(filter(is_accelerated, VideoAdapter().models(drafter)), None)
        if inner is None:
            raise TypeError(
                f"drafter is a {type(drafter).__name__} that is not accelerated; pass a smaller Wan, made causal by "
                "visual_spec.accelerate(drafter, policy)."
            )
        helper = inner.causal
    result = ChunkWiseSampler(chunk, steps, shift, first_steps or None, solver)(
        transformer.causal,
        prompt_embeds,
        law=TokenLaw(),
        batch_size=len(prompt_embeds),
        num_frames=num_frames,
        height=height,
        width=width,
        draft_model=helper,
        **options,
    )
    tell(transformer, True, last_trace=result.trace)
    return result.tokens


@torch.no_grad()
def generate_video(
    pipe: Any,
    prompt: str | list[str] | None = None,
    *,
    num_frames: int = 81,
    height: int = 480,
    width: int = 832,
    num_videos_per_prompt: int = 1,
    prompt_embeds: Tensor | None = None,
    max_sequence_length: int = 512,
    image: PipelineImageInput | None = None,
    cuts: Mapping[int, str | list[str]] | None = None,
    output_type: str = "np",
    return_dict: bool = True,
    **options: Any,
) -> WanPipelineOutput | tuple[object]:
    """Draw clips with an accelerated `WanPipeline`. There is no guidance: causal students are distilled with it.

    The names are the arguments of the pipeline's own call. What has no meaning here passes at its default (`NEUTRAL`).

    Args:
        prompt: texts; or their embeddings, `prompt_embeds` [B, T, E].
        num_frames, height, width: of the clip, in frames and pixels. Of frames, one more than a multiple of what a
            latent frame stands for, so that latent frames come in whole chunks: 9, 21, 33 ... 81 of Wan 2.1.
        num_videos_per_prompt, max_sequence_length: as the pipeline's own call.
        image: the first frame, a picture that the pipeline's `video_processor` reads, for a model trained to begin with
            one (LongLive 2.0).
        cuts: the prompts of further shots, by the chunk that begins each, from 1 on: {4: "The scene transitions. ..."}.
        output_type: "np", "pt", "pil", or "latent".
        return_dict: False for a tuple.
        options: as `generate_latents`.

    Returns:
        A `WanPipelineOutput` with `frames`, or these alone in a tuple.

    Raises:
        ValueError: a size that the pipeline cannot draw, or what has no meaning here; and as `generate_latents`.
    """
    for name, neutral in NEUTRAL.items():
        check_neutral(
            name,
            options.pop(name, None),
            neutral,
            "Supported are steps, first_steps, shift, solver, chunk and context.",
        )
    frames, high, wide = latent_size(pipe, num_frames, height, width, options.get("chunk", 3))
    type(pipe).check_inputs(pipe, prompt, None, 16, 16, prompt_embeds)
    pipe.transformer.causal.check_size(high, wide, options.get("chunk", 3))
    if prompt_embeds is not None:
        prompt_embeds = prompt_embeds.repeat_interleave(num_videos_per_prompt, 0)
    encode = functools.partial(
        pipe.encode_prompt,
        do_classifier_free_guidance=False,
        num_videos_per_prompt=num_videos_per_prompt,
        max_sequence_length=max_sequence_length,
        device=pipe._execution_device,
    )
    prompt_embeds, _ = encode(prompt, prompt_embeds=prompt_embeds)
    if cuts is not None:
        options["cuts"] = {index: encode(text)[0] for index, text in cuts.items()}
    if image is not None:
        options["start"] = _latents(pipe, image, height, width)
    latents = pipe.transformer.generate_latents(
        prompt_embeds, num_frames=frames, height=high, width=wide, **options
    )
    clips = latents if output_type == "latent" else _pixels(pipe, latents, output_type)
    pipe.maybe_free_model_hooks()
    from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput

    return WanPipelineOutput(frames=clips) if return_dict else (clips,)


def latent_size(
    pipe: WanPipeline, num_frames: int, height: int, width: int, chunk: int
) -> tuple[int, int, int]:
    """Return latent frames, height and width of a clip of so many frames and pixels.

    Raises:
        ValueError: the frames give no whole chunks, or the size is none of the decoder's.
    """
    in_time, in_space = pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
    frames, rest = divmod(num_frames - 1, in_time)
    if num_frames < 1 or rest or (frames + 1) % chunk:
        first, step = in_time * (chunk - 1) + 1, in_time * chunk
        raise ValueError(
            f"num_frames={num_frames} gives no whole chunks of {chunk} latent frames; pass {first}, {first + step}, "
            f"{first + 2 * step} ..., {step} more each."
        )
    for name, size in {"height": height, "width": width}.items():
        if size < 1 or size % in_space:
            raise ValueError(f"{name}={size} pixels; pass a multiple of {in_space}.")
    return frames + 1, height // in_space, width // in_space


def _warned_check(pipe: WanPipeline, *args: Any, **kwargs: Any) -> None:
    """`check_inputs` of an accelerated pipeline, with which its own call begins."""
    warnings.warn(
        f"the own call of this {type(pipe).__name__} is not accelerated; draw with pipe.generate_video(prompt, ...).",
        stacklevel=3,
    )
    return type(pipe).check_inputs(pipe, *args, **kwargs)


def _mean_and_std(pipe: WanPipeline, like: Tensor) -> Iterator[Tensor]:
    """Mean and deviation [1, C, 1, 1, 1] of the latents of the pipeline's encoder."""
    for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std):
        yield torch.tensor(values, device=like.device, dtype=like.dtype).view(1, -1, 1, 1, 1)


def _latents(pipe: WanPipeline, image: PipelineImageInput, height: int, width: int) -> Tensor:
    """The latent frame [B, C, 1, h, w] of pictures, as the transformer takes it: the mode of the encoder's law."""
    pixels = pipe.video_processor.preprocess(image, height=height, width=width)[:, :, None]
    latents = pipe.vae.encode(pixels.to(pipe._execution_device, pipe.vae.dtype)).latent_dist.mode()
    mean, std = _mean_and_std(pipe, latents)
    return ((latents - mean) * (1.0 / std)).float()


def _pixels(pipe: WanPipeline, latents: Tensor, output_type: str) -> Any:
    """Clips of the pipeline's own decoder, which takes latents of another mean and scale."""
    latents = latents.to(pipe.vae.dtype)
    mean, std = _mean_and_std(pipe, latents)
    latents = latents / (1.0 / std) + mean  # a quotient, as in the pipeline: the same pixels to the last bit
    video = pipe.vae.decode(latents, return_dict=False)[0]
    check_pixels(video)
    return pipe.video_processor.postprocess_video(video, output_type=output_type)
