"""The body of pipelines that draw pictures or clips of a grid of tokens: checks, decoding, tokens to pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange

from visual_spec.models.core.offload import at_hand
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.inputs import Asked
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.shown import ShownPictures
from visual_spec.pipelines.steps import DecodeProgress, planned_steps


class TokenImagePipeline(VisualPipeline):
    """A model over image tokens, the tokenizer that turns them into pictures, and a sampler.

    Subclasses register `transformer`, `vq_model` and `sampler`, and draw from texts (`ReadsText`), classes
    (`DrawsClasses`) or nothing.
    """

    _callback_tensor_inputs = ["lengths"]

    _tokenizer_part = "vq_model"  # the component that turns tokens into pictures
    _output: Any = ImagePipelineOutput

    transformer: Any
    vq_model: Any
    drafter: Any

    def _finish_init(self) -> None:
        """To be called when the components are registered: checks that they fit each other."""
        self.image_processor = ShownPictures()
        if self.transformer is None or getattr(self, self._tokenizer_part) is None:
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

    def _decoded(self) -> tuple[Any, dict[str, Any]] | None:
        if self.transformer is None or getattr(self, self._tokenizer_part) is None:
            return None
        return self.transformer, self.sampler_parts()

    def _sized(self, args: Mapping[str, Any]) -> Any:
        """The transformer over the pictures or clips that a call asks for."""
        return self.sized(args["height"], args["width"])

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

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _asked(self, args: Mapping[str, Any]) -> Asked:
        """What a call draws from, its law, and how many samples it makes."""
        raise NotImplementedError

    def _condition(self, args: Mapping[str, Any], asked: Asked) -> Any:
        """What the model draws from, a row for each sample."""
        raise NotImplementedError

    def _checked(self, args: Mapping[str, Any]) -> Asked:
        asked = self._asked(args)
        self._check_call(args, asked, "transformer", self._tokenizer_part, "sampler")
        asked.model = self._sized(args)
        image, mask, strength = (args.get(name) for name in ("image", "mask", "strength"))
        if any(part is not None for part in (image, mask, strength)):
            from visual_spec.pipelines.repaint import check_repainting  # most calls draw whole pictures

            check_repainting(self, image, mask, strength, asked.count)
        return asked

    def _run(self, args: Mapping[str, Any]) -> Any:
        """Draw: check, decode with a progress bar, turn tokens into pixels.

        Args:
            args: of `__call__`, by name.
        """
        asked = self._checked(args)
        condition = self._condition(args, asked)
        model, law, count = asked.model, asked.law, asked.count * asked.each
        parts = self.sampler_parts()
        if args.get("image") is not None:
            from visual_spec.pipelines.repaint import known_tokens

            picture = [args[name] for name in ("image", "mask", "strength", "generator")]
            parts["given"] = known_tokens(self, *picture, count=asked.count, each=asked.each)
        heard = self._listener(args, asked)

        def listen(step: int, lengths: torch.Tensor) -> Any:
            return heard(step, lambda: int(lengths.min()), lengths=lengths)

        num_tokens = model.grid.num_tokens
        self._num_timesteps = planned_steps(self.sampler, model, parts, num_tokens)
        known = int((parts["given"] != model.mask_id).sum()) if "given" in parts else 0
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
        made = self.decode_tokens(result.tokens, args["output_type"], **self._size_of(model))
        self.maybe_free_model_hooks()
        output = made, result.tokens, result.trace, *self._more_output()
        return self._output(*output) if args["return_dict"] else output

    def _size_of(self, model: Any) -> dict[str, Any]:
        """What `decode_tokens` takes for the pictures of this model, where they are not of the transformer's size."""
        size, own = ((grid.height, grid.width) for grid in (model.grid, self.transformer.grid))
        return {} if size == own else {"size": size}

    def _partial(self, result: Any, args: Mapping[str, Any]) -> Any:
        from visual_spec.pipelines.streaming import shown, with_grey

        is_open = (result.trace.commit_call < 0).to(result.tokens.device)
        known = result.tokens.masked_fill(is_open[(...,) + (None,) * (result.tokens.dim() - 2)], 0)
        size, output_type = self._size_of(self._sized(args)), args["output_type"]
        if output_type == "latent":
            made = self.decode_tokens(known, "latent", **size)
        else:
            pixels = with_grey(self.decode_tokens(known, "pt", **size), is_open, self._patch)
            made = shown(pixels, self.image_processor, output_type)
        return self._output(made, result.tokens, result.trace, *self._more_output())

    def _used(self, parts: Mapping[str, Any]) -> tuple[Any, ...]:
        """The models beside the transformer that decoding needs on the device throughout."""
        return (parts.get("drafter"),)

    def _more_output(self) -> tuple[Any, ...]:
        """What the output holds after the trace."""
        return ()
