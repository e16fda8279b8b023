"""The body of pipelines that draw pictures scale by scale: checks, compressed caches, decoding, canvas to pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch

from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.protocol import area_of
from visual_spec.models.next_scale.scale_budget import ScaleBudget, check_budget
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.decoders import ScaleDecoder
from visual_spec.pipelines.output import ImagePipelineOutput, ShownPictures
from visual_spec.pipelines.steps import Generators, Laws, StepListener
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import SO_FAR
from visual_spec.samplers.scales.stages import Stage, at_scales, drawn_stages

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

    from visual_spec.samplers.scales.trace import ScaleResult

Budget = ScaleBudget | Mapping[str, Any] | None


class NextScalePipeline(VisualPipeline):
    """A model over the token maps of all scales, the tokenizer that turns them into pictures, and a sampler."""

    _callback_tensor_inputs = ["canvas", "tokens"]
    _token = "tokens"  # what the progress bar counts
    _needed = ("transformer", "vq_model", "sampler")

    transformer: Any
    vq_model: Any
    refiner: Any = None

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the pictures in pixels."""
        size = self._at_scales(self.vq_model).image_size
        return (size, size) if isinstance(size, int) else size

    def _at_scales(self, part: Any) -> Any:
        """A model or the tokenizer, with the scales that the sampler asks for."""
        return at_scales(part, self._setting("scales"))

    # -- compressed caches ---------------------------------------------------------------------------------------------

    @property
    def budget(self) -> ScaleBudget | None:
        """What the transformer's cache may keep; None: everything."""
        return read_budget(self.config["budget"])

    @staticmethod
    def _saved_budget(budget: Budget, model: ModelMixin | None) -> dict[str, Any] | None:
        """What is saved of a budget; refuses one for another model than this one."""
        read = read_budget(budget)
        if read is not None and model is not None:
            check_budget(read, model.scales, model.config["num_layers"])
        return None if read is None else read.to_dict()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _check_parts(self) -> None:
        self.image_processor = ShownPictures()
        if self.transformer is not None and self.vq_model is not None:
            self._check_models()

    def _check_models(self) -> None:
        """Refuse models and a tokenizer that differ in their scales or codes."""
        raise NotImplementedError

    def check_inputs(
        self, source: Sized, each: int, law: Laws, generator: Generators, output_type: str
    ) -> None:
        super().check_inputs(source, each, law, generator, output_type)
        self._check_models()

    def draw_scales(
        self,
        stages: list[Stage],
        condition: object,
        count: int,
        laws: Sequence[TokenLaw],
        generator: Generators,
        listener: StepListener,
        output_logprobs: bool = False,
    ) -> ScaleResult:
        """Let the sampler draw scale after scale, beside a progress bar. Returns its result: canvas, tokens and trace.

        Args:
            stages: who draws which scales.
            condition: of `count` rows.
            laws: one for all scales, or one for each.
            listener: what tells the callback about scales.
            output_logprobs: as of the sampler.
        """
        tokenizer = self._at_scales(self.vq_model)
        drawn = tokenizer.scales[: drawn_stages(self.sampler, stages)[-1].scales.stop]
        sizes = [area_of(side) * getattr(tokenizer, "tokens_per_place", 1) for side in drawn]
        scales = [law.guidance_scale for law in laws]
        self._guidance_scale = scales[0] if len(set(scales)) == 1 else scales
        self._num_timesteps = len(sizes)
        models, total = (self.transformer, self.refiner, self.vq_model), count * sum(sizes)
        with at_hand(*models), self.progress_bar(total=total) as bar:  # type: ignore[call-arg]
            bar.unit = f" {self._token}"

            def after_scale(scale: int, canvas: torch.Tensor) -> str | torch.Tensor | None:
                bar.set_postfix_str(f"{scale + 1} of {len(sizes)} scales", refresh=False)
                bar.update(count * sizes[scale])
                tokens = {"tokens": SO_FAR.get()().tokens} if "tokens" in listener.names else {}
                return listener(scale, lambda: sum(sizes[: scale + 1]), canvas=canvas, **tokens)

            result = self.sampler(
                stages,
                condition,
                tokenizer=tokenizer,
                law=laws[0],
                generator=generator,
                batch_size=count,
                callback=after_scale,
                **({"output_logprobs": True} if output_logprobs else {}),
            )
        self.last_trace = result.trace
        return result

    def _partial(self, result: ScaleResult, output_type: str) -> ImagePipelineOutput:
        # No place is open: every scale covers the picture.
        images = self.decode_canvas(result.canvas, output_type)
        return ImagePipelineOutput(images, result.tokens, result.trace)

    @torch.no_grad()
    def decode_tokens(self, tokens: torch.Tensor, output_type: str = "pil") -> Any:
        """Pictures of tokens [B, L], of all scales or the first ones, in the form `output_type` asks for.

        They equal the drawn pictures, unless the sampler was smooth, or a callback changed the canvas.
        """
        decoder = ScaleDecoder(self._at_scales(self.vq_model), self.transformer)
        return self.decode_canvas(decoder.canvas(tokens), output_type)

    def decode_canvas(self, canvas: torch.Tensor, output_type: str = "pil") -> Any:
        """Pictures of a canvas [B, D, h, w], finished or as a callback sees it, in the form `output_type` asks for."""
        if output_type == "latent":
            return canvas
        pictures = self._at_scales(self.vq_model).decode_canvas(canvas)
        return self.image_processor.postprocess(pictures, output_type=output_type)


def read_budget(budget: Budget) -> ScaleBudget | None:
    """A budget as it is, or as `ScaleBudget.to_dict` wrote it."""
    return budget if budget is None or isinstance(budget, ScaleBudget) else ScaleBudget.from_dict(budget)
