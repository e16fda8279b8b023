"""Ways to draw with a `ScaleImagePipeline`: who draws which scales, and what the caches may keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Self
from weakref import WeakKeyDictionary

import torch

from visual_spec.models.core.settings import OneOf, Within, read_fields
from visual_spec.pipelines.sampler_text import check_settings, make_sampler

# What draws is imported where a plan is carried out: plans are read beside any model.
if TYPE_CHECKING:
    from visual_spec.models.next_scale.scale_budget import ScaleBudget

# Settings of a pipeline that say who draws which scales, and with what cache.
SCHEDULE = ("num_draft_scales", "budget", "refiner_budget", "refiner_guidance_scale", "refiner_first_scale")
_CALIBRATION_CLASSES = 10  # as many prompts as ScaleKV takes
# Budgets found for a model, by share, number of drafters, law, and temperature and number of the warm scales.
_BUDGETS: WeakKeyDictionary[Any, dict[tuple[Any, ...], ScaleBudget]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ScalePlan:
    """What a row of an evaluation, or a word of the command line, changes of a pipeline; None: nothing.

    Args:
        num_draft_scales: scales that the transformer draws before the refiner takes over (CoDe); "all": the transformer
            alone; 0: the refiner alone.
        cache_share: part of the full cache that each model may keep (ScaleKV), with budgets that are calibrated on ten
            classes of the model and the law of the pipeline's defaults; "off": uncompressed.
        num_drafters: of these budgets, see `visual_spec.models.next_scale.scale_cache.calibrate`; 0 has the layers
            share alike.
        refiner: another one: the name or folder that `load_refiner` takes. It draws any scale, with the guidance of the
            others.
        refiner_guidance_scale: see `ScaleImagePipeline`.

    Raises:
        ValueError: a value of another kind, or out of range.
    """

    num_draft_scales: Annotated[int | str | None, Within(0), OneOf(("all",))] = None
    cache_share: Annotated[float | str | None, Within(above=0, most=1), OneOf(("off",))] = None
    refiner: str | None = None
    refiner_guidance_scale: float | None = None
    num_drafters: int | None = None

    def __post_init__(self) -> None:
        read_fields(self)
        if self.num_drafters is not None and self.cache_share in (None, "off"):
            raise ValueError(
                f"num_drafters={self.num_drafters} without a cache_share; pass the part of the cache that is kept, too."
            )

    @classmethod
    def names(cls) -> list[str]:
        """What can be set."""
        return [field.name for field in fields(cls)]

    @classmethod
    def take(cls, settings: dict[str, Any]) -> Self:
        """The plan in the settings of a row, which are taken out of it.

        Raises:
            ValueError: as the class.
        """
        return cls(**{name: settings.pop(name) for name in cls.names() if name in settings})

    @classmethod
    def plain(cls, index: Mapping[str, Any]) -> Self:
        """The plan that others are compared with: one model, its cache whole.

        Args:
            index: the saved configuration of the pipeline.
        """
        compressed = any(index.get(name) is not None for name in ("budget", "refiner_budget"))
        return cls(num_draft_scales="all", cache_share="off" if compressed else None)

    def describe(self) -> dict[str, Any]:
        """What is set; JSON types only."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def same_model(self) -> bool:
        """Whether the transformer draws at all."""
        return self.num_draft_scales != 0

    @contextmanager
    def on(self, pipe: Any, *, calibrated: bool = True) -> Iterator[None]:
        """Within, the pipeline draws by this plan; afterwards as before.

        Args:
            calibrated: False has the layers share alike, for models without trained weights.

        Raises:
            ValueError: a pipeline of another kind, a plan that asks for a refiner where there is none, more scales than
                there are, or a share too small for the model.
        """
        if not set(SCHEDULE) <= set(pipe.config):  # no `ScaleImagePipeline`
            if self.describe():
                raise ValueError(
                    f"{', '.join(self.describe())} given, which a {type(pipe).__name__} does not have; pass the "
                    "model of a ScaleImagePipeline, such as shapes_var."
                )
            yield
            return
        saved = {name: pipe.config[name] for name in SCHEDULE}
        networks = pipe.transformer, pipe.refiner
        try:
            self._change(pipe, calibrated)
            yield
        finally:
            pipe.transformer, pipe.refiner = networks
            pipe.register_to_config(**saved)

    def _change(self, pipe: Any, calibrated: bool) -> None:
        if self.refiner is not None:
            pipe.refiner = _refiner(self.refiner, pipe.device, pipe.transformer.dtype)
            pipe.register_to_config(
                refiner_budget=None, refiner_guidance_scale=None, refiner_first_scale=None
            )
        if self.refiner_guidance_scale is not None:
            pipe.register_to_config(refiner_guidance_scale=self.refiner_guidance_scale)
        drafted = self.num_draft_scales
        if drafted == 0:
            if pipe.refiner is None:
                raise ValueError(
                    "num_draft_scales=0, but this pipeline has no refiner to draw the scales; name one, such as "
                    "refiner=FOLDER."
                )
            if first := pipe.config["refiner_first_scale"]:
                raise ValueError(
                    f"num_draft_scales=0, but this refiner learned the scales from {first} on, and cannot draw alone; "
                    "name another one, such as refiner=FOLDER."
                )
            pipe.transformer, pipe.refiner = pipe.refiner, None
            pipe.register_to_config(budget=pipe.config["refiner_budget"], refiner_budget=None)
            drafted = "all"
        if drafted is not None:
            count = len(pipe.transformer.scales) if drafted == "all" else drafted
            pipe.register_to_config(num_draft_scales=count)
        pipe.stages()  # refuses a number of scales that it cannot share out
        if self.cache_share == "off":
            pipe.compress()
        elif self.cache_share is not None:
            models = [model for model in (pipe.transformer, pipe.refiner) if model is not None]
            share, count = float(self.cache_share), self.num_drafters
            pipe.compress(*[_budget(pipe, model, share, count, calibrated) for model in models])


