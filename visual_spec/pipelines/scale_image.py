"""Class to image scale by scale (VAR, FlexVAR): label -> token maps, coarse to fine -> picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch

from visual_spec.models.core.checkpoints import Checkpoint, Source, read_checkpoint
from visual_spec.models.core.fingerprint import written
from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.settings import Within, whole
from visual_spec.models.next_scale.flexvar import is_flexvar, load_flexvae, load_flexvar
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.models.next_scale.scale_cache import CompressedVAR, calibrate
from visual_spec.models.next_scale.scale_tokenizer import MultiscaleTokenizer
from visual_spec.models.next_scale.var import VARTransformer, load_var_checkpoint
from visual_spec.models.next_scale.var_vq import load_var_vq_checkpoint
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.labels import DrawsClasses, Labels, one_of
from visual_spec.pipelines.next_scale import Budget, NextScalePipeline, read_budget
from visual_spec.pipelines.output import ImagePipelineOutput
from visual_spec.pipelines.sampler_text import write_sampler
from visual_spec.pipelines.steps import Generators, StepCallback, StepListener
from visual_spec.records import PipelineFacts
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import check_generators
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import (
    CODE_LAW,
    CODE_WARM_SCALES,
    CODE_WARM_TEMPERATURE,
    FLEXVAR_LAW,
    VAR_LAW,
    Stage,
    at_scales,
    code_stages,
)

if TYPE_CHECKING:
    from visual_spec.models.core.protocol import ScaleModel

_CALIBRATION_CLASSES = 10  # as many prompts as ScaleKV takes
# Budgets of a model, by share, number of drafters, law, and temperature and number of the warm scales; beside the state
# of the weights that they were measured with.
_BUDGETS: WeakKeyDictionary[VARTransformer, tuple[object, dict[tuple[object, ...], ScaleBudget]]] = (
    WeakKeyDictionary()
)


class ScaleImagePipeline(DrawsClasses, NextScalePipeline):
    """Draws pictures of classes by next-scale prediction: with one model, or with two (CoDe).

    Args:
        transformer: draws all scales, or with a refiner the first ones.
        vq_model: turns token maps into pictures.
        sampler: how scales are decoded; swap it freely (`pipe.sampler = ...`).
        id2label: the name of every class, in order, several names of one class separated by commas; with it, labels
            may be given by name.
        default_guidance_scale, default_top_k, default_top_p: of calls that name none; saved with the pipeline.
            The official `cfg=1.5` is a guidance scale of 2.5.
        refiner: a smaller model over the same tokens, which draws the last scales; set it freely.
        num_draft_scales: sets this setting of the sampler; earlier versions saved it here.
        budget, refiner_budget: what the models' caches may keep (ScaleKV), or what `ScaleBudget.to_dict` made of it;
            None: everything. `compress` sets them later.
        refiner_guidance_scale: guidance of the scales that the refiner draws, whatever the others have; 1 for one
            that learned guided laws, and draws in half the rows; None: as the others.
        refiner_first_scale: the first scale that the refiner learned to draw; None: it knows all.
        warm_temperature, num_warm_scales: the log-probabilities of the first scales are divided by this temperature,
            after top-k and top-p, whoever draws them. The published figures of CoDe have 1.1 on seven scales.

    Raises:
        ValueError: models and tokenizer that do not fit, budgets for other models, a number of names other than that
            of classes, a number of drafted scales that leaves the transformer without work, or a warm temperature or
            number of warm scales out of its range.

    Example:
        >>> pipe = ScaleImagePipeline.from_official("var_d16.pth", "vae_ch160v4096z32.pth")
        >>> pipe([207, 360], generator=torch.Generator().manual_seed(0)).images[0].save("retriever.png")
    """

    # The tokenizer works after every scale, and the refiner takes over in the middle: both stay.
    model_cpu_offload_seq = "transformer"
    _exclude_from_cpu_offload = ["vq_model", "refiner"]
    _optional_components = ["refiner"]

    @registers
    def __init__(
        self,
        transformer: VARTransformer,
        vq_model: MultiscaleTokenizer,
        sampler: ScaleWiseSampler,
        id2label: list[str] | None = None,
        default_guidance_scale: float = VAR_LAW.guidance_scale,
        default_top_k: int = VAR_LAW.top_k,
        default_top_p: float = VAR_LAW.top_p,
        refiner: VARTransformer | None = None,
        num_draft_scales: int | None = None,
        budget: ScaleBudget | dict[str, Any] | None = None,
        refiner_budget: ScaleBudget | dict[str, Any] | None = None,
        refiner_guidance_scale: float | None = None,
        refiner_first_scale: int | None = None,
        warm_temperature: float = 1.0,
        num_warm_scales: int = CODE_WARM_SCALES,
    ):
        if not (math.isfinite(warm_temperature) and warm_temperature > 0):
            raise ValueError(f"warm_temperature={warm_temperature!r}; pass a finite number above 0.")
        whole("num_warm_scales", num_warm_scales, Within(0))
        if num_draft_scales is not None:
            self.sampler = type(sampler).from_config(sampler.config, num_draft_scales=num_draft_scales)
            self.register_to_config(num_draft_scales=None)
        self.refiner_law(self.make_law())  # refuses a guidance scale that is none

    def _check_parts(self) -> None:
        super()._check_parts()
        config = self.config
        if self.transformer is not None:  # else it reads labels, or decodes tokens
            last = len(self.transformer.scales) - 1
            if (first := config["refiner_first_scale"]) is not None:
                whole(
                    "refiner_first_scale", first, Within(1, last), ", the last scale, or None: it knows all"
                )
            if (split := self._setting("num_draft_scales")) is not None:
                self._check_split(split)
        self.compress(config["budget"], config["refiner_budget"])

    @classmethod
    def from_official(
        cls,
        transformer: Source,
        vq_model: Any,
        *,
        refiner: Source | None = None,
        num_draft_scales: int | None = None,
        dtype: torch.dtype | None = None,
        sampler: ScaleWiseSampler | None = None,
        id2label: list[str] | None = None,
    ) -> Self:
        """A pipeline around official files, with the sampling settings of the published results.

        With a refiner these are CoDe's, with a higher temperature in the first seven scales (`warm_temperature`).

        Args:
            transformer: e.g. `var_d16.pth`, or a file of FlexVAR or SAR.
            vq_model: path of `vae_ch160v4096z32.pth`, which serves all sizes of VAR; of `FlexVAE.pth` for the others.
            refiner: for CoDe, the file of a smaller model: `var_d16.pth` beside `var_d30.pth`, or one fine-tuned for
                it.
            num_draft_scales, id2label: see the class.
            dtype: of all weights; None keeps each file's own.
            sampler: default `ScaleWiseSampler()`.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is.
        """
        source = transformer if isinstance(transformer, Checkpoint) else read_checkpoint(transformer)
        load, load_tokenizer, law = load_var_checkpoint, load_var_vq_checkpoint, VAR_LAW
        if is_flexvar(source.weights):
            load, load_tokenizer, law = load_flexvar, load_flexvae, FLEXVAR_LAW
        model = load(source, dtype=dtype)
        small = None if refiner is None else load(refiner, dtype=dtype)
        tokenizer = load_tokenizer(vq_model, dtype=dtype, scales=model.scales)
        law = law if small is None else CODE_LAW
        return cls(
            model,
            tokenizer,
            sampler or ScaleWiseSampler(),
            id2label,
            default_guidance_scale=law.guidance_scale,
            default_top_k=law.top_k,
            default_top_p=law.top_p,
            refiner=small,
            num_draft_scales=num_draft_scales,
            warm_temperature=1.0 if small is None else CODE_WARM_TEMPERATURE,
        )

    # -- what it is made of ------------------------------------------------------------------------------------------

    @classmethod
    def facts_of(cls, settings: Mapping[str, object], sampler: Mapping[str, object]) -> PipelineFacts:
        budgets = (settings.get("budget"), settings.get("refiner_budget"), sampler.get("cache_share"))
        whole_cache = {} if budgets == (None, None, None) else {"cache_share": "off"}
        ramp = {} if sampler.get("ramp", True) else {"ramp": False}  # which belongs to the model
        plain = write_sampler("scale-wise", {"num_draft_scales": "all"} | whole_cache | ramp)
        stored = "canvas" if sampler.get("smooth") or sampler.get("scales") else "ids"
        return replace(super().facts_of(settings, sampler), plain_sampler=plain, stored_as=stored)

    @property
    def refiner_budget(self) -> ScaleBudget | None:
        """What the refiner's cache may keep; None: everything."""
        return read_budget(self.config["refiner_budget"])

    def compress(self, budget: Budget = None, refiner_budget: Budget = None) -> Self:
        """Decode with compressed caches from now on (ScaleKV), also when saved and loaded.

        Without arguments, with whole ones again. Returns the pipeline.

        Raises:
            ValueError: a budget for another model, or one for a refiner that there is not.
        """
        if refiner_budget is not None and self.refiner is None and self.transformer is not None:
            raise ValueError(
                "refiner_budget given, but this pipeline has no refiner; set pipe.refiner first."
            )
        self.register_to_config(
            budget=self._saved_budget(budget, self.transformer),
            refiner_budget=self._saved_budget(refiner_budget, self.refiner),
        )
        return self

    def calibrate(
        self,
        labels: Labels,
        share: float,
        *,
        num_drafters: int | None = None,
        decay: float = 0.1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        **settings: Any,
    ) -> tuple[ScaleBudget, ScaleBudget | None]:
        """Budgets of transformer and refiner for a share of the full cache, found by drawing a picture of each label.

        The first scales are drawn at their own temperature (`warm_temperature`), as in a call. Changes nothing:
        `pipe.compress(*pipe.calibrate(range(10), 0.1))`.

        Args:
            labels: as for `__call__`; about ten do.
            share, num_drafters, decay: see `visual_spec.models.next_scale.scale_cache.calibrate`.
            settings: guidance_scale, top_k, top_p, temperature, as for `__call__`.

        Raises:
            ValueError, TypeError: as `__call__`; a share that is too small.
        """
        law = self.make_law(**settings)
        condition = self.make_condition(labels)
        check_generators(generator, len(condition), "picture")
        laws = {self.transformer: law, self.refiner: self.refiner_law(law)}
        more: dict[str, Any] = {"num_drafters": num_drafters, "decay": decay}
        with at_hand(self.transformer, self.refiner, self.vq_model):
            budgets = [
                self._calibrated(model, self.sampler, laws[model], share, condition, generator, **more)
                for model in (self.transformer, self.refiner)
                if model is not None
            ]
        self.maybe_free_model_hooks()
        return budgets[0], budgets[1] if len(budgets) > 1 else None

    def _calibrated(
        self,
        model: VARTransformer,
        sampler: Callable[..., object],
        law: TokenLaw,
        share: float,
        condition: torch.Tensor,
        noise: Generators,
        **more: Any,
    ) -> ScaleBudget:
        """The budget of one model, which draws the first scales at their own temperature, as in a call."""

        def draw(observed: ScaleModel, *args: Any, **settings: Any) -> object:
            return sampler(self._warmed([Stage(observed, range(len(model.scales)))]), *args, **settings)

        more |= dict(sampler=draw, law=law, share=share, batch_size=len(condition), generator=noise)
        return calibrate(model, at_scales(self.vq_model, model.scales), condition, **more)

    def refiner_law(self, law: TokenLaw) -> TokenLaw:
        """The law of the refiner in a call with this law.

        Raises:
            ValueError: a `refiner_guidance_scale` out of its range.
        """
        own = self._setting("refiner_guidance_scale")
        own = self.config["refiner_guidance_scale"] if own is None else own
        return law if own is None else replace(law, guidance_scale=own)

    def check_sampler(self) -> None:
        """Refuse also a division of scales, or a share of the cache, that does not fit the models.

        Raises:
            TypeError, ValueError: as `VisualPipeline.check_sampler` and `stages`.
        """
        super().check_sampler()
        if self.transformer is not None:
            self.stages()

    def _check_models(self) -> None:
        tokenizer = self.vq_model
        wanted = (tuple(tokenizer.scales), tokenizer.codebook_size, tokenizer.code_dim)
        for name in ("transformer", "refiner"):
            model = getattr(self, name)
            if model is None:
                continue
            drawn = (tuple(model.scales), model.vocab_size, model.code_dim)
            if drawn != wanted:
                raise ValueError(
                    f"the {name} predicts scales {drawn[0]} of {drawn[1]} codes with {drawn[2]} channels, but the "
                    f"tokenizer decodes scales {wanted[0]} of {wanted[1]} codes with {wanted[2]} channels; load both "
                    "from the same model."
                )
            if model.config["num_classes"] != self.num_classes:
                raise ValueError(
                    f"the refiner knows {model.config['num_classes']} classes and the transformer {self.num_classes}; "
                    "pass models of the same classes."
                )

    def _check_split(self, num_draft_scales: Any) -> int:
        """How many scales are drawn before the refiner takes over, checked."""
        count = len(self._at_scales(self.transformer).scales)
        split = count if num_draft_scales == "all" else num_draft_scales
        whole("num_draft_scales", split, Within(0, count), f", where {count} is the transformer alone")
        if self.refiner is None and split < count:
            raise ValueError(
                f"num_draft_scales={split}, but this pipeline has no refiner to draw the other scales; set "
                "pipe.refiner, or leave num_draft_scales out."
            )
        first = self.config["refiner_first_scale"]
        if first is not None and split < first:
            raise ValueError(
                f"num_draft_scales={split}, but this refiner learned the scales from {first} on; pass an integer from "
                f"{first} to {count}, or set another refiner and pipe.register_to_config(refiner_first_scale=None)."
            )
        return split

    def stages(
        self, num_draft_scales: int | str | None = None, *, law: TokenLaw | None = None
    ) -> list[Stage]:
        """Who draws which scales, with which cache, by the settings of the sampler. See `__call__`.

        With a sampler that measures, a compressed transformer is compared with itself uncompressed.

        Args:
            num_draft_scales: in place of the sampler's.
            law: of the call; None: of the pipeline's defaults.

        Raises:
            ValueError: scales to refine and no refiner, a number out of range, or a share of the cache that is too
                small.
        """
        transformer, refiner = self._at_scales(self.transformer), self._at_scales(self.refiner)
        count, law = len(transformer.scales), law or self.make_law()
        split = self._setting("num_draft_scales") if num_draft_scales is None else num_draft_scales
        if split is None:
            known = self.config["refiner_first_scale"] or 1
            split = count if self.refiner is None else max(known, count - 2)
        split = self._check_split(split)
        first = transformer
        budget = self.budget
        refines = split == 0
        if refines:
            first, budget, split = refiner, self.refiner_budget, count
        large = self._cached(first, budget, self.make_law())
        if split == count:
            stages = [Stage(large, range(count), refines=refines)]
        else:
            own = self.refiner_law(law)
            small = self._cached(refiner, self.refiner_budget, self.refiner_law(self.make_law()))
            stages = code_stages(large, small, split, small_law=None if own == law else own)
        if large is not first and self.sampler.config["measure"] and count > 1:
            # Against the model with its whole cache, which draws scale 0 alike: nothing is read there.
            rest = [] if split == 1 else [Stage(large, range(1, split))]
            stages = [Stage(first, range(1)), *rest, *stages[1:]]
        return self._warmed(stages)

    def _cached(
        self, model: VARTransformer, budget: ScaleBudget | None, law: TokenLaw
    ) -> VARTransformer | CompressedVAR:
        """The model with the cache that the sampler leaves it, or `budget` where it does not say.

        Args:
            law: what the model draws from while its budget is calibrated.
        """
        share, count = self._setting("cache_share"), self._setting("num_drafters")
        if share == "off":
            return model
        if share is not None and (count == 0 or model.device.type == "meta"):
            budget = ScaleBudget.from_share(model.scales, model.config["num_layers"], share)
        elif share is not None:
            classes = min(_CALIBRATION_CLASSES, self.num_classes)
            labels = self.make_condition([index * self.num_classes // classes for index in range(classes)])
            now, (weights, budgets) = written(model), _BUDGETS.get(model, (None, {}))
            if weights != now:
                _BUDGETS[model] = now, (budgets := {})
            key = share, count, law, self.config["warm_temperature"], self.config["num_warm_scales"]
            if key not in budgets:
                noise = [torch.Generator().manual_seed(index) for index in range(classes)]
                budgets[key] = self._calibrated(
                    model, ScaleWiseSampler(), law, share, labels, noise, num_drafters=count
                )
            budget = budgets[key]
        return model if budget is None else CompressedVAR(model, budget)

    def _warmed(self, stages: list[Stage]) -> list[Stage]:
        """The same schedule, with the first scales at their own temperature."""
        temperature, count = self.config["warm_temperature"], self.config["num_warm_scales"]
        if temperature == 1:
            return stages
        warmed = []
        for stage in stages:
            first, stop = stage.scales.start, stage.scales.stop
            end = min(max(first, count), stop)  # of its warm scales
            if first < end:
                warmed.append(replace(stage, scales=range(first, end), late_temperature=temperature))
            if end < stop:
                warmed.append(replace(stage, scales=range(end, stop)))
        return warmed

    # -- drawing -----------------------------------------------------------------------------------------------------

    def _check_size(self, height: int | None, width: int | None) -> None:
        own = self.image_size
        if height not in (None, own[0]) or width not in (None, own[1]):
            raise ValueError(
                f"height={height}, width={width}, but this model draws {own[0]} x {own[1]} pixels; leave height and "
                "width out."
            )

    @torch.no_grad()
    def __call__(
        self,
        labels: Labels | None = None,
        *,
        class_labels: Labels | None = None,
        height: int | None = None,
        width: int | None = None,
        num_draft_scales: int | str | None = None,
        num_images_per_label: int | None = None,
        num_images_per_prompt: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        output_logprobs: bool = False,
    ) -> ImagePipelineOutput:
        """Draw. All but these is as for `ClassImagePipeline.__call__`.

        Args:
            guidance_scale, temperature, top_k, top_p: see `TokenLaw`. With the sampler's ramp, guidance grows from
                none at the first scale to this scale at the last.
            num_draft_scales: in place of the sampler's, see `ScaleWiseSampler`.
            output_type: as usual, or "latent": the canvas [B, D, h, w].
            callback_on_step_end: called after each scale as (pipeline, scale, tokens committed a picture, tensors).
                `pipeline.decode_canvas(tensors["canvas"])` is the picture so far. If it returns a dictionary with a
                canvas, the later scales go on from that one. After `pipe._interrupt = True` the call ends, and returns
                the pictures and the tokens of the scales so far.
            callback_on_step_end_tensor_inputs: tensors that it gets: "canvas" (default), and "tokens" [B, L] of the
                scales so far, of which `pipe.decode_tokens` makes pictures.
            output_logprobs: keep the log-probability of each token, [B, L] (`ScaleTrace`).

        Returns:
            Pictures; tokens [B, L], all maps that are drawn, coarse to fine, each in raster order; and the trace, a
            `ScaleTrace`.
        """
        law = self.make_law(guidance_scale, temperature, top_k, top_p)
        ids = self.label_ids(one_of(labels=labels, class_labels=class_labels))
        each = one_of(
            1, num_images_per_label=num_images_per_label, num_images_per_prompt=num_images_per_prompt
        )
        listener = StepListener(self, callback_on_step_end, callback_on_step_end_tensor_inputs, ("canvas",))
        self.check_inputs(ids, each, law, generator, output_type)
        if height is not None or width is not None:
            self._check_size(height, width)
        self.check_logprobs(output_logprobs)
        stages = self.stages(num_draft_scales, law=law)
        with self.running():
            condition = torch.tensor(ids, device=self._execution_device).repeat_interleave(each)
            result = self.draw_scales(
                stages, condition, len(condition), [law], generator, listener, output_logprobs
            )
            images = self.decode_canvas(result.canvas, output_type)
        made: Any = (images, result.tokens, result.trace)
        return ImagePipelineOutput(*made) if return_dict else made
