"""The choice of the next call's window: the gain of a wider window against its cost on this machine.

A call with window W commits 1 + S(1) + ... + S(W - 1) tokens on average, where S(j) is the probability that the first j
drafts are all kept. The policy estimates S from past calls, and their cost from their times, and picks the window with
the most tokens per second. It serves only samplers whose tokens do not depend on the window: otherwise the tokens would
depend on measured times and could not be reproduced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from visual_spec.models.core.protocol import owner_of
from visual_spec.samplers.core.checks import check_count
from visual_spec.samplers.core.host import HostCopy

AUTO = "auto"
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_MEMORY = 0.95  # weight of a call relative to the next one, in the estimate of S
_BELIEF = 2.0  # weight of the mean probability over positions, in the estimate of one position
_TIMINGS = 7  # the cost of a width is the median of its last calls, this many

# {model: {the rest of the key: policy}}, so that the next picture need not learn again.
_POLICIES: WeakKeyDictionary[Any, dict[Any, WindowPolicy]] = WeakKeyDictionary()


def check_window(window: object, acceptance: str) -> None:
    """Refuse a window that is neither a number nor "auto", and "auto" if the tokens would depend on it.

    Raises:
        ValueError: the window is neither, or it is "auto" and the acceptance is not "identical".
    """
    if isinstance(window, str) and window != AUTO:
        raise ValueError(f"window={window!r}; pass an integer of at least 1, or {AUTO!r}.")
    if window != AUTO:
        check_count("window", window, " (1 is one token a call)")
    elif acceptance != "identical":
        raise ValueError(
            f"window='auto' with acceptance={acceptance!r}: the window would depend on measured times, and with it the "
            "tokens of a seed. Pass acceptance='identical', or a number."
        )


def widest(window: int | str, fixed: int | None = None) -> int:
    """Return the most slots that a call scores; "auto" is `fixed` where all calls have that width."""
    return (fixed or WIDTHS[-1]) if isinstance(window, str) else window


class WindowPolicy:
    """Chooses the window of every call of one batch.

    Args:
        widths: windows to choose from, in ascending order.

    Attributes:
        seconds: {width: seconds of its last calls}, without the first one, which also warms up.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        self.widths = tuple(widths)
        self.seconds: dict[int, list[float]] = {}
        self._reached = np.zeros(self.widths[-1])  # recent number of tests at each position
        self._kept = np.zeros(self.widths[-1])

    @classmethod
    def of(cls, model: Any, key: Any, widths: Sequence[int] = WIDTHS) -> WindowPolicy:
        """Return the policy that saw all calls of this model under `key`."""
        known = _POLICIES.setdefault(owner_of(model), {})
        if key not in known:
            known[key] = cls(widths)
        return known[key]

    def saw(self, width: int, committed: np.ndarray, seconds: float) -> None:
        """Learn from a call: its window, the tokens that each sample got, long `[B]`, and its seconds.

        Leave samples that got none, or that were cut off by the end of the picture, out of `committed`.
        """
        if width in self.seconds:
            self.seconds[width] = [*self.seconds[width], seconds][-_TIMINGS:]
        else:
            self.seconds[width] = []
        places = np.arange(1, width)  # a sample with n tokens kept n - 1 drafts and refused the n-th, if any
        tested = committed[:, None] >= places
        kept = committed[:, None] > places
        # Positions beyond a narrow window keep their counts: a wide window refines drafts longer and keeps more of
        # them.
        self._reached[: width - 1] = _MEMORY * self._reached[: width - 1] + tested.sum(0)
        self._kept[: width - 1] = _MEMORY * self._kept[: width - 1] + kept.sum(0)

    @property
    def tokens(self) -> np.ndarray:
        """Expected number of tokens that a call with window 1, 2, ... commits, `[W]`."""
        mean = (self._kept.sum() + 1) / (self._reached.sum() + 2)
        chance = (self._kept + _BELIEF * mean) / (self._reached + _BELIEF)
        return 1 + np.concatenate([[0.0], np.cumprod(chance)[:-1]]).cumsum()

    def choose(self) -> int:
        """Return the window of the next call. Times each width twice first, the widest first; drops the first time."""
        for width in reversed(self.widths):
            if not self.seconds.get(width):
                return width
        tokens = self.tokens
        cost = {width: median(self.seconds[width]) for width in self.widths}
        return max(self.widths, key=lambda width: tokens[width - 1] / cost[width])


def adaptive(
    advance: Callable[[], None],
    state: Any,
    policy: WindowPolicy,
    num_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], None]:
    """Return `advance`, one step on `state`, with a policy that chooses the window of every call.

    Args:
        state: has `width`, which is set, and `lengths`, long `[B]`, which `advance` increases.
        num_tokens: number of slots of a picture.
        clock: seconds. On CUDA a step waits for the previous call, so the time of a call is known one call late.
    """
    on_host, widths = HostCopy(), deque()
    state.width = policy.choose()

    def step() -> None:
        before, start = state.lengths.clone(), clock()  # clone: a recorded step changes it in place
        widths.append(state.width)
        advance()
        whole = state.lengths < num_tokens
        committed = on_host((state.lengths - before) * whole)
        if committed is not None:
            numbers = committed.numpy()
            policy.saw(widths.popleft(), numbers[numbers > 0], clock() - start)
        state.width = policy.choose()

    return step
