"""The frames that a causal video model remembers, and the policies that decide which.

Keys are stored before the rotary table, with the place of every token beside them as integers. A frame moves in time by
a change of its integers, and is rotated once, when it is read. Rotated keys that are turned again and again would drift
in bfloat16.

A policy runs once for each chunk and layer, before the chunk is first read (`make_room`). All counts are latent frames.
Windows and budgets include the frames of the chunk at hand, as in the papers.

With `dtype="int8"`, which every policy takes, caches hold whole numbers from -127 to 127, and one scale for each token
and head. Frames are rounded once, when they are written. KIVI (2402.02750) and LongLive 2.0 (2605.18739) hold fewer
bits, with kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from visual_spec.models.core.settings import Count, OneOf, Within, read_fields, whole

FrameCount = Annotated[int, Within(0)]
CacheType = Annotated[str, OneOf(("model", "int8"))]

# Scores long [B, last - first] of the cached tokens `first` to `last`, from the queries of so many recent frames.
Scores = Callable[[int, int, int], Tensor]


class FrameCache:
    """Keys, values and places of the tokens that some heads of one layer remember, in order of their frames.

    Attributes:
        places: long [B, N, 3], the frame, row and column of each token.
        query_sums: [B, f, H, D], the rotated queries of the last chunk, summed over each frame.
        frame_tokens: tokens of a frame.
        written: tokens that were ever appended.
        pins: of each shot after the first one, the tokens that were written before it.
        dtype: "model": as they come; "int8": rounded.
    """

    def __init__(
        self,
        like: Tensor,
        batch_size: int,
        heads: int,
        head_dim: int,
        frame_tokens: int,
        dtype: str = "model",
    ) -> None:
        self.dtype, self.frame_tokens, self.pins = dtype, frame_tokens, list[int]()
        self.written = 0
        none = like.new_zeros(batch_size, 0, heads, head_dim)
        self._held = [*self._rounded(none), *self._rounded(none)]  # keys and their scales, values and theirs
        self.places = torch.zeros(batch_size, 0, 3, dtype=torch.long, device=like.device)
        self.query_sums = torch.zeros_like(none, dtype=torch.promote_types(like.dtype, torch.float32))

    @property
    def keys(self) -> Tensor:
        """[B, N, H, D], before the rotary table."""
        return self._read(*self._held[:2])

    @property
    def values(self) -> Tensor:
        """[B, N, H, D]."""
        return self._read(*self._held[2:])

    @property
    def tokens(self) -> int:
        return self.places.shape[1]

    @property
    def frames(self) -> int:
        return self.tokens // self.frame_tokens

    @property
    def nbytes(self) -> int:
        held = (*self._held, self.places, self.query_sums)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def append(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Add tokens [B, n, ...] after all others."""
        new = (*self._rounded(keys), *self._rounded(values))
        self._held = [torch.cat(parts, 1) for parts in zip(self._held, new, strict=True)]
        self.places = torch.cat([self.places, places], 1)
        self.written += places.shape[1]

    def keep(self, slots: Tensor) -> None:
        """Forget all tokens but those at slots long [B, n]."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        self._held = [held[rows, slots] for held in self._held]
        self.places = self.places[rows, slots]

    def _rounded(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is held of states [B, n, H, D], and scales [B, n, H, 1], or [B, n, H, 0] where there are none."""
        if self.dtype == "model":
            return states, states[..., :0]
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scale = (wide.abs().amax(-1, keepdim=True) / 127).to(states.dtype)
        whole = (wide / scale.to(wide.dtype).clamp(min=1e-30)).round().clamp(-127, 127)
        return whole.to(torch.int8), scale

    def _read(self, held: Tensor, scales: Tensor) -> Tensor:
        return held if self.dtype == "model" else held.to(scales.dtype) * scales

    def keep_ends(self, first: int, last: int, pin: int | None = None) -> None:
        """Forget all frames but the `first` and the `last` ones, if there are more.

        Of the last ones, `first` frames that were written after `pin` tokens are kept, however old.
        """
        if self.frames > first + last:
            each = self.frame_tokens
            head, tail = torch.arange(first * each), torch.arange(self.tokens - last * each, self.tokens)
            if pin is not None:
                place = max(
                    first * each, self.tokens - (self.written - pin)
                )  # after the first ones, once it is old
                pinned = torch.arange(place, place + min(first, last) * each)
                tail = torch.cat([pinned, tail[len(pinned) :]]) if place < tail[0] else tail
            self.keep(self._rows(torch.cat([head, tail])))

    def move(self, first: int, frames: int, frame: int) -> None:
        """Move `frames` frames of tokens, from token `first` on, to the frames from `frame` on."""
        last = min(first + frames * self.frame_tokens, self.tokens)
        steps = torch.arange(last - first, device=self.places.device) // self.frame_tokens
        self.places[:, first:last, 0] = frame + steps

    def _rows(self, slots: Tensor) -> Tensor:
        return slots.to(self.places.device).expand(len(self.places), -1)


