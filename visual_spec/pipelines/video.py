"""Text to video by models of tokens: caption -> features -> tokens of all frames -> clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.core.settings import LawChoice, Within, whole
from visual_spec.pipelines.components import draws, registers
from visual_spec.pipelines.decoders import FrameDecoder
from visual_spec.pipelines.output import VideoPipelineOutput
from visual_spec.pipelines.steps import Asked, StepCallback
from visual_spec.pipelines.texts import ReadsText
from visual_spec.pipelines.token_image import TokenImagePipeline

if TYPE_CHECKING:
    from visual_spec.models.masked.frames import FrameMaskedTransformer
    from visual_spec.models.next_token.llamagen import LlamaGenTransformer
    from visual_spec.models.next_token.llamagen_vq import VQModel
    from visual_spec.models.text.caption_encoder import CaptionEncoder


class VideoPipeline(ReadsText, TokenImagePipeline):
    """Draws clips from prompts.

    Args:
        transformer: a next-token model over the tokens of all frames, such as a `LlamaGenTransformer` with
            `num_frames`, or a `FrameMaskedTransformer`, which draws the tokens of a frame in parallel. None here, for
            the tokenizer or for the sampler: the pipeline only encodes prompts.
        vq_model: turns the tokens of a frame into a picture; its codebook is the transformer's vocabulary. Frames may
            be of another size than the pictures that it was made for: it is convolutional.
        text_encoder: turns prompts into the features that the transformer reads. None: pass `prompt_embeds`.
        sampler: how tokens are decoded, e.g. `SpeculativeJacobiSampler(128, initial_draft="panned_frame")`; of a
            `FrameMaskedTransformer` a `FrameMaskedSampler`.
        drafter: what proposes tokens to samplers that ask for one.
        default_guidance_scale, default_top_k, default_temperature, default_top_p: used where a call names none; saved
            with the pipeline.
        frame_rate: frames per second of the clips.

    Raises:
        ValueError: tokenizer and transformer that do not fit, or a transformer of pictures.

    Example:
        >>> pipe = VideoPipeline.from_pretrained("motion")
        >>> prompt = "a small red star moves right quickly and bounces on a plain sky background, camera still"
        >>> pipe(prompt).save("clip.mp4")
    """

    model_cpu_offload_seq = "text_encoder->drafter->transformer->vq_model"
    _optional_components = ["text_encoder", "drafter"]

    _decoder = FrameDecoder
    _output = VideoPipelineOutput
    _each = "num_videos_per_prompt"
    _unseen = "the clip will not show it"

    @registers
    def __init__(
        self,
        transformer: LlamaGenTransformer | FrameMaskedTransformer | None,
        vq_model: VQModel | None,
        text_encoder: CaptionEncoder | None,
        sampler: SchedulerMixin | None,
        default_guidance_scale: float = 1.5,
        default_top_k: int = 0,
        frame_rate: float = 8.0,
        drafter: ModelMixin | None = None,
        default_temperature: float = 1.0,
        default_top_p: float = 1.0,
    ): ...

    @property
    def frame_rate(self) -> float:
        """Frames per second of the clips."""
        return self.config["frame_rate"]

    @property
    def num_frames(self) -> int:
        """The most frames of a clip."""
        return self.transformer.grid.frames

    def _sized(self, args: Mapping[str, Any], asked: Asked) -> Any:
        model, count = super()._sized(args, asked), args["num_frames"]
        if count is None:
            return model
        whole("num_frames", count, Within(1, self.num_frames), f"; without it, {self.num_frames}")
        return self.transformer.first_frames(count)

    def _more_output(self) -> tuple[float]:
        return (self.frame_rate,)

    @draws()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        num_frames: int | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        **law: Unpack[LawChoice],
    ) -> VideoPipelineOutput:
        """Draw. All but these is as for `ImagePipeline.__call__`.

        Args:
            num_frames: frames of the clips, at most as many as the model has. None: all of them. Fewer: the first ones.
            num_videos_per_prompt: clips of each prompt, one prompt after the other.
            output_type: "pil", "np", "pt", or "latent" for the tokens by place [B, T, h, w].
            return_dict: False returns the tuple (frames, tokens, trace, frame rate).
        """
        ...
