"""Text to video by a causal diffusion model: caption -> features -> chunks of small frames -> clip of any length."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.utils.outputs import BaseOutput
from torch import Tensor

from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.settings import whole
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import POLICIES, CachePolicy, HeadBudgets
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.output import ShownPictures, shown
from visual_spec.pipelines.sampler_text import parse_sampler
from visual_spec.pipelines.steps import Asked, StepCallback
from visual_spec.pipelines.texts import ReadsText, Texts
from visual_spec.pipelines.video_files import pixels_of, write_video
from visual_spec.records import PipelineFacts
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

    _callback_tensor_inputs = ["latents"]
    _each = "num_videos_per_prompt"
    _sample = "clip"
    _output = ChunkVideoPipelineOutput
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

    def _check_parts(self) -> None:
        if self.transformer is None:
            return  # it encodes prompts
        channels = self.transformer.config["in_channels"]
        if channels != 3:
            raise ValueError(
                f"the transformer draws latents of {channels} channels; pass one of 3, the colours of frames."
            )
        CausalWan.check_model(self.transformer, read_text(self.config["default_policy"]))

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

    def check_sampler(self) -> None:
        """Nothing to refuse: a policy stands in the place of a sampler."""

    def _asked(self, args: Mapping[str, Any]) -> Asked:
        texts = Texts.of(args["prompt"], args)
        return Asked(texts, texts.count, args[self._each], self._each, None)

    def _checked(self, args: Mapping[str, Any]) -> Asked:
        asked = self._asked(args)
        self._check_call(args, asked, "transformer")
        self._rollout(args)
        return asked

    def _rollout(self, args: Mapping[str, Any]) -> tuple[int, CachePolicy | HeadBudgets, ChunkSchedule]:
        """Frames, policy and steps that a call asks for, checked."""
        policy = self.config["default_policy"] if args["policy"] is None else args["policy"]
        policy = read_text(policy) if isinstance(policy, str) else policy
        schedule = self.make_schedule(args["steps"], args["shift"])
        num_frames = self.training_frames if args["num_frames"] is None else args["num_frames"]
        whole("num_frames", num_frames)
        if num_frames % schedule.chunk:
            near = -(-num_frames // schedule.chunk) * schedule.chunk
            raise ValueError(
                f"num_frames={num_frames} is no multiple of the chunk of {schedule.chunk} frames; pass {near}."
            )
        check_policy(policy)
        CausalWan.check_model(self.transformer, policy)
        return num_frames, policy, schedule

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
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
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
            callback_on_step_end: called as (pipe, step, timestep, kwargs) after every chunk: `step` is its index,
                `timestep` the number of frames so far. It returns None, or `kwargs` as they are. After
                `pipe._interrupt = True` the call ends with the frames so far.
            callback_on_step_end_tensor_inputs: which tensors `kwargs` holds: "latents", those of the chunk.

        Returns:
            The clips, with a `RolloutTrace` as their trace.

        Raises:
            ValueError, TypeError: bad input, before any computation.
        """
        return self._run(locals())

    def _decode(self, args: Mapping[str, Any], asked: Asked, condition: Any) -> tuple[Any, ...]:
        num_frames, policy, schedule = self._rollout(args)
        self._num_timesteps = num_frames // schedule.chunk
        side, heard = self.config["frame_size"], self._listener(args, asked)
        causal = CausalWan(self.transformer, policy)
        try:
            with at_hand(self.transformer), self.progress_bar(total=num_frames) as bar:  # type: ignore[call-arg]

                def after_chunk(index: int, piece: Tensor) -> Any:
                    bar.update(piece.shape[2])
                    return heard(index, lambda: (index + 1) * schedule.chunk, latents=piece)

                latents, trace = roll_out(
                    causal,
                    condition.features,
                    num_frames=num_frames,
                    height=side,
                    width=side,
                    schedule=schedule,
                    generator=args["generator"],
                    callback=after_chunk,
                )
        finally:
            causal.release()
        self.last_trace = trace
        return self.decode_latents(latents, args["output_type"]), latents, trace, self.frame_rate

    def decode_latents(self, latents: Tensor, output_type: str = "pil") -> Any:
        """Clips of latents [B, 3, T, h, w] in the form `output_type` asks for (see `ChunkVideoPipelineOutput`)."""
        if output_type == "latent":
            return latents
        size = (self.config["frame_size"] * self.config["scale"],) * 2
        clips = [
            F.interpolate(clip.float(), size, mode="bicubic", align_corners=False).clamp(-1, 1)
            for clip in latents.transpose(1, 2)
        ]  # [T, 3, H, W] each
        return shown(clips, self.image_processor, output_type)


def read_text(text: str) -> Any:
    """The policy of a text: `name` or `name:setting=value,...`.

    Raises:
        ValueError: an unknown policy or setting; the message lists those there are.
    """
    name, settings = parse_sampler(text)
    if name not in POLICIES:
        raise ValueError(f"unknown cache policy {name!r}; pass one of {', '.join(POLICIES)}.")
    known = list(inspect.signature(POLICIES[name]).parameters)
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"the {name} policy has no setting {', '.join(unknown)}; it takes {', '.join(known) or 'none'}."
        )
    return POLICIES[name](**settings)


def check_policy(policy: Any) -> None:
    """Refuse what is no policy of a cache.

    Raises:
        TypeError: names those that are.
    """
    for one in getattr(policy, "policies", (policy,)):
        if not isinstance(one, tuple(POLICIES.values())):
            names = ", ".join(kind.__name__ for kind in (*POLICIES.values(), HeadBudgets))
            raise TypeError(f"policy is a {type(one).__name__}; pass its text, or one of {names}.")
