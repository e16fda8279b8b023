"""Codebook patterns: at which step of a sequence each codebook of each frame is decoded.

A neural audio codec gives K tokens a frame, one of each codebook. A language model over them must choose which tokens
it predicts together: all of a frame (parallel), one by one (flat), or each codebook some frames after the previous one
(delay). Copet et al., "Simple and controllable music generation", NeurIPS 2023, section 2.2, name these choices. Here
four numbers per codebook express all of them, and other models' patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature

import torch
from torch import Tensor

from visual_spec.models.core.settings import whole

LAYOUTS = ("parallel", "delay", "flat", "coarse_first", "grouped", "stack", "stack_delay")


@dataclass(frozen=True)
class CodebookPattern:
    """A layout of K codebooks. A step holds at most one token of each; use the constructors that name a layout.

    Steps do not include the initial empty one, which the model handles: step 0 is the first predicted step, and S
    counts from there (audiocraft's layouts have one step more).

    Args:
        delays: frames by which each codebook follows the first of its pass. A frame of a codebook with lag d shares
            its step with the frame d later of a codebook without lag.
        levels: the inner step, from 0, of each codebook within a frame. Codebooks of one level share their steps, and
            have one delay if there are other levels.
        passes: the pass over the clip, from 0, in which each codebook is decoded.
        frame_order: the order of the frames within a block, a permutation of 0 ... n - 1; blocks follow each other.
        stacked: only the last step of a frame is for the long-term cache; see `retained`.

    Raises:
        ValueError: the tuples are empty or differ in length, numbers are negative or missing, or the frame order is not
            a permutation.
    """

    delays: tuple[int, ...]
    levels: tuple[int, ...]
    passes: tuple[int, ...]
    frame_order: tuple[int, ...] = (0,)
    stacked: bool = False

    def __post_init__(self) -> None:
        for name in ("delays", "levels", "passes", "frame_order"):
            values = getattr(self, name)
            if not all(isinstance(value, int) and value >= 0 for value in values):
                raise ValueError(f"{name}={values}; pass integers of at least 0.")
        if not len(self.delays) == len(self.levels) == len(self.passes) > 0:
            raise ValueError(
                f"{len(self.delays)} delays, {len(self.levels)} levels and {len(self.passes)} passes; "
                "pass one of each a codebook."
            )
        if sorted(self.frame_order) != list(range(len(self.frame_order))) or not self.frame_order:
            raise ValueError(
                f"frame_order={self.frame_order}; pass each number from 0 to n - 1 once, such as (0, 2, 1, 3)."
            )
        _check_counted("passes", self.passes)
        for number in range(max(self.passes) + 1):
            members = [k for k in range(self.codebooks) if self.passes[k] == number]
            if min(self.delays[k] for k in members) > 0:
                raise ValueError(
                    f"the delays of pass {number}, {[self.delays[k] for k in members]}, leave its first step empty; "
                    "pass delays that start at 0."
                )
            _check_counted("levels", [self.levels[k] for k in members])
            for level in {self.levels[k] for k in members}:
                delays = {self.delays[k] for k in members if self.levels[k] == level}
                if len(delays) > 1 and any(self.levels[k] != level for k in members):
                    raise ValueError(
                        f"level {level} holds delays {sorted(delays)}; where there are several levels, pass codebooks "
                        "of one level the same delay."
                    )

    # The layouts by name ----------------------------------------------------------------------------------------------

    @classmethod
    def parallel(cls, codebooks: int) -> CodebookPattern:
        """Step t holds frame t of every codebook: S = T. MAGNeT, CSM's backbone."""
        return cls.delay([0] * whole("codebooks", codebooks))

    @classmethod
    def delay(cls, delays: Sequence[int]) -> CodebookPattern:
        """Step s holds frame s - delays[k] of codebook k: S = T + max(delays).

        MusicGen [0, 1, 2, 3], Dia [0, 8, 9, ..., 15], Higgs [0, 1, ..., 7], Moshi [0, 1, ..., 1]; [0, 1, 1, 1] is
        MusicGen's partial delay.
        """
        return cls(tuple(delays), (0,) * len(delays), (0,) * len(delays))

    @classmethod
    def flat(
        cls, codebooks: int, levels: Sequence[int] | None = None, delays: Sequence[int] | None = None
    ) -> CodebookPattern:
        """A frame takes one step for each level: S = T * levels, without delays.

        Args:
            levels: inner step of each codebook; None: one step a codebook. [0, 1, 1, 1] is a partial flattening.
            delays: frames by which each codebook lags. Of the levels that meet at one frame, the level with the largest
                lag comes first, as in audiocraft.
        """
        zeros = (0,) * whole("codebooks", codebooks)
        return cls(
            zeros if delays is None else tuple(delays),
            tuple(range(codebooks)) if levels is None else tuple(levels),
            zeros,
        )

    @classmethod
    def coarse_first(cls, codebooks: int, delays: Sequence[int] | None = None) -> CodebookPattern:
        """All frames of codebook 0, then all frames of the others: S = 2 T + max(delays).

        The start of the second pass depends on T, so a model must be decoded with the length it was trained with.

        Args:
            delays: delays of the codebooks after the first; None: none.
        """
        others = whole("codebooks", codebooks) - 1
        lags = (0,) * others if delays is None else tuple(delays)
        return cls((0, *lags), (0,) * codebooks, (0, *(1,) * others))

    @classmethod
    def grouped(cls, codebooks: int, group_size: int) -> CodebookPattern:
        """Groups of codebooks one after the other, each flattened over all frames: S = K T. MusicLM's order."""
        if group_size < 1 or whole("codebooks", codebooks) % group_size:
            raise ValueError(
                f"group_size={group_size} does not divide {codebooks} codebooks; pass a divisor of it."
            )
        numbers = range(codebooks)
        return cls(
            (0,) * codebooks, tuple(k % group_size for k in numbers), tuple(k // group_size for k in numbers)
        )

    @classmethod
    def stack(cls, codebooks: int) -> CodebookPattern:
        """As `flat`, but only the whole stack of a frame stays in the long-term cache, not its parts: S = K T.

        Le Lan et al., "Stack-and-delay: a new codebook pattern for music generation", ICASSP 2024. What a step is fed
        and sees: `visual_spec.models.columns.stacks`.
        """
        numbers = tuple(range(whole("codebooks", codebooks)))
        return cls((0,) * codebooks, numbers, (0,) * codebooks, stacked=True)

    @classmethod
    def stack_delay(cls, codebooks: int, frame_order: Sequence[int]) -> CodebookPattern:
        """K parallel streams, each at another level of its frame; the frames are permuted: S = T + K - 1.

        Le Lan et al. 2024, as `stack`. The permutation separates neighbouring frames, so that one is decoded before the
        other and is seen by it.

        Args:
            frame_order: order of the frames in a block, as the model was trained, such as (0, 2, 1, 3).
        """
        numbers = tuple(range(whole("codebooks", codebooks)))
        zeros = (0,) * codebooks
        return cls(numbers, zeros, zeros, tuple(frame_order), stacked=True)

    @classmethod
    def named(cls, layout: str, codebooks: int, **settings: object) -> CodebookPattern:
        """Return the layout of a name in `LAYOUTS`, as model configurations use it.

        Args:
            settings: arguments of the layout's constructor except `codebooks`; "delay" without delays is [0 ... K - 1].

        Raises:
            ValueError: the layout is unknown, lacks a setting or has one too many, or the number of delays is not that
                of the codebooks.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}; pass one of {', '.join(LAYOUTS)}.")
        known = list(signature(getattr(cls, layout)).parameters.values())[layout != "delay" :]
        missing = [one.name for one in known if one.default is one.empty and one.name != "delays"]
        if set(settings) - {one.name for one in known} or not set(missing) <= set(settings):
            raise ValueError(
                f"layout={layout!r} with {sorted(settings) or 'no settings'}; pass "
                f"{', '.join(one.name for one in known) or 'none'}"
                f"{' (needed: ' + ', '.join(missing) + ')' if missing else ''}."
            )
        if layout == "delay":
            settings = {"delays": range(whole("codebooks", codebooks)), **settings}
            pattern = cls.delay(**settings)  # type: ignore[arg-type]
        else:
            pattern = getattr(cls, layout)(codebooks, **settings)
        if pattern.codebooks != codebooks:
            raise ValueError(f"delays={pattern.delays} for {codebooks} codebooks; pass one delay a codebook.")
        return pattern

    # Operations of a pattern ------------------------------------------------------------------------------------------

    @property
    def codebooks(self) -> int:
        """K, the number of codebooks."""
        return len(self.delays)

    def steps(self, num_frames: int) -> int:
        """Return S, the number of steps of a clip.

        Raises:
            ValueError: the number of frames is below 1.
        """
        return self.frames_by_step(num_frames).shape[1]

    def frames_by_step(self, num_frames: int) -> Tensor:
        """Return the frame that each codebook holds at each step, -1 for none: long [K, S]. Do not write to it.

        Raises:
            ValueError: the number of frames is below 1.
        """
        return _tables(self, num_frames)[0]

    def steps_by_frame(self, num_frames: int) -> Tensor:
        """Return the step at which each frame of each codebook is decoded: long [K, T]. Do not write to it."""
        return _tables(self, num_frames)[1]

    def valid(self, num_frames: int) -> Tensor:
        """Return where a step holds a token: bool [K, S]. The other entries are forced to the special token."""
        return self.frames_by_step(num_frames) >= 0

    def complete_after(self, num_frames: int) -> Tensor:
        """Return the number of steps after which a frame has all its codebooks, and can be heard: long [T]."""
        return self.steps_by_frame(num_frames).amax(0) + 1

    def retained(self, num_frames: int) -> Tensor:
        """Return the steps whose keys and values stay for later frames: bool [S]. All, unless the pattern is stacked.

        In a stacked pattern, a step that does not complete a frame serves only the steps of the same frame.
        """
        kept = torch.ones(self.steps(num_frames), dtype=torch.bool)
        if self.stacked:
            kept.fill_(False)[self.complete_after(num_frames) - 1] = True
        return kept

    def apply(self, codes: Tensor, special: int) -> Tensor:
        """Lay out codes by frame as the sequence that a model sees.

        Args:
            codes: [B, K, T].
            special: the id for entries without a token.

        Returns:
            [B, K, S].

        Raises:
            ValueError: the number of codebooks differs, or there are no frames.
        """
        self._check(codes)
        frames = self.frames_by_step(codes.shape[2]).to(codes.device)
        held = codes.gather(2, frames.clamp(min=0).expand(codes.shape[0], -1, -1))
        return held.masked_fill(frames < 0, special)

    def revert(self, sequence: Tensor) -> Tensor:
        """Turn a sequence back into codes by frame.

        Args:
            sequence: [B, K, S], or [B, K, S, ...], such as logits.

        Returns:
            [B, K, T], or [B, K, T, ...].

        Raises:
            ValueError: the number of codebooks differs, or no number of frames gives this length.
        """
        self._check(sequence)
        steps = self.steps_by_frame(self.num_frames(sequence.shape[2])).to(sequence.device)
        return sequence[:, torch.arange(self.codebooks, device=sequence.device)[:, None], steps]

    def num_frames(self, steps: int) -> int:
        """Return T of a sequence of S steps.

        Raises:
            ValueError: no number of frames takes this many steps.
        """
        # After the first frame, each frame takes as many steps as all passes have levels.
        each = sum(
            1 + max(level for level, at in zip(self.levels, self.passes, strict=True) if at == number)
            for number in range(max(self.passes) + 1)
        )
        more, rest = divmod(steps - self.steps(1), each)
        if more < 0 or rest:
            raise ValueError(
                f"no number of frames takes {steps} steps: the first takes {self.steps(1)}, each other one {each}. "
                "Pass the sequence whole, and without the initial empty step."
            )
        return 1 + more

    def _check(self, values: Tensor) -> None:
        if values.dim() < 3 or values.shape[1] != self.codebooks:
            raise ValueError(
                f"tokens of shape {tuple(values.shape)} for {self.codebooks} codebooks; pass "
                f"[B, {self.codebooks}, length]."
            )


@lru_cache(maxsize=32)
def _tables(pattern: CodebookPattern, num_frames: int) -> tuple[Tensor, Tensor]:
    """Return the frame by step [K, S], and the step by frame [K, T]."""
    whole("num_frames", num_frames)
    block = len(pattern.frame_order)
    blocks = range(0, num_frames, block)
    # The last block may be cut off; its remaining frames keep their order.
    order = [start + frame for start in blocks for frame in pattern.frame_order if start + frame < num_frames]
    columns: list[list[int]] = []  # by step, the frame of each codebook
    for number in range(max(pattern.passes) + 1):
        members = [k for k in range(pattern.codebooks) if pattern.passes[k] == number]
        levels: dict[int, list[int]] = {}
        for k in members:
            levels.setdefault(pattern.levels[k], []).append(k)
        by_rank = sorted(
            levels.values(), key=lambda level: (-pattern.delays[level[0]], pattern.levels[level[0]])
        )
        for place in range(num_frames + max(pattern.delays[k] for k in members)):
            for level in by_rank:
                # A lagging level has no steps before its first frame, but has its remaining steps after its last.
                if place < min(pattern.delays[k] for k in level):
                    continue
                column = [-1] * pattern.codebooks
                for k in level:
                    if 0 <= place - pattern.delays[k] < num_frames:
                        column[k] = order[place - pattern.delays[k]]
                columns.append(column)
    while max(columns[-1]) < 0:
        columns.pop()
    frames = torch.tensor(columns).T.contiguous()  # [K, S]
    steps = torch.zeros(pattern.codebooks, num_frames + 1, dtype=torch.long)
    steps.scatter_(
        1, torch.where(frames < 0, num_frames, frames), torch.arange(len(columns)).expand_as(frames)
    )
    return frames, steps[:, :num_frames].contiguous()


def _check_counted(name: str, values: Sequence[int]) -> None:
    if sorted(set(values)) != list(range(max(values) + 1)):
        raise ValueError(f"{name}={tuple(values)} leave out a number; pass {name} counted 0, 1, 2, ...")
