"""One prompt decoded plainly and accelerated: what both gave, what it cost, and what may be said of the two.

A *call* is one forward of the target model. Where calls accept drafts, each commits a run of tokens or columns: the
drafts it accepted, then one that it drew itself. So the last of a run is what the call was *paid* for, and those before
it came *free*. A sampler without drafts commits what it draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from visual_spec.eval.report.maps import (
    Map,
    check_commit_call,
    entry_map,
    paid_slots,
    scale_map,
    strip_map,
    token_map,
)
from visual_spec.models.core.protocol import TokenGrid


@dataclass(frozen=True)
class Scales:
    """What a next-scale model drew.

    Attributes:
        sides: tokens per side of each map of the accelerated picture.
        drafted: how many of the maps the first model drew.
        plain_tokens: of the plain picture, more than in the maps if the other one leaves out scales.
        plain_cache, fast_cache: bytes of keys and values that were held, at most.
    """

    sides: tuple[int, ...]
    drafted: int
    plain_tokens: int
    plain_cache: int
    fast_cache: int


@dataclass
class ComparisonRow:
    """One prompt decoded plainly and accelerated.

    Attributes:
        plain, fast: the samples: pictures of Pillow, frames uint8 [T, H, W, 3], or waves float [C, N].
        commit_call: long [S], the call at which each token, or column, of the accelerated sample was committed.
        plain_calls, fast_calls: target calls.
        plain_seconds, fast_seconds: wall clock of the decoding; 0: not timed.
        identical: whether the tokens of both are the same, and what was decoded from them.
        grid: geometry of the tokens; None for a clip of sound.
        rate: frames per second of a clip, samples per second of sound.
        promised, lossless, output_law, near_ties: what the sampler says of its tokens, see `DecodeTrace`.
        drafts: whether its calls accept drafts.
        reference: whether plain decoding is one token a call of a model that nobody would draw with so, because it
            draws many at once: no speed-up is over it.
        head_calls: of a model of continuous tokens, calls of its head that waited for each other, of both.
        entry_call: of a clip that a masked model filled in, long [S, K]: the call at which each code was kept.
        scales: of a next-scale model.

    Raises:
        ValueError: if `commit_call` does not have one non-negative entry for each slot of `grid`, or a count is < 1.
    """

    prompt: str
    plain: Any
    fast: Any
    commit_call: Tensor
    plain_calls: int
    fast_calls: int
    plain_seconds: float
    fast_seconds: float
    identical: bool
    grid: TokenGrid | None = None
    rate: float = 0
    promised: bool = False
    lossless: bool = False
    output_law: str = ""
    near_ties: int | None = None
    drafts: bool = True
    reference: bool = False
    head_calls: tuple[int, int] | None = None
    entry_call: Tensor | None = None
    scales: Scales | None = None

    def __post_init__(self) -> None:
        if self.grid is not None:
            check_commit_call(self.commit_call, self.grid)
        if self.plain_calls < 1 or self.fast_calls < 1:
            raise ValueError(
                f"plain_calls={self.plain_calls}, fast_calls={self.fast_calls}; a decode has at least 1 call"
            )

    @property
    def medium(self) -> str:
        """A key of `visual_spec.records.MEDIA`."""
        if self.grid is None:
            return "audio"
        return "video" if self.rate else "image"

    @property
    def unit(self) -> str:
        """Return what a call commits one or more of."""
        return "column" if self.medium == "audio" else "token"

    @property
    def per_call(self) -> float:
        """Committed tokens or columns over target calls, the one that each call draws itself included."""
        return len(self.commit_call) / self.fast_calls

    @property
    def plain_per_call(self) -> float:
        """The same of plain decoding."""
        count = len(self.commit_call) if self.scales is None else self.scales.plain_tokens
        return count / self.plain_calls

    @property
    def speed_up(self) -> float:
        """Plain seconds over accelerated seconds; 0 where either was not timed, or plain decoding is a `reference`."""
        timed = self.plain_seconds > 0 and self.fast_seconds > 0 and not self.reference
        return self.plain_seconds / self.fast_seconds if timed else 0.0

    @property
    def verdict(self) -> tuple[str, str]:
        """Return what was seen, and its tone: "same", "other", or "differs" for a promise that was broken.

        Pixels are compared here, tokens are as `identical` says.
        """
        codes, shown = {"audio": ("codes", "samples")}.get(self.medium, ("tokens", "pixels"))
        if self.identical:
            same = self.medium != "image" or self.plain == self.fast
            return f"same {codes}, {'same' if same else 'other'} {shown}", "same" if same else "differs"
        if self.promised:
            return f"{codes} differ, the same were promised", "differs"
        if self.lossless:
            return f"{codes} differ, the law is the same", "other"
        return (f"{codes} differ" if self.drafts else "another law"), "other"

    @property
    def headline(self) -> tuple[str, str]:
        """The figure that matters most, and what it is."""
        if self.scales is not None:
            if self.speed_up:
                return f"{self.speed_up:.2f}x", "as fast"
            return f"{self.scales.fast_cache / 2**10:.0f}", "KiB of cache"
        if self.reference:
            return str(self.fast_calls), "model calls"
        return f"{self.per_call:.2f}", f"{self.unit}s per call"

    @property
    def map_title(self) -> str:
        """Return what the map shows."""
        if self.scales is not None:
            return "who drew which scale"
        return "what cost a model call" if self.drafts else f"which call drew which {self.unit}"

    @property
    def map_caption(self) -> str:
        """Return what the map shows, in numbers."""
        if self.scales is not None:
            sizes = [f"{size / 2**10:.0f}" for size in (self.scales.plain_cache, self.scales.fast_cache)]
            return f"{self.scales.drafted} of {len(self.scales.sides)} scales; cache {' -> '.join(sizes)} KiB"
        if self.entry_call is not None:
            return "one colour: one call (a row is a codebook, coarsest on top)"
        if not self.drafts:
            return "light: first, dark: last"
        paid = paid_slots(self.commit_call)
        count, units = int(paid.sum()), " columns" if self.medium == "audio" else ""
        said = f"{count}{units} paid, {len(paid) - count} free"
        if self.medium != "video" or self.grid is None:
            return said
        by_frame = paid.view(self.grid.frames, -1).sum(1).tolist()
        return f"{said}; paid by frame: {' '.join(map(str, by_frame))}"

    def draw_map(self) -> Map:
        """The map beside the samples."""
        if self.scales is not None:
            return scale_map(self.scales.sides, self.scales.drafted)
        if self.grid is not None:
            return token_map(self.commit_call, self.grid, drafts=self.drafts)
        return strip_map(self.commit_call) if self.entry_call is None else entry_map(self.entry_call)

    def svg(self) -> str:
        """The map for a page."""
        return self.draw_map().svg(f"{self.map_title}: {self.map_caption}")

    def costs(self) -> tuple[list[str], list[str]]:
        """Calls and seconds of both, as words."""
        plain, fast = (
            [f"{calls} calls", *([f"{seconds:.2f} s"] if seconds > 0 else [])]
            for calls, seconds in (
                (self.plain_calls, self.plain_seconds),
                (self.fast_calls, self.fast_seconds),
            )
        )
        if self.speed_up:
            fast[-1] += f" ({self.speed_up:.2f}x)"
        return plain, fast
