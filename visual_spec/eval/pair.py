"""Two music models of one codec side by side: a model of columns, and a masked one."""

from __future__ import annotations

from typing import Any

from visual_spec.eval.media import codec_of
from visual_spec.models.core.calls import COLUMNS, MASKED
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.samplers.masked import MaskedSampler


class MusicPair:
    """A model of columns and a masked one as a single pipeline: `MaskedSampler` is played by the latter.

    So both can stand in one table, on the same prompts and in the same rounds.

    Args:
        columns, masked: `AudioPipeline`s.

    Raises:
        ValueError: pipelines of the same kind, with different codecs, or for clips of different length.
    """

    def __init__(self, columns: Any, masked: Any) -> None:
        if COLUMNS not in columns.calls or MASKED not in masked.calls:
            raise ValueError(
                "a pair is a model of columns and a masked one, in this order; pass --model tunes --masked "
                "tunes_masked, or the like."
            )
        if fingerprint([codec_of(columns)]) != fingerprint([codec_of(masked)]):
            raise ValueError(
                "the two models have different codecs, so their codes do not mean the same; measure each alone."
            )
        if columns.max_frames != masked.max_frames:
            raise ValueError(
                f"the two models play clips of {columns.max_frames} and of {masked.max_frames} frames; measure each "
                "alone."
            )
        self.columns, self.masked = columns, masked
        self.sampler = columns.sampler

    def __getattr__(self, name: str) -> Any:
        if name == "columns":  # not there yet
            raise AttributeError(name)
        return getattr(self.columns, name)

    @property
    def fast_sampler(self) -> str:
        """That of the masked model, as it was saved."""
        return self.masked.plain_sampler

    @property
    def components(self) -> dict[str, Any]:
        """Those of both."""
        more = {f"masked_{name}": part for name, part in self.masked.components.items()}
        return {**self.columns.components, **more}

    @property
    def drafter(self) -> Any:
        """That of the model of columns."""
        return self.columns.drafter

    @drafter.setter
    def drafter(self, drafter: Any) -> None:
        self.columns.drafter = drafter

    @property
    def player(self) -> Any:
        """The pipeline that plays by the sampler."""
        return self.masked if isinstance(self.sampler, MaskedSampler) else self.columns

    def set_progress_bar_config(self, **settings: Any) -> None:
        """As `DiffusionPipeline.set_progress_bar_config`, of both."""
        for pipe in (self.columns, self.masked):
            pipe.set_progress_bar_config(**settings)

    def check_sampler(self) -> None:
        """As `AudioPipeline.check_sampler`."""
        self._with_sampler(lambda player: player.check_sampler())

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """As `AudioPipeline.__call__`."""
        return self._with_sampler(lambda player: player(*args, **settings))

    def _with_sampler(self, act: Any) -> Any:
        player = self.player
        before = player.sampler
        player.sampler = self.sampler
        try:
            return act(player)
        finally:
            player.sampler = before
