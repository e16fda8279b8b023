"""The body of pipelines that draw pictures or clips of a grid of tokens: checks, decoding, tokens to pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from visual_spec.models.core.offload import at_hand
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.decoders import VQDecoder
from visual_spec.pipelines.output import ImagePipelineOutput, ShownPictures, shown
from visual_spec.pipelines.steps import Asked, DecodeProgress, planned_steps
from visual_spec.samplers.core.checks import open_id
from visual_spec.samplers.core.state import SO_FAR


class TokenImagePipeline(VisualPipeline):
    """A model over image tokens, the tokenizer that turns them into pictures, and a sampler.

    Subclasses register `transformer`, `vq_model` and `sampler`, and draw from texts (`ReadsText`), classes
    (`DrawsClasses`) or nothing. `_decoder` turns the tokens into pictures.
    """

    _callback_tensor_inputs = ["lengths", "tokens"]
    _decoder: type[VQDecoder] = VQDecoder
    _output: Any = ImagePipelineOutput

    transformer: Any
    vq_model: Any
    drafter: Any

    @property
    def decoder(self) -> Any:
        """What turns tokens into pictures."""
        return self._decoder(getattr(self, self._decoder.part), self.transformer)

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

    def _decoded(self) -> tuple[Any, dict[str, Any]] | None:
        return (self.transformer, self.sampler_parts()) if self._is_whole else None

    def _sized(self, args: Mapping[str, Any], asked: Asked) -> Any:
        """The transformer over the pictures or clips that a call asks for."""
        return self.sized(args["height"], args["width"])

    def sized(self, height: int | None = None, width: int | None = None) -> Any:
        """Return the transformer over pictures of this size in pixels; None is the model's own.

        Raises:
            ValueError: the model does not draw this size.
        """
        own, patch, grid = self.image_size, self.decoder.patch, self.transformer.grid
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

    @torch.no_grad()
    def decode_tokens(
        self, tokens: torch.Tensor, output_type: str = "pil", size: tuple[int, int] | None = None
    ) -> Any:
        """Pictures of tokens, as a call returns them, in the form `output_type` asks for.

        Args:
            size: rows and columns of tokens of a picture; None: the transformer's grid.
        """
        height = self.transformer.grid.height if size is None else size[0]
        return self.decode_canvas(self.decoder.canvas(tokens, height), output_type)

    @torch.no_grad()
    def decode_canvas(self, canvas: torch.Tensor, output_type: str = "pil") -> Any:
        """Pictures of a canvas, as `output_type="latent"` returns it, in the form `output_type` asks for."""
        if output_type == "latent":
            return canvas
        with at_hand(self.decoder.model):
            pixels = self.decoder.pixels(canvas)
        return shown(pixels, self.image_processor, output_type)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _checked(self, args: Mapping[str, Any]) -> Asked:
        asked = self._asked(args)
        self._check_call(args, asked, "transformer", self._decoder.part, "sampler")
        asked.model = self._sized(args, asked)
        image, mask, strength = (args.get(name) for name in ("image", "mask", "strength"))
        if any(part is not None for part in (image, mask, strength)):
            from visual_spec.pipelines.repaint import check_repainting  # most calls draw whole pictures

            check_repainting(self, image, mask, strength, asked.count)
        return asked

    def _decode(self, args: Mapping[str, Any], asked: Asked, condition: Any) -> tuple[Any, ...]:
        model, law, count = asked.model, asked.law, asked.count * asked.each
        parts, known = self.sampler_parts(), 0
        if args.get("image") is not None:
            from visual_spec.pipelines.repaint import known_tokens

            picture = [args[name] for name in ("image", "mask", "strength", "generator")]
            parts["known_tokens"] = known_tokens(self, *picture, count=asked.count, each=asked.each)
            known = int((parts["known_tokens"] != open_id(model)).sum())
        heard = self._listener(args, asked)

        def listen(step: int, lengths: torch.Tensor) -> Any:
            tokens = {"tokens": _committed(SO_FAR.get()())} if "tokens" in asked.tensors else {}
            return heard(step, lambda: int(lengths.min()), lengths=lengths, **tokens)

        num_tokens = model.grid.num_tokens
        self._num_timesteps = planned_steps(self.sampler, model, parts, num_tokens)
        self._guidance_scale = law.guidance_scale
        used = model, *self._used(parts)
        with at_hand(*used), self.progress_bar(total=count * num_tokens - known) as bar:  # type: ignore[call-arg]
            progress = DecodeProgress(bar, num_tokens, listen, unit=self.unit, known=known)
            result = self.sampler(
                model,
                condition,
                law=law,
                generator=args["generator"],
                batch_size=count,
                callback=progress,
                **parts,
            )
            progress.finish()
        self.last_trace = result.trace
        size = model.grid.height, model.grid.width
        made = self.decode_tokens(result.tokens, args["output_type"], size)
        return made, result.tokens, result.trace, *self._more_output()

    def _partial(self, result: Any, asked: Asked, output_type: str) -> Any:
        from visual_spec.pipelines.streaming import with_grey

        is_open, known = result.trace.commit_call < 0, _committed(result)
        size = asked.model.grid.height, asked.model.grid.width
        if output_type == "latent":
            made = self.decode_tokens(known, "latent", size)
        else:
            pixels = with_grey(self.decode_tokens(known, "pt", size), is_open, self.decoder.patch)
            made = shown(2 * pixels - 1, self.image_processor, output_type)
        return self._output(made, result.tokens, result.trace, *self._more_output())

    def _used(self, parts: Mapping[str, Any]) -> tuple[Any, ...]:
        """The models beside the transformer that decoding needs on the device throughout."""
        return (parts.get("drafter"),)

    def _more_output(self) -> tuple[Any, ...]:
        """What the output holds after the trace."""
        return ()


def _committed(result: Any) -> torch.Tensor:
    """The tokens of a decode so far, 0 at those that are open."""
    is_open = (result.trace.commit_call < 0).to(result.tokens.device)
    return result.tokens.masked_fill(is_open[(...,) + (None,) * (result.tokens.dim() - 2)], 0)
