"""What the pipelines that draw one picture per grid of tokens share: input checks, decoding, tokens to pixels."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange

from visual_spec.models.core import any_order
from visual_spec.models.core.checkpoints import Checkpoint, Source
from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.settings import whole
from visual_spec.models.core.trained_order import RASTER_ORDER, trained_order
from visual_spec.models.next_token.llamagen_checkpoint import load_pair, official_defaults
from visual_spec.pipelines.base import DecodeProgress, VisualPipeline
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.pipelines.shown import ShownPictures
from visual_spec.pipelines.steps import StepCallback, StepListener, asked_tensors
from visual_spec.samplers.core.law import TokenLaw

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class TokenImagePipeline(VisualPipeline):
    """A next-token model over image tokens, the tokenizer that turns them into pictures, and a sampler.

    Subclasses register `transformer`, `vq_model` and `sampler`, and say what a picture is drawn from.
    """

    _callback_tensor_inputs = ["lengths"]

    _tokenizer_part = "vq_model"  # the component that turns tokens into pictures

    transformer: Any
    vq_model: Any
    drafter: Any

    def _finish_init(self, **law: float) -> None:
        """To be called when the components are registered: checks that they fit each other.

        Args:
            law: the defaults of the law's settings, by the names of the constructor's arguments.
        """
        self.register_to_config(**law)
        self.image_processor = ShownPictures()
        if self.transformer is None or self.vq_model is None:
            return  # it encodes prompts, or decodes tokens
        self._check_fit()

    def _check_fit(self) -> None:
        """Refuse a tokenizer of other codes or another grid than the transformer's.

        Raises:
            ValueError: names both.
        """
        grid, side = self.transformer.grid, self.vq_model.tokens_per_side
        vocab_size, codes = self.transformer.vocab_size, self.vq_model.config["codebook_size"]
        if (vocab_size, grid.height, grid.width) != (codes, side, side):
            raise ValueError(
                f"the transformer predicts {grid.height} x {grid.width} tokens out of {vocab_size}, but the "
                f"tokenizer decodes {side} x {side} out of {codes}; load both from the same model."
            )

    @property
    def _patch(self) -> int:
        """Side of a token in pixels."""
        return self.vq_model.patch_size

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the pictures in pixels."""
        grid = self.transformer.grid
        return grid.height * self._patch, grid.width * self._patch

    def _check_drawing(
        self,
        *,
        height: int | None,
        width: int | None,
        pictures_each: Any,
        pictures_each_name: str,
        output_type: str,
        callback: Any,
        callback_tensors: Sequence[str] | None,
    ) -> None:
        """Refuse what no picture can be drawn with, whatever it is drawn from."""
        self.check_complete("transformer", self._tokenizer_part, "sampler")
        self.check_sampler()
        self.sized(height, width)
        whole(pictures_each_name, pictures_each)
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type={output_type!r}; pass one of {', '.join(OUTPUT_TYPES)}.")
        asked_tensors(callback, callback_tensors, self._callback_tensor_inputs)

    def _decoded(self) -> tuple[Any, dict[str, Any]] | None:
        if self.transformer is None or getattr(self, self._tokenizer_part) is None:
            return None
        return self.transformer, self.sampler_parts()

    def sized(self, height: int | None = None, width: int | None = None) -> Any:
        """Return the transformer over pictures of this size in pixels; None is the model's own.

        Raises:
            ValueError: the model does not draw this size.
        """
        own, patch, grid = self.image_size, self._patch, self.transformer.grid
        size = (own[0] if height is None else height, own[1] if width is None else width)
        if size == own:
            return self.transformer
        refused = (
            f"height={height}, width={width}, but this model draws {own[0]} x {own[1]} pixels ({grid.height} x "
            f"{grid.width} tokens)"
        )
        if not hasattr(self.transformer, "with_grid"):
            raise ValueError(f"{refused}; leave height and width out.")
        if any(not isinstance(side, int) or side < patch or side % patch for side in size):
            raise ValueError(f"{refused}; pass multiples of {patch}, or leave height and width out.")
        try:
            return self.transformer.with_grid(size[0] // patch, size[1] // patch)
        except ValueError as error:
            raise ValueError(f"{refused}: {error} Leave height and width out.") from error

    def sampler_parts(self) -> dict[str, Any]:
        """What the sampler asks for beside the model: a drafter, the codebook."""
        parts = {}
        if getattr(self.sampler, "needs_drafter", False):
            parts["drafter"] = self.drafter
        if getattr(self.sampler, "needs_codebook", False):
            with at_hand(self.vq_model):
                raw = "acceptance" in self.sampler.config and self.sampler.relaxation.codes == "raw"
                quantize = self.vq_model.quantize
                parts["codebook"] = quantize.embedding.weight if raw else quantize.codes
        return parts

    def decode_tokens(
        self, tokens: torch.Tensor, output_type: str = "pil", size: tuple[int, int] | None = None
    ) -> Any:
        """Pictures of tokens [B, h * w] in the form `output_type` asks for (see `ImagePipelineOutput`).

        Args:
            size: h and w; None: those of the transformer's grid.
        """
        if output_type == "latent":
            return rearrange(
                tokens, "b (h w) -> b h w", h=self.transformer.grid.height if size is None else size[0]
            )
        with at_hand(self.vq_model):
            pictures = self.vq_model.decode_tokens(tokens, *([] if size is None else [size]))
        return self.image_processor.postprocess(pictures, output_type=output_type)

    def _draw(
        self,
        condition: Any,
        batch_size: int,
        *,
        law: TokenLaw,
        generator: torch.Generator | list[torch.Generator] | None,
        output_type: str,
        return_dict: bool,
        callback: StepCallback | None,
        callback_tensors: Sequence[str] | None,
        model: Any = None,
        **given: Any,
    ) -> ImagePipelineOutput:
        """Decode `batch_size` pictures, with a progress bar, and turn them into pixels.

        `model`: what draws the tokens, in place of the transformer. `given`: what the sampler takes beside, other than
        `sampler_parts`.
        """
        model = self.transformer if model is None else model
        told = StepListener(self, callback, callback_tensors)

        def listen(step: int, lengths: torch.Tensor) -> Any:
            return told(step, lambda: int(lengths.min()), lengths=lengths)

        num_tokens = self._num_timesteps = model.grid.num_tokens
        self._guidance_scale = law.guidance_scale
        parts = self.sampler_parts() | given
        models = model, parts.get("drafter")
        with at_hand(*models), self.progress_bar(total=batch_size * num_tokens) as bar:  # type: ignore[call-arg]
            progress = DecodeProgress(bar, num_tokens, listen, unit=self.unit)
            result = self.sampler(
                model,
                condition,
                law=law,
                generator=generator,
                batch_size=batch_size,
                callback=progress,
                **parts,
            )
            progress.finish()
        self.last_trace = result.trace
        size, own = ((grid.height, grid.width) for grid in (model.grid, self.transformer.grid))
        images = self.decode_tokens(result.tokens, output_type, **({} if size == own else {"size": size}))
        self.maybe_free_model_hooks()
        if not return_dict:
            return images, result.tokens, result.trace  # type: ignore[return-value]
        return ImagePipelineOutput(images=images, tokens=result.tokens, trace=result.trace)


def own_sampler(model: Any) -> Any:
    """Return the sampler of a model that none is chosen for: the tokens, or the law, of its own order."""
    known = {RASTER_ORDER: "speculative-jacobi", any_order.ANY_ORDER: "speculative-any-order"}
    return make_sampler(known.get(trained_order(model), "ordered"))


def load_official(
    transformer: Source,
    vq_model: Source,
    *,
    image_size: int | None,
    dtype: torch.dtype | None,
    text: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    """Transformer, tokenizer and the pipeline's defaults from two official LlamaGen files.

    Args:
        text: whether the pipeline draws from captions (else from class labels).

    Raises:
        ValueError, OSError: as `load_pair`; a transformer of the other kind.
    """
    model, tokenizer = load_pair(transformer, vq_model, image_size=image_size, dtype=dtype)
    if (model.config["caption_dim"] is not None) != text:
        kind, other = ("class labels", "ClassImagePipeline") if text else ("captions", "ImagePipeline")
        path = transformer.path if isinstance(transformer, Checkpoint) else os.fspath(transformer)
        raise ValueError(f"{path} draws from {kind}; load it with {other}.from_official.")
    return model, tokenizer, official_defaults(model)
