"""A model that decodes in order and a masked one over the same tokens, side by side in one table."""

from __future__ import annotations

from typing import Any

from visual_spec.eval.media import MEDIA
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.placing import load
from visual_spec.samplers import registry
from visual_spec.samplers.registry import MASKED


class MaskedPair:
    """A model that decodes in order, and a masked one, as a single pipeline: samplers of masked models use the latter.

    So both can stand in one table, on the same prompts and in the same rounds.

    Args:
        first, masked: two `AudioPipeline`s, or an `ImagePipeline` and a `MaskedImagePipeline`.

    Raises:
        ValueError: pipelines of the same kind or of two media, with different tokenizers or codecs, or for clips of
            different length.
    """

    def __init__(self, first: VisualPipeline, masked: VisualPipeline) -> None:
        if MASKED in first.calls or MASKED not in masked.calls or first.unit != masked.unit:
            raise ValueError(
                "a pair is a model that decodes in order and a masked one of the same medium, in this order; pass "
                "--model tunes --masked tunes_masked, or --model shapes --masked shapes_masked."
            )
        medium = MEDIA[first.medium]
        if fingerprint([medium.tokenizer(first)]) != fingerprint([medium.tokenizer(masked)]):
            raise ValueError(
                "the two models have different tokenizers, so their tokens do not mean the same; measure each alone."
            )
        if first.medium == "audio" and first.max_frames != masked.max_frames:
            raise ValueError(
                f"the two models play clips of {first.max_frames} and of {masked.max_frames} frames; measure each "
                "alone."
            )
        self.first, self.masked = first, masked
        self.sampler = first.sampler

    def __getattr__(self, name: str) -> Any:
        if name == "first":  # not there yet
            raise AttributeError(name)
        return getattr(self.first, name)

    @property
    def fast_sampler(self) -> str:
        """The fast setting: the masked model's, as it was saved."""
        return self.masked.fast_sampler if self.medium == "image" else self.masked.plain_sampler

    @property
    def components(self) -> dict[str, Any]:
        """The parts of both models."""
        more = {f"masked_{name}": part for name, part in self.masked.components.items()}
        return {**self.first.components, **more}

    @property
    def drafter(self) -> Any:
        """The drafter of the model that decodes in order."""
        return self.first.drafter

    @drafter.setter
    def drafter(self, drafter: object) -> None:
        self.first.drafter = drafter

    @property
    def player(self) -> VisualPipeline:
        """The pipeline that decodes by the sampler."""
        calls = registry.by_class(type(self.sampler).__name__).calls
        return self.masked if calls == MASKED else self.first

    def set_progress_bar_config(self, **settings: Any) -> None:
        """Set the progress bars of both."""
        for pipe in (self.first, self.masked):
            pipe.set_progress_bar_config(**settings)

    def check_sampler(self) -> None:
        """Refuse a sampler that does not fit, as `VisualPipeline.check_sampler`."""
        self._with_sampler(lambda player: player.check_sampler())

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Call the pipeline that decodes."""
        return self._with_sampler(lambda player: player(*args, **settings))

    def _with_sampler(self, act: Any) -> Any:
        player = self.player
        before = player.sampler
        player.sampler = self.sampler
        try:
            return act(player)
        finally:
            player.sampler = before


Pipeline = VisualPipeline | MaskedPair  # what is measured


def paired(pipe: VisualPipeline, masked: str | None) -> Pipeline:
    """A pipeline, or with the name of a masked model of its tokens the two as a `MaskedPair`."""
    if masked is None:
        return pipe
    dtype = str(pipe.transformer.dtype).removeprefix("torch.")
    return MaskedPair(pipe, load(masked, str(pipe.device), dtype))
