"""Text to video by a causal diffusion model: caption -> features -> chunks of small frames -> clip of any length."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.utils.outputs import BaseOutput
from torch import Tensor

from visual_spec.models.core.offload import at_hand
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import POLICIES, CachePolicy, HeadBudgets
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.output import ShownPictures, VideoPipelineOutput, shown
from visual_spec.pipelines.sampler_text import parse_sampler
from visual_spec.pipelines.steps import Generators, StepCallback, StepListener
from visual_spec.pipelines.texts import ReadsText, Texts
from visual_spec.records import PipelineFacts
from visual_spec.samplers.continuous.chunks import ChunkTrace, ChunkWiseSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.registry import meant

if TYPE_CHECKING:
    from visual_spec.samplers.core.trace import SampleResult


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
    trace: ChunkTrace
    frame_rate: float

    save: ClassVar[Any] = VideoPipelineOutput.save


class ChunkVideoPipeline(ReadsText):
    """Draws clips as long as one likes, chunk after chunk, with a cache of frames that a policy bounds.

    Latents are small frames of three colours in -1 to 1. So there is no decoder: they are enlarged by cubic
    interpolation.

    Args:
        transformer: a Wan of diffusers that was trained to be causal by chunks, with three channels.
        text_encoder: turns prompts into the features that the transformer reads.
        sampler: how chunks are drawn.
        training_frames: frames of the clips that the transformer was trained on: what its caches are measured by.
        frame_size: rows and columns of a small frame.
        scale: pixels of a frame on a side of one of a small frame.
        default_policy: the cache where a call names none, as text.
        chunk, default_steps, default_shift: set `chunk`, `steps` and `shift` of the sampler, which they make where
            there is none; earlier versions saved them here.
        frame_rate: frames per second of the clips.

    Raises:
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
    _num_frames = 0  # of the call that runs, or ran last
    _unseen = "the clip will not show it"
    _optional_components = ["sampler"]

    @registers
    def __init__(
        self,
        transformer: WanTransformer3DModel,
        text_encoder: CaptionEncoder,
        sampler: ChunkWiseSampler | None = None,
        chunk: int | None = None,
        training_frames: int = 8,
        frame_size: int = 16,
        scale: int = 4,
        default_policy: str = "full",
        default_steps: int | None = None,
        default_shift: float | None = None,
        frame_rate: float = 8.0,
    ):
        self.image_processor = ShownPictures()
        former = {"chunk": chunk, "steps": default_steps, "shift": default_shift}
        changed = {name: value for name, value in former.items() if value is not None}
        if changed:
            settings = {"chunk": 2, "shift": 3.0} if sampler is None else sampler.config
            self.sampler = ChunkWiseSampler.from_config(settings, **changed)
        self.register_to_config(chunk=None, default_steps=None, default_shift=None)

    def _check_parts(self) -> None:
        if self.transformer is None:
            return  # it encodes prompts
        channels = self.transformer.config["in_channels"]
        if channels != 3:
            raise ValueError(
                f"the transformer draws latents of {channels} channels; pass one of 3, the colours of frames."
            )
        CausalWan.check_model(self.transformer, read_policy(self.config["default_policy"]))

    @classmethod
    def facts_of(cls, settings: Mapping[str, object], sampler: Mapping[str, object]) -> PipelineFacts:
        """See `VisualPipeline.facts_of`. Guidance is in the weights: a call has no law."""
        return replace(super().facts_of(settings, sampler), default_settings={})

    @property
    def frame_rate(self) -> float:
        """Frames per second of the clips."""
        return self.config["frame_rate"]

    @property
    def training_frames(self) -> int:
        """Frames of the clips that the transformer was trained on."""
        return self.config["training_frames"]

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
            num_frames: a multiple of the chunk, as many as one likes. None: the whole chunks of training clips.
            policy: which frames the model remembers: one of `visual_spec.models.video.frame_cache`, or its text, such
                as "sliding:window=8". None: what the model was saved with.
            steps, shift: in place of the sampler's, see `ChunkWiseSampler`. Its `first_steps` stay as they are.
            num_videos_per_prompt: clips of each prompt, one prompt after the other.
            generator: one `torch.Generator` for the batch, or a list of one per clip.
            output_type: "pil", "np", "pt", or "latent" for the small frames, float [B, 3, T, h, w].
            return_dict: False returns the tuple (frames, latents, trace, frame rate).
            callback_on_step_end: called as (pipe, step, timestep, kwargs) after every chunk: `step` is its index,
                `timestep` the number of frames so far. It returns None, or `kwargs` as they are. After
                `pipe._interrupt = True` the call ends with the frames so far.
            callback_on_step_end_tensor_inputs: which tensors `kwargs` holds: "latents", of the chunk.

        Returns:
            The clips, with a `ChunkTrace` as their trace.

        Raises:
            ValueError, TypeError: bad input, before any computation.
        """
        texts = Texts(prompt=prompt, prompt_embeds=prompt_embeds)
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs(texts, num_videos_per_prompt, TokenLaw(), generator, output_type)
        cache = read_policy(self.config["default_policy"] if policy is None else policy)
        CausalWan.check_model(self.transformer, cache)
        changed = {name: value for name, value in [("steps", steps), ("shift", shift)] if value is not None}
        sampler = type(self.sampler).from_config(self.sampler.config, **changed) if changed else self.sampler
        chunk = sampler.config["chunk"]
        length = max(self.training_frames // chunk, 1) * chunk if num_frames is None else num_frames
        self._num_timesteps = sampler.check_length(length)
        with self.running():
            features, *_ = self.encode_prompt(texts, num_videos_per_prompt=num_videos_per_prompt)
            result = self.draw_chunks(sampler, cache, features, length, generator, listener)
            frames = self.decode_latents(result.tokens, output_type)
        made: Any = (frames, result.tokens, result.trace, self.frame_rate)
        return ChunkVideoPipelineOutput(*made) if return_dict else made

    def draw_chunks(
        self,
        sampler: ChunkWiseSampler,
        policy: CachePolicy | HeadBudgets,
        features: Tensor,
        num_frames: int,
        generator: Generators,
        listener: StepListener,
    ) -> SampleResult:
        """Let the sampler draw chunk after chunk, beside a progress bar. Returns its result: latents and the trace."""
        side, self._num_frames = self.config["frame_size"], num_frames
        causal = CausalWan(self.transformer, policy)
        try:
            with at_hand(self.transformer), self.progress_bar(total=num_frames) as bar:  # type: ignore[call-arg]
                bar.unit = " frames"

                def after_chunk(index: int, piece: Tensor) -> str | Tensor | None:
                    bar.set_postfix_str(f"{index + 1} chunk{'s' * (index > 0)}", refresh=False)
                    bar.update(piece.shape[2])
                    return listener(index, lambda: (index + 1) * sampler.config["chunk"], latents=piece)

                result = sampler(
                    causal,
                    features,
                    law=TokenLaw(),
                    generator=generator,
                    batch_size=len(features),
                    callback=after_chunk,
                    num_frames=num_frames,
                    height=side,
                    width=side,
                )
        finally:
            causal.release()
        self.last_trace = result.trace
        return result

    def _partial(self, result: Any, output_type: str) -> ChunkVideoPipelineOutput:
        """What `stream` shows after a chunk: the frames so far, and grey ones."""
        from visual_spec.pipelines.streaming import GREY

        frames = self.decode_latents(result.tokens, "latent" if output_type == "latent" else "pt")
        if output_type != "latent":
            known = frames.shape[1]
            grey = frames.new_full((len(frames), self._num_frames - known, *frames.shape[2:]), GREY)
            frames = shown(list(2 * torch.cat([frames, grey], 1) - 1), self.image_processor, output_type)
        return ChunkVideoPipelineOutput(frames, result.tokens, result.trace, self.frame_rate)

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


def read_policy(policy: Any) -> CachePolicy | HeadBudgets:
    """The policy of a text, `name` or `name:setting=value,...`; a policy as it is.

    Raises:
        ValueError: an unknown policy or setting; the message lists those there are.
        TypeError: neither a text nor a policy; names the classes that are.
    """
    if not isinstance(policy, str):
        for one in getattr(policy, "policies", (policy,)):
            if not isinstance(one, tuple(POLICIES.values())):
                names = ", ".join(kind.__name__ for kind in (*POLICIES.values(), HeadBudgets))
                raise TypeError(f"policy is a {type(one).__name__}; pass its text, or one of {names}.")
        return policy
    name, settings = parse_sampler(policy)
    if name not in POLICIES:
        raise ValueError(
            f"unknown cache policy {name!r}; pass one of {', '.join(POLICIES)}.{meant(name, POLICIES)}"
        )
    known = list(inspect.signature(POLICIES[name]).parameters)
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"the {name} policy has no setting {', '.join(unknown)}; it takes {', '.join(known) or 'none'}."
        )
    return POLICIES[name](**settings)
