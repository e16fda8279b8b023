"""The body of pipelines that draw pictures or clips of a grid of tokens: checks, decoding, tokens to pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.offload import at_hand
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.decoders import VQDecoder
from visual_spec.pipelines.output import ImagePipelineOutput, ShownPictures, shown
from visual_spec.pipelines.steps import (
    DecodeProgress,
    Generators,
    StepListener,
    committed_tokens,
    planned_steps,
)
from visual_spec.samplers.core.checks import open_id
from visual_spec.samplers.core.law import TokenLaw

if TYPE_CHECKING:
    from visual_spec.models.core.protocol import TokenGrid
    from visual_spec.pipelines.repaint import Pictures
    from visual_spec.samplers.core.trace import SampleResult


class GridModel(Protocol):
    """A model over a grid of tokens, of any kind."""

    @property
    def grid(self) -> TokenGrid: ...


class TokenImagePipeline(VisualPipeline):
    """A model over image tokens, the tokenizer that turns them into pictures, and a sampler.

    Subclasses register `transformer`, `vq_model` and `sampler`, and draw from texts (`ReadsText`), classes
    (`DrawsClasses`) or nothing. `_decoder` turns the tokens into pictures.
    """

    _callback_tensor_inputs = ["lengths", "tokens"]
    _decoder: type[VQDecoder] = VQDecoder
    _grid: Any = None  # of the call that runs, or ran last

    transformer: Any
    vq_model: Any
    drafter: Any

    @property
    def decoder(self) -> Any:
        """What turns tokens into pictures."""
        return self._decoder(getattr(self, self._decoder.part), self.transformer)

    @property
    def _needed(self) -> tuple[str, ...]:  # type: ignore[override]
        return "transformer", self._decoder.part, "sampler"

    @property
    def _is_whole(self) -> bool:
        """Whether there is a transformer and a tokenizer; else it encodes prompts, or decodes tokens."""
        return self.transformer is not None and getattr(self, self._decoder.part) is not None

    def _check_parts(self) -> None:
        self.image_processor = ShownPictures()
        if self._is_whole:
            self.decoder.check_fit()

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the pictures in pixels."""
        grid, patch = self.transformer.grid, self.decoder.patch
        return grid.height * patch, grid.width * patch

    def _decoded(self) -> tuple[object, dict[str, Any]] | None:
        return (self.transformer, self.sampler_parts()) if self._is_whole else None

    def sized(
        self, height: int | None = None, width: int | None = None, advice: str = "leave height and width out"
    ) -> Any:
        """Return the transformer over pictures of this size in pixels; None is the model's own.

        Args:
            advice: what to do about a size that the model does not draw.

        Raises:
            ValueError: the model does not draw this size.
        """
        if height is None and width is None:
            return self.transformer
        own, patch, grid = self.image_size, self.decoder.patch, self.transformer.grid
        size = (own[0] if height is None else height, own[1] if width is None else width)
        if size == own:
            return self.transformer
        refused = (
            f"height={height}, width={width}, but this model draws {own[0]} x {own[1]} pixels ({grid.height} x "
            f"{grid.width} tokens)"
        )
        if not hasattr(self.transformer, "with_grid"):
            raise ValueError(f"{refused}; {advice}.")
        if any(not isinstance(side, int) or side < patch or side % patch for side in size):
            raise ValueError(f"{refused}; pass multiples of {patch}, or {advice}.")
        try:
            return self.transformer.with_grid(size[0] // patch, size[1] // patch)
        except ValueError as error:
            raise ValueError(f"{refused}: {error} {advice.capitalize()}.") from error

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

    @torch.no_grad()
    def decode_tokens(
        self, tokens: Tensor, output_type: str = "pil", size: tuple[int, int] | None = None
    ) -> Any:
        """Pictures of tokens, as a call returns them, in the form `output_type` asks for.

        Args:
            size: rows and columns of tokens of a picture; None: the transformer's grid.
        """
        height = self.transformer.grid.height if size is None else size[0]
        return self.decode_canvas(self.decoder.canvas(tokens, height), output_type)

    @torch.no_grad()
    def decode_canvas(self, canvas: Tensor, output_type: str = "pil") -> Any:
        """Pictures of a canvas, as `output_type="latent"` returns it, in the form `output_type` asks for."""
        if output_type == "latent":
            return canvas
        with at_hand(self.decoder.model):
            pixels = self.decoder.pixels(canvas)
        return shown(pixels, self.image_processor, output_type)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def check_repainting(
        self,
        image: Pictures | None,
        mask: Pictures | None,
        strength: float | None,
        count: int,
        model: GridModel | None = None,
    ) -> None:
        """Refuse what cannot be repainted, see `visual_spec.pipelines.repaint`.

        `count`: prompts or classes; `model`: what draws, see `sized`.
        """
        if any(part is not None for part in (image, mask, strength)):
            from visual_spec.pipelines.repaint import check_repainting  # most calls draw whole pictures

            grid, patch = (model or self.transformer).grid, self.decoder.patch
            size = grid.height * patch, grid.width * patch
            check_repainting(self, image, mask, strength, count, size)

    def known_tokens(
        self,
        image: Pictures | None,
        mask: Pictures | None,
        strength: float | None,
        generator: Generators,
        count: int,
        each: int,
        model: GridModel | None = None,
    ) -> Tensor | None:
        """Return what the sampler keeps of a picture, see `visual_spec.pipelines.repaint`; None without one."""
        if image is None:
            return None
        from visual_spec.pipelines.repaint import known_tokens

        grid = (model or self.transformer).grid
        return known_tokens(self, image, mask, strength, generator, count=count, each=each, grid=grid)

    def draw_tokens(
        self,
        model: GridModel,
        condition: object,
        count: int,
        law: TokenLaw,
        generator: Generators,
        listener: StepListener,
        known_tokens: Tensor | None = None,
        output_logprobs: bool = False,
    ) -> SampleResult:
        """Let the sampler decode, beside a progress bar. Returns its result, with tokens [count, L] and the trace.

        Args:
            model: the transformer for the size that is drawn (`sized`).
            condition: of `count` rows.
            listener: what tells the callback about steps.
            known_tokens: long [count, L] of a picture that is given, see `known_tokens`.
            output_logprobs: as of the sampler.
        """
        parts, known = self.sampler_parts(), 0
        if known_tokens is not None:
            parts["known_tokens"] = known_tokens
            known = int((known_tokens != open_id(model)).sum())
        # A sampler that is not ours need not know the word.
        asked = {"output_logprobs": True} if output_logprobs else {}

        self._grid, num_tokens = model.grid, model.grid.num_tokens
        self._guidance_scale = law.guidance_scale
        self._num_timesteps = planned_steps(self.sampler, model, parts, num_tokens)
        used = (model, *self._used(parts))
        with at_hand(*used), self.progress_bar(total=count * num_tokens - known) as bar:  # type: ignore[call-arg]
            progress = DecodeProgress(bar, num_tokens, listener.of_tokens, unit=self.unit, known=known)
            result = self.sampler(
                model,
                condition,
                law=law,
                generator=generator,
                batch_size=count,
                callback=progress,
                **asked,
                **parts,
            )
            progress.finish()
        self.last_trace = result.trace
        return result

    def make_output(self, images: object, result: SampleResult, return_dict: bool = True) -> Any:
        """What a call returns: pictures, their tokens and the trace; a tuple of them without `return_dict`."""
        made = images, result.tokens, result.trace
        return ImagePipelineOutput(*made) if return_dict else made

    def _partial(self, result: SampleResult, output_type: str) -> Any:
        """What a stream shows of a decode that goes on: open tokens are grey."""
        from visual_spec.pipelines.streaming import with_grey

        is_open, known = result.trace.commit_call < 0, committed_tokens(result)
        size = self._grid.height, self._grid.width
        if output_type == "latent":
            made = self.decode_tokens(known, "latent", size)
        else:
            pixels = with_grey(self.decode_tokens(known, "pt", size), is_open, self.decoder.patch)
            made = shown(2 * pixels - 1, self.image_processor, output_type)
        return self.make_output(made, result)

    def _used(self, parts: Mapping[str, object]) -> tuple[object, ...]:
        """The models beside the transformer that decoding needs on the device throughout."""
        return (parts.get("drafter"),)
