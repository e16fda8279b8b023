"""A setting: what one line of a benchmark or of an evaluation measures, and how it is written on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from visual_spec.models.core.settings import LAW_SETTINGS, SEED, whole
from visual_spec.pipelines.loading import load_drafter, refined
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import DIVISION

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline
    from visual_spec.samplers.core.base import Sampler

BY_BATCH = "by batch"  # the window of a sampler without one of its own, which narrows in batches


@dataclass(frozen=True)
class Setting:
    """One way to decode that is measured.

    Attributes:
        text: the setting as it was written.
        sampler: what decodes.
        law: what it draws from.
        seed: of sample 0; sample i has seed + i.
        drafter: name or folder; None for the pipeline's own.
        refiner: of a `ScaleImagePipeline`: name or folder; None for the pipeline's own.
    """

    text: str
    sampler: Sampler
    law: TokenLaw
    seed: int
    drafter: str | None = None
    refiner: str | None = None

    @property
    def window(self) -> int | str | None:
        """The window of the sampler, `BY_BATCH` where the batch decides; None for one that has none."""
        window = self.sampler.config.get("window")
        return BY_BATCH if window is None and "window" in self.sampler.config else window

    @property
    def name(self) -> str:
        """The setting as it was written, without its window, which tables show in a column of its own."""
        name = parse_sampler(self.text)[0]
        parts = [part for part in self.text.strip()[len(name) + 1 :].split(",") if part]
        kept = [part for part in parts if part.partition("=")[0].strip() != "window"]
        return ":".join([name, ",".join(kept)] if kept else [name])

    @property
    def pipeline_law(self) -> dict[str, Any]:
        """The law as the arguments of a pipeline call."""
        return {name: getattr(self.law, name) for name in LAW_SETTINGS}

    def describe(self) -> dict[str, Any]:
        """All that fixes the samples, but for the model and the prompts; JSON types only."""
        facts = {"sampler": sampler_settings(self.sampler), "law": self.pipeline_law, "seed": self.seed}
        if self.drafter is not None:
            facts["drafter"] = self.drafter
        if self.refiner is not None:
            facts["refiner"] = self.refiner
        return facts

    def same_models(self, other: Setting) -> bool:
        """Whether the same models draw the same scales, with the same caches."""
        return self.refiner == other.refiner and all(
            self.sampler.config.get(name) == other.sampler.config.get(name) for name in DIVISION
        )

    @contextmanager
    def on(self, pipe: Pipeline) -> Iterator[None]:
        """Within, `pipe` has this sampler, drafter and refiner; afterwards its own again.

        Raises:
            TypeError, ValueError: a sampler, drafter or refiner that does not fit it.
        """
        before = pipe.sampler, pipe.drafter
        pipe.sampler = self.sampler
        if self.drafter is not None:
            pipe.drafter = _drafter(self.drafter, pipe.device, pipe.transformer.dtype)
        try:
            with refined(pipe, self.refiner):
                pipe.check_sampler()
                yield
        finally:
            pipe.sampler, pipe.drafter = before


@lru_cache(maxsize=8)
def _drafter(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return load_drafter(name).to(device, dtype)


def parse_setting(text: str, law: TokenLaw, seed: int) -> Setting:
    """Read `name` or `name:setting=value,...`, such as `speculative-jacobi:window=32,acceptance=identical`.

    A setting belongs to the sampler; or it is guidance_scale, guidance_until, temperature, top_k, top_p or seed, which
    replaces the value in `law` or `seed`; or drafter, a name or folder that `load_drafter` takes (default: the
    pipeline's own), and so refiner. `parse_sampler` says how values are written.

    Raises:
        ValueError: text of another form, a setting twice, an unknown sampler or setting, or a value it refuses.
    """
    name, settings = parse_sampler(text)
    # `masked` has a temperature of its own, which is a word: falling. The law's is a number.
    own = [key for key, value in settings.items() if name == "masked" and isinstance(value, str)]
    changes = {key: settings.pop(key) for key in LAW_SETTINGS if key in settings and key not in own}
    drafter, refiner = (settings.pop(part, None) for part in ("drafter", "refiner"))
    own_seed = whole("seed", settings.pop("seed", seed), SEED, f" in sampler {text!r}")
    sampler = make_sampler(name, **settings)
    own_law = TokenLaw(**{**asdict(law), **changes})
    if isinstance(sampler, ScaleWiseSampler) and own_law.guidance_until is not None:
        raise ValueError(
            f"guidance_until in sampler {text!r}; it counts tokens, and guidance of a next-scale model grows from "
            "scale to scale. Leave it out."
        )
    return Setting(text.strip(), sampler, own_law, own_seed, drafter, refiner)


def check_samplers(pipe: Pipeline, settings: Sequence[Setting]) -> None:
    """Refuse, by ValueError, a sampler that the pipeline cannot run, before any of them is run."""
    for setting in settings:
        try:
            with setting.on(pipe):
                pass
        except TypeError as error:
            raise ValueError(f"{setting.text}: {error}") from error


def sampler_settings(sampler: Sampler) -> dict[str, Any]:
    """A sampler's class and its settings, those left at their defaults too."""
    config = {name: value for name, value in dict(sampler.config).items() if not name.startswith("_")}
    return {"class": type(sampler).__name__, **config}