def _budget(pipe: Any, model: Any, share: float, num_drafters: int | None, calibrated: bool) -> ScaleBudget:
    from visual_spec.models.next_scale.scale_budget import ScaleBudget

    if not calibrated:
        return ScaleBudget.from_share(model.scales, model.config["num_layers"], share)
    from visual_spec.models.next_scale.scale_cache import calibrate
    from visual_spec.samplers.scales.scales import ScaleWiseSampler

    law = pipe.make_law() if model is pipe.transformer else pipe.refiner_law(pipe.make_law())
    budgets = _BUDGETS.setdefault(model, {})
    key = share, num_drafters, law, pipe.config["warm_temperature"], pipe.config["num_warm_scales"]
    if key not in budgets:
        classes = min(_CALIBRATION_CLASSES, pipe.num_classes)
        labels = [index * pipe.num_classes // classes for index in range(classes)]
        budgets[key] = calibrate(
            model,
            pipe.vq_model,
            pipe.make_condition(labels),
            sampler=pipe.warmed(ScaleWiseSampler()),
            law=law,
            share=share,
            batch_size=classes,
            generator=[torch.Generator().manual_seed(index) for index in range(classes)],
            num_drafters=num_drafters,
        )
    return budgets[key]


@lru_cache(maxsize=8)
def _refiner(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    from visual_spec.pipelines.loading import load_refiner

    return load_refiner(name).to(device, dtype)


def make_row(name: str, **settings: Any) -> tuple[Any, ScalePlan]:
    """The sampler of a name, and what else its text may say: for `scale-wise`, who draws which scales (`ScalePlan`).

    Raises:
        ValueError: as `make_sampler` and `ScalePlan`.
    """
    plans = ScalePlan.names() if name == "scale-wise" else []
    check_settings(name, settings, also=plans)
    plan = ScalePlan.take(settings) if plans else ScalePlan()
    return make_sampler(name, **settings), plan
