"""Text to video by models of tokens: caption -> features -> tokens of all frames -> clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.core.settings import Within, whole
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.decoders import FrameDecoder
from visual_spec.pipelines.output import VideoPipelineOutput
from visual_spec.pipelines.steps import StepCallback, StepListener
from visual_spec.pipelines.texts import ReadsText, Texts, as_condition
from visual_spec.pipelines.token_image import TokenImagePipeline

if TYPE_CHECKING:
    from visual_spec.models.masked.frames import FrameMaskedTransformer
    from visual_spec.models.next_token.llamagen import LlamaGenTransformer
    from visual_spec.models.next_token.llamagen_vq import VQModel
    from visual_spec.models.text.caption_encoder import CaptionEncoder
    from visual_spec.samplers.core.trace import SampleResult


class VideoPipeline(ReadsText, TokenImagePipeline):
    """Draws clips from prompts.

    Args:
        transformer: a next-token model over the tokens of all frames, such as a `LlamaGenTransformer` with
            `num_frames`, or a `FrameMaskedTransformer`, which draws the tokens of a frame in parallel. None here, for
            the tokenizer or for the sampler: the pipeline only encodes prompts.
        vq_model: turns the tokens of a frame into a picture; its codebook is the transformer's vocabulary. Frames may
            be of another size than the pictures that it was made for: it is convolutional.
        text_encoder: turns prompts into the features that the transformer reads. None: pass `prompt_embeds`.
        sampler: how tokens are decoded, e.g. `SpeculativeJacobiSampler(initial_draft="panned_frame")`; of a
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

    def make_output(self, images: object, result: SampleResult, return_dict: bool = True) -> Any:
        made = (images, result.tokens, result.trace, self.frame_rate)
        return VideoPipelineOutput(*made) if return_dict else made

    @torch.no_grad()
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
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_until: int | None = None,
        output_logprobs: bool = False,
    ) -> VideoPipelineOutput:
        """Draw. All but these is as for `ImagePipeline.__call__`.

        Args:
            num_frames: frames of the clips, at most as many as the model has. None: all of them. Fewer: the first ones.
            num_videos_per_prompt: clips of each prompt, one prompt after the other.
            output_type: "pil", "np", "pt", or "latent" for the tokens by place [B, T, h, w].
            return_dict: False returns the tuple (frames, tokens, trace, frame rate).
        """
        law = self.make_law(guidance_scale, temperature, top_k, top_p, guidance_until)
        negative = negative_prompt, negative_prompt_embeds, negative_prompt_attention_mask
        texts = Texts(prompt, prompt_embeds, prompt_attention_mask, *negative)
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs(texts, num_videos_per_prompt, law, generator, output_type)
        self.check_logprobs(output_logprobs)
        model = self.sized(height, width)
        if num_frames is not None:
            whole("num_frames", num_frames, Within(1, self.num_frames), f"; without it, {self.num_frames}")
            model = self.transformer.first_frames(num_frames)
        count = len(texts) * num_videos_per_prompt
        with self.running():
            condition = as_condition(*self.encode_prompt(texts, num_videos_per_prompt=num_videos_per_prompt))
            result = self.draw_tokens(
                model, condition, count, law, generator, listener, output_logprobs=output_logprobs
            )
            frames = self.decode_tokens(result.tokens, output_type)
        return self.make_output(frames, result, return_dict)
