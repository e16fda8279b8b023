"""Text to video by a causal diffusion model: caption -> features -> chunks of small frames -> clip of any length."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.utils.outputs import BaseOutput
from torch import Tensor

from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.settings import whole
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import CachePolicy, HeadBudgets
from visual_spec.pipelines.accelerate.video import check_policy, read_text
from visual_spec.pipelines.constructor import registers
from visual_spec.pipelines.facts import PipelineFacts
from visual_spec.pipelines.inputs import check_generator, check_own_words
from visual_spec.pipelines.shown import ShownPictures
from visual_spec.pipelines.texts import ReadsText, Texts
from visual_spec.pipelines.video_files import pixels_of, write_video
from visual_spec.samplers.continuous.chunk_rollout import ChunkSchedule, RolloutTrace, roll_out


@dataclass
class ChunkVideoPipelineOutput(BaseOutput):
    """Clips, their latents, and the record of the rollout.

    Args:
        frames: as `output_type` asked: lists of PIL pictures, one a clip; numpy [B, T, H, W, 3] in [0, 1]; tensor
            [B, T, 3, H, W] in [0, 1]; or (`latent`) the latents.
        latents: float [B, C, T, h, w].
        trace: calls, bytes of the cache after each chunk, seconds.
        frame_rate: frames per second of the clips.
    """

    frames: Any
    latents: Tensor
    trace: RolloutTrace
    frame_rate: float

    def save(self, path: str | os.PathLike, index: int = 0, *, overwrite: bool = False) -> Path:
        """Write one of the clips: mp4 (by PyAV), gif, or a png sheet of all frames, by the end of the name.

        Raises:
            ValueError: the clips are latents (`output_type="latent"`), or a name with another end.
            FileExistsError: there is something at `path`, and `overwrite` is not set.
            ImportError: mp4, and PyAV is missing (extra `video`).
        """
        if self.frames is self.latents:
            raise ValueError(
                "the clips are latents; draw them with output_type 'pil', 'np' or 'pt' to save them."
            )
        return write_video(path, pixels_of(self.frames[index]), self.frame_rate, overwrite=overwrite)


class ChunkVideoPipeline(ReadsText):
    """Draws clips as long as one likes, chunk after chunk, with a cache of frames that a policy bounds.

    Latents are small frames of three colours in -1 to 1. So there is no decoder: they are enlarged by cubic
    interpolation.

    Args:
        transformer: a Wan of diffusers that was trained to be causal by chunks, with three channels.
        text_encoder: turns prompts into the features that the transformer reads.
        chunk: frames that are drawn together.
        training_frames: frames of the clips that the transformer was trained on: what its caches are measured by.
        frame_size: rows and columns of a small frame.
        scale: pixels of a frame on a side of one of a small frame.
        default_policy: the cache where a call names none, as text.
        default_steps: even steps of a chunk, where a call names none: 4 are 1000, 750, 500 and 250.
        default_shift: of their noise levels (`ChunkSchedule`), where a call names none.
        frame_rate: frames per second of the clips.

    Raises:
        TypeError: a component that could not be saved.
        ValueError: a transformer of other channels, or a policy that does not fit it.

    Example:
        >>> pipe = ChunkVideoPipeline.from_pretrained("motion_causal")
        >>> prompt = "a small red star moves right quickly and bounces on a plain sky background, camera still"
        >>> pipe(prompt, num_frames=160, policy="sliding:window=8").save("clip.mp4")
    """

    model_cpu_offload_seq = "text_encoder->transformer"

    _each = "num_videos_per_prompt"
    _unseen = "the clip will not show it"
    sampler = None  # of tokens; here a policy stands in its place

    @registers
    def __init__(
        self,
        transformer: WanTransformer3DModel,
        text_encoder: CaptionEncoder,
        chunk: int = 2,
        training_frames: int = 8,
        frame_size: int = 16,
        scale: int = 4,
        default_policy: str = "full",
        default_steps: int = 4,
        default_shift: float = 3.0,
        frame_rate: float = 8.0,
    ):
        self.image_processor = ShownPictures()
        if self.transformer is None:
            return  # it encodes prompts
        channels = self.transformer.config["in_channels"]
        if channels != 3:
            raise ValueError(
                f"the transformer draws latents of {channels} channels; pass one of 3, the colours of frames."
            )
        CausalWan.check_model(self.transformer, read_text(default_policy))

    @classmethod
    def facts_of(cls, settings: Mapping[str, Any], sampler: Mapping[str, Any]) -> PipelineFacts:
        """See `VisualPipeline.facts_of`. No sampler of tokens fits it: the second argument says nothing."""
        policy = settings.get("default_policy", "full")
        facts = super().facts_of(settings, sampler)
        return replace(facts, plain_sampler=policy, fast_sampler=policy, default_settings={})

    @property
    def frame_rate(self) -> float:
        """Frames per second of the clips."""
        return self.config["frame_rate"]

    @property
    def training_frames(self) -> int:
        """Frames of the clips that the transformer was trained on."""
        return self.config["training_frames"]

    def make_schedule(
        self, steps: int | tuple[float, ...] | None = None, shift: float | None = None
    ) -> ChunkSchedule:
        """The steps of a chunk, from the arguments of `__call__`.

        Raises:
            ValueError: a value out of its range.
        """
        asked: Any = self.config["default_steps"] if steps is None else steps
        if isinstance(asked, int):
            whole("steps", asked)
            asked = tuple(1000 * left / asked for left in range(asked, 0, -1))
        level_shift = self.config["default_shift"] if shift is None else shift
        return ChunkSchedule(self.config["chunk"], tuple(asked), level_shift)

    def check_inputs(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        prompt: str | list[str] | None,
        *,
        prompt_embeds: Tensor | None = None,
        num_frames: int,
        policy: CachePolicy | HeadBudgets,
        schedule: ChunkSchedule,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
    ) -> None:
        """Refuse what cannot be drawn, before any computation. Arguments as in `__call__`.

        Raises:
            ValueError, TypeError: names what was given, what is allowed, and what to do.
        """
        self.check_complete("transformer", *(["text_encoder"] if prompt_embeds is None else []))
        whole("num_videos_per_prompt", num_videos_per_prompt)
        whole("num_frames", num_frames)
        if num_frames % schedule.chunk:
            near = -(-num_frames // schedule.chunk) * schedule.chunk
            raise ValueError(
                f"num_frames={num_frames} is no multiple of the chunk of {schedule.chunk} frames; pass {near}."
            )
        if output_type not in self._output_types:
            raise ValueError(f"output_type={output_type!r}; pass one of {', '.join(self._output_types)}.")
        told = Texts(prompt, prompt_embeds)
        if prompt_embeds is None:
            check_own_words(self.text_encoder, told.prompts)
        check_generator(generator, told.count * num_videos_per_prompt)
        check_policy(policy)
        CausalWan.check_model(self.transformer, policy)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        prompt_embeds: Tensor | None = None,
        num_frames: int | None = None,
        policy: str | CachePolicy | HeadBudgets | None = None,
        steps: int | tuple[float, ...] | None = None,
        shift: float | None = None,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ChunkVideoPipelineOutput:
        """Draw.

        Args:
            prompt: one prompt or a list.
            prompt_embeds: features [prompts, T, C] in place of `prompt`, as `encode_prompt` gives them.
            num_frames: a multiple of the chunk, as many as one likes. None: as many as the model was trained on.
            policy: which frames the model remembers: one of `visual_spec.models.video.frame_cache`, or its text, such
                as "sliding:window=8". None: what the model was saved with.
            steps: of a chunk: how many even ones, or timesteps from at most 1000 down. None: as saved.
            shift: of their noise levels, as for `ChunkSchedule`. None: as saved.
            num_videos_per_prompt: clips of each prompt; those of one prompt follow each other.
            generator: one `torch.Generator` for the batch, or a list of one per clip.
            output_type: "pil", "np", "pt", or "latent" for the small frames, float [B, 3, T, h, w].
            return_dict: False returns the tuple (frames, latents, trace, frame rate).

        Returns:
            The clips, with a `RolloutTrace` as their trace.

        Raises:
            ValueError, TypeError: bad input, before any computation.
        """
        config = self.config
        num_frames = self.training_frames if num_frames is None else num_frames
        asked = config["default_policy"] if policy is None else policy
        chosen = read_text(asked) if isinstance(asked, str) else asked
        schedule = self.make_schedule(steps, shift)
        self.check_inputs(
            prompt,
            prompt_embeds=prompt_embeds,
            num_frames=num_frames,
            policy=chosen,
            schedule=schedule,
            num_videos_per_prompt=num_videos_per_prompt,
            generator=generator,
            output_type=output_type,
        )
        embeds = self._features(Texts(prompt, prompt_embeds), num_videos_per_prompt).features
        side = config["frame_size"]
        causal = CausalWan(self.transformer, chosen)
        try:
            with at_hand(self.transformer), self.progress_bar(total=num_frames) as bar:  # type: ignore[call-arg]
                latents, trace = roll_out(
                    causal,
                    embeds,
                    num_frames=num_frames,
                    height=side,
                    width=side,
                    schedule=schedule,
                    generator=generator,
                    callback=lambda index, piece: bar.update(piece.shape[2]),
                )
        finally:
            causal.release()
        self.last_trace = trace
        frames = self.decode_latents(latents, output_type)
        self.maybe_free_model_hooks()
        result = frames, latents, trace, self.frame_rate
        return ChunkVideoPipelineOutput(*result) if return_dict else result  # type: ignore[return-value]

    def decode_latents(self, latents: Tensor, output_type: str = "pil") -> Any:
        """Clips of latents [B, 3, T, h, w] in the form `output_type` asks for (see `ChunkVideoPipelineOutput`)."""
        if output_type == "latent":
            return latents
        size = (self.config["frame_size"] * self.config["scale"],) * 2
        clips = [
            F.interpolate(clip.float(), size, mode="bicubic", align_corners=False).clamp(-1, 1)
            for clip in latents.transpose(1, 2)
        ]  # [T, 3, H, W] each
        shown: list[Any] = [self.image_processor.postprocess(clip, output_type=output_type) for clip in clips]
        if output_type == "np":
            return np.stack(shown)
        return torch.stack(shown) if output_type == "pt" else shown