class CachePolicy(Protocol):
    """What decides which frames a layer remembers."""

    @property
    def dtype(self) -> str:
        """Return "model", or "int8" for caches that round."""
        ...

    @property
    def reach(self) -> int:
        """Return how many frames beyond the last one a token may be placed."""
        ...

    def check(self, chunk: int) -> None:
        """Refuse settings that cannot serve chunks of so many frames, by ValueError."""
        ...

    def make_room(self, cache: FrameCache, start: int, chunk: int, scores: Scores) -> None:
        """Prepare the cache for a chunk of `chunk` frames whose first frame is `start`."""
        ...


@dataclass(frozen=True)
class Full:
    """Every frame is remembered: the setting that Self-Forcing was trained in, over 21 frames."""

    dtype: CacheType = "model"
    reach = 0

    def check(self, chunk: int) -> None:
        read_fields(self)

    def make_room(self, cache: FrameCache, start: int, chunk: int, scores: Scores) -> None:
        """Nothing is forgotten."""


@dataclass(frozen=True)
class SinkWindow:
    """The first frames, the sink, and the last ones.

    Source: Xiao et al., "Efficient streaming language models with attention sinks", ICLR 2024, section 3; with
    `sink_gap`, "Deep Forcing", 2512.05081, with its sink alone.

    Args:
        sink: frames at the beginning that are never forgotten.
        window: frames that attention reads, the chunk at hand included.
        sink_gap: None leaves the sink where it is. A number moves it, whenever frames are forgotten, to so many frames
            before the frames that follow it in the cache.
        cut_gap: frames that a cut to another shot leaves out. The first `sink` frames of the last shot are kept as the
            sink is. Source of both: LongLive 2.0, 2605.18739, whose program leaves out 8.
    """

    sink: FrameCount = 3
    window: int = 21
    sink_gap: FrameCount | None = None
    cut_gap: FrameCount = 0
    dtype: CacheType = "model"
    reach = 0

    def check(self, chunk: int) -> None:
        read_fields(self)
        whole("window", self.window, Within(self.sink + chunk), f", sink + chunk = {self.sink + chunk}")

    def make_room(self, cache: FrameCache, start: int, chunk: int, scores: Scores) -> None:
        if cache.frames + chunk > self.window:
            last = self.window - self.sink - chunk
            pins = [pin for pin in cache.pins if pin < cache.written]  # the shot that begins now has none yet
            cache.keep_ends(self.sink, last, pins[-1] if pins else None)
            if self.sink_gap is not None:
                cache.move(0, self.sink, _sink_frame(start + chunk, self.window, self.sink_gap))


@dataclass(frozen=True)
class Sliding:
    """The last `window` frames, the chunk at hand included: Self-Forcing's rolling cache, 2506.08009, section 3.4."""

    window: int = 21
    dtype: CacheType = "model"
    reach = 0

    def check(self, chunk: int) -> None:
        read_fields(self)
        whole("window", self.window, Within(chunk), f", the chunk of {chunk} frames")

    def make_room(self, cache: FrameCache, start: int, chunk: int, scores: Scores) -> None:
        cache.keep_ends(0, self.window - chunk)


