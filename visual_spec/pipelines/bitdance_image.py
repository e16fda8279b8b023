"""Text to image by BitDance: prompt -> ids -> patches of bits -> picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from visual_spec.models.continuous.binary_autoencoder import BinaryAutoencoder, load_binary_autoencoder
from visual_spec.models.continuous.bitdance_text import BitDanceTextTransformer, load_bitdance_text
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.decoders import KLDecoder
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.steps import StepCallback, StepListener
from visual_spec.pipelines.texts import Texts
from visual_spec.pipelines.token_image import TokenImagePipeline

_ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_NOTHING = "<|im_start|>assistant\n"


class BitDanceImagePipeline(TokenImagePipeline):
    """Draws pictures from prompts by BitDance, a patch of 16 or 64 tokens a call.

    Args:
        transformer: reads prompts, and draws the patches.
        vae: turns bits into a picture and back.
        tokenizer: of the language model, with ids for the sizes of pictures and for queries.
        sampler: one of continuous tokens; published guidance is the same in all calls (`guidance="constant"`).
        default_guidance_scale: of calls that name none; saved with the pipeline.

    Raises:
        ValueError: an autoencoder of other tokens than the transformer's.

    Example:
        >>> pipe = BitDanceImagePipeline.from_official("BitDance-14B-64x").to("cuda")
        >>> pipe("a lighthouse at dusk", height=1024, width=1024).images[0].save("lighthouse.png")
    """

    model_cpu_offload_seq = "transformer->vae"
    _decoder = KLDecoder

    vae: BinaryAutoencoder
    tokenizer: Any

    @registers
    def __init__(
        self,
        transformer: BitDanceTextTransformer,
        vae: BinaryAutoencoder,
        tokenizer: PreTrainedTokenizerBase,
        sampler: SchedulerMixin,
        default_guidance_scale: float = 7.5,
    ): ...

    @classmethod
    def from_official(
        cls,
        folder: str | os.PathLike,
        *,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
    ) -> Self:
        """A pipeline around an official folder, BitDance-14B-64x or BitDance-14B-16x.

        Args:
            dtype: of all weights; None: the language model's.
            sampler: default `ContinuousSampler(guidance="constant")`: 50 steps with noise a patch, and a last one.

        Raises:
            ValueError, OSError: a folder that lacks a file, or holds other weights; names it.
        """
        from visual_spec.samplers.continuous.continuous import ContinuousSampler

        folder = Path(folder)
        model = load_bitdance_text(folder, dtype=dtype)
        vae = load_binary_autoencoder(folder / "ae.safetensors", dtype=dtype or model.dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return cls(model, vae, tokenizer, sampler or ContinuousSampler(guidance="constant"))

    def make_condition(
        self,
        prompt: str | Sequence[str],
        *,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
    ) -> ImagePrompt:
        """The ids of prompts as the model reads them, each repeated for its pictures; sizes as of a call.

        Raises:
            ValueError: the tokenizer has no id for this size of picture, or too few queries.
        """
        model, latent = self.sized(height, width), self.decoder.patch // self.transformer.patch
        sides = [side * model.patch for side in (model.grid.height, model.grid.width)]
        names = ["<|vision_start|>", *(f"<|res_{side}|>" for side in sides)]
        names += [f"<|query_{index}|>" for index in range(1, model.patch_tokens)]
        unknown = [name for name in names if name not in self.tokenizer.get_vocab()]
        if unknown:
            raise ValueError(
                f"the tokenizer does not know {unknown[0]}, which a picture of {sides[0] * latent} x "
                f"{sides[1] * latent} pixels needs; load it from the official folder, or draw a smaller picture."
            )
        ending = self.tokenizer.convert_tokens_to_ids(names)

        def rows(texts: list[str]) -> Prompt:
            encoded = [torch.tensor([*self.tokenizer.encode(text), *ending]) for text in texts]
            ids = pad_sequence(encoded, batch_first=True, padding_side="left")
            lengths = torch.tensor([len(one) for one in encoded])
            mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]
            return Prompt(ids, mask).repeat(num_images_per_prompt)

        prompts = Texts(prompt).prompts
        return ImagePrompt(rows([_ASKED.format(text) for text in prompts]), rows([_NOTHING] * len(prompts)))

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
    ) -> ImagePipelineOutput:
        """Draw.

        Args:
            prompt: a text, or a list of them.
            height, width: of the pictures in pixels, multiples of those of a patch (64, or 128 of the 64x); None:
                1024. The models were trained for areas of 512 x 512 (16x) and 1024 x 1024.
            temperature: multiplies the noise of the chains.

        Other arguments, and the errors, as in `ImagePipeline.__call__`.
        """
        law = self.make_law(guidance_scale, temperature)
        texts = Texts(prompt)
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs)
        self.check_inputs(texts, num_images_per_prompt, law, generator, output_type)
        model, each = self.sized(height, width), num_images_per_prompt
        size = (model.grid.height, model.grid.width)
        with self.running():
            condition = self.make_condition(
                texts.prompts, height=height, width=width, num_images_per_prompt=each
            )
            count = len(texts) * each
            result = self.draw_tokens(model, condition, count, law, generator, listener)
            images = self.decode_tokens(result.tokens, output_type, size)
        return self.make_output(images, result, return_dict)