@dataclass(frozen=True)
class RollingWindow:
    """The first frames and the last ones, as Rolling Forcing reads them: 2509.25161, section 3.3, and its program.

    Noisy frames read the sink, moved to right before the frames that follow it. A clean chunk, which is written to the
    cache, reads the last `window` frames where they stand, so it forgets the sink of a longer clip.

    Args:
        sink: frames at the beginning that are never forgotten; one chunk in the program.
        window: frames that attention reads, those of the call and the sink included.
    """

    sink: FrameCount = 3
    window: int = 21
    dtype: CacheType = "model"
    reach = 0

    def check(self, chunk: int) -> None:
        read_fields(self)
        least = self.sink + chunk
        whole("window", self.window, Within(least), f", the sink and the {chunk} frames of a call = {least}")

    def make_room(self, cache: FrameCache, start: int, chunk: int, scores: Scores) -> None:
        cache.keep_ends(self.sink, self.window - self.sink)

    def read(self, cache: FrameCache, start: int, frames: int, commit: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, places and values that a call of `frames` frames from `start` on reads of the cache."""
        each = cache.frame_tokens
        sink = 0 if commit else min(self.sink, cache.frames)
        last = min(self.window - frames - sink, cache.frames - sink)
        head, tail = sink * each, cache.tokens - last * each
        keys, places, values = (
            torch.cat([held[:, :head], held[:, tail:]], 1)
            for held in (cache.keys, cache.places, cache.values)
        )
        places[:, :head, 0] = start - last - sink + torch.arange(head, device=places.device) // each
        return keys, places, values


@dataclass(frozen=True)
class DeepForcing:
    """A deep sink that moves with the clip, the recent frames, and the tokens that recent queries ask for most.

    When the frames would exceed `window`, they are cut to `budget`. What is neither sink nor recent is ranked token by
    token: by the product of its rotated key with the sum of the rotated queries of the recent frames, over all heads,
    without softmax. The queries come from the chunk's first call and from the clean pass of the chunk before it.

    Source: "Deep Forcing", 2512.05081, sections on deep sink and participative compression; Self-Forcing's weights as
    they are.

    Args:
        sink: frames at the beginning that are never forgotten.
        recent: last frames that are never forgotten, the chunk at hand included.
        budget: frames left by a cut, the chunk at hand included.
        window: the most frames that attention reads.
        sink_gap: frames between the sink and the rest of the cut cache, were that packed without gaps. A public program
            of the method leaves 3, one chunk; the paper leaves 0.
        realign_selected: move the selected tokens, too, to the frames between sink and recent ones. The paper describes
            it; that program does not do it at these sizes.
    """

    sink: FrameCount = 10
    recent: int = 4
    budget: int = 16
    window: int = 21
    sink_gap: FrameCount = 3
    realign_selected: bool = False
    dtype: CacheType = "model"
    reach = 0

    def check(self, chunk: int) -> None:
        read_fields(self)
        whole("recent", self.recent, Within(chunk), f", the chunk of {chunk} frames")
        if self.recent > 2 * chunk:
            raise ValueError(
                f"recent={self.recent}; queries are known of this chunk and of the last one, so pass at most "
                f"{2 * chunk} frames."
            )
        least = self.sink + self.recent
        whole("budget", self.budget, Within(least), f", sink + recent = {least}")
        whole("window", self.window, Within(self.budget), f", budget = {self.budget}")

    def make_room(self, cache: FrameCache, start: int, chunk: int, scores: Scores) -> None:
        if cache.frames + chunk <= self.window:
            return
        each = cache.frame_tokens
        first, last = self.sink * each, cache.tokens - (self.recent - chunk) * each
        selected = self.budget - self.sink - self.recent
        best = scores(first, last, self.recent).topk(selected * each, 1).indices  # [B, selected * each]
        best = best.sort(1).values + first
        slots = torch.arange(cache.tokens, device=best.device).expand(len(best), -1)
        cache.keep(torch.cat([slots[:, :first], best, slots[:, last:]], 1))
        end = start + chunk
        cache.move(0, self.sink, _sink_frame(end, self.budget, self.sink_gap))
        if self.realign_selected:
            cache.move(first, selected, end - self.budget + self.sink)


@dataclass(frozen=True)
class FutureAnchor:
    """The first frames are held `ahead` frames after the end of the chunk, as where the clip is heading; and a window.

    Source: "Lookahead Anchoring", 2510.23581; there the model is tuned for it. A larger distance lets motion go freer.

    Args:
        anchors: frames at the beginning that are held ahead: `context`'s if the rollout gets one.
        ahead: how many frames after the chunk's last one the first anchor lies, at least 1.
        window: frames that attention reads, anchors and the chunk at hand included.
    """

    anchors: Count = 1
    ahead: Count = 3
    window: int = 21
    dtype: CacheType = "model"

    @property
    def reach(self) -> int:
        return self.ahead + self.anchors

    def check(self, chunk: int) -> None:
        read_fields(self)
        whole(
            "window", self.window, Within(self.anchors + chunk), f", anchors + chunk = {self.anchors + chunk}"
        )

    def make_room(self, cache: FrameCache, start: int, chunk: int, scores: Scores) -> None:
        cache.keep_ends(self.anchors, self.window - self.anchors - chunk)
        cache.move(0, self.anchors, start + chunk - 1 + self.ahead)


@dataclass(frozen=True)
class HeadBudgets:
    """A policy for every head of a layer, so that each head has a budget of its own. Heads with equal ones share it."""

    policies: tuple[CachePolicy, ...]

    def groups(self) -> dict[CachePolicy, list[int]]:
        """The heads of each policy."""
        heads: dict[CachePolicy, list[int]] = {}
        for head, policy in enumerate(self.policies):
            heads.setdefault(policy, []).append(head)
        return heads


# By their names in the second argument of `visual_spec.accelerate`.
POLICIES: dict[str, type] = {
    "full": Full,
    "sliding": Sliding,
    "sink-window": SinkWindow,
    "deep-forcing": DeepForcing,
    "future-anchor": FutureAnchor,
    "rolling": RollingWindow,
}


def _sink_frame(end: int, packed: int, gap: int) -> int:
    """The first frame of a sink with `packed` frames from it to `end`, `gap` frames earlier; not before the clip."""
    return max(end - packed - gap, 0)
