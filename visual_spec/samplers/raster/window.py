"""The choice of the next call's window: the gain of a wider window against its cost on this machine.

A call with window W costs a + b W seconds and commits 1 + c g(W) tokens. The shape g was measured with Jacobi decoding
of pictures: a wide window refines its drafts in more calls, and so keeps more of them. The policy measures b / a and c
while it decodes, and picks the window with the most tokens per second. It serves only samplers whose tokens do not
depend on the window: otherwise the tokens would depend on measured times and could not be reproduced.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from visual_spec.models.core.protocol import owner_of
from visual_spec.samplers.core.checks import WIDTHS
from visual_spec.samplers.core.state import HostCopy, Run

if TYPE_CHECKING:
    from visual_spec.samplers.raster.jacobi_identical import IdenticalState

logger = logging.getLogger("visual_spec")
START = 8  # the window of the first calls: small, as a wide one is dear where tokens cannot be guessed
# c of the embedded `shapes`, where W = 4, 8, 16, 32, 64 keep .8, 1.5, 2.4, 3.7, 4.5 drafts a call.
_GAIN = 0.31
_SHAPE = np.log2(WIDTHS) ** 1.5
_BELIEF = 50.0  # calls that the shape of all widths weighs against what one width showed
_MEMORY = 0.998  # weight of a call relative to the next one, in the measured gain
_SETTLING = 4  # calls after a change of the window, which still test drafts of the old one
_RATIOS = 32  # pairs of neighbouring calls that the cost is fitted to
_FIRST_PROBES = 4  # every second call at first, of the narrowest window; nothing is chosen before
_PROBE_EVERY = 24  # calls
_PROBE_SELDOM, _LONG = (
    96,
    200,
)  # calls: the distance of probes of plain decoding, and once a window was held for long
_BETTER = 1.03  # a window must promise so much more before it replaces the present one
_SLOPES = np.geomspace(1e-4, 4.0, 80)  # candidates of b / a

# {model: {the rest of the key: policy}}, so that the next picture need not learn again.
_POLICIES: WeakKeyDictionary[object, dict[Hashable, WindowPolicy]] = WeakKeyDictionary()


class WindowPolicy:
    """Chooses the window of every call of one batch.

    It holds one window for long. Now and then a single call, a probe, has another one. The cost is fitted to the ratios
    of the times of neighbouring calls of different windows: other work on the machine slows both.

    Attributes:
        held: the window that all calls have but the probes.
    """

    def __init__(self) -> None:
        self.held = START
        self._kept = np.zeros(len(WIDTHS))  # drafts that calls of each window kept, per sample
        self._calls = np.zeros(len(WIDTHS))  # number of these calls
        self._ratios: deque[tuple[int, int, float]] = deque(maxlen=_RATIOS)
        self._previous: tuple[int, float] | None = None  # window and seconds of the last call
        self._seen = self._since = self._probes = 0
        self._slope = _SLOPES[0]
        self._told = False  # whether the user was told that plain decoding is fastest

    @classmethod
    def of(cls, model: object, key: Hashable) -> WindowPolicy:
        """Return the policy that saw all calls of this model under `key`."""
        known = _POLICIES.setdefault(owner_of(model), {})
        if key not in known:
            known[key] = cls()
        return known[key]

    def saw(self, width: int, committed: np.ndarray, seconds: float) -> None:
        """Learn from a call: its window, the tokens that each sample got, long `[B]`, and its seconds.

        Leave samples that got none, or that were cut off by the end of the picture, out of `committed`.
        """
        self._seen += 1
        if self._previous and self._previous[0] != width:
            self._ratios.append((self._previous[0], width, float(np.log(seconds / self._previous[1]))))
            self._fit()
        self._previous = width, seconds
        if width != self.held:
            return
        self._since += 1
        if self._since > _SETTLING and len(committed):
            place = WIDTHS.index(width)
            self._kept, self._calls = self._kept * _MEMORY, self._calls * _MEMORY
            self._kept[place] += committed.mean() - 1
            self._calls[place] += 1

    def _fit(self) -> None:
        """Fit b / a to the ratios by least absolute deviations: the first call of a window, which also warms up, and
        calls that were disturbed hardly count.
        """
        first, second, measured = (np.array(part)[:, None] for part in zip(*self._ratios, strict=True))
        fitted = np.log1p(second * _SLOPES) - np.log1p(first * _SLOPES)
        self._slope = _SLOPES[np.abs(fitted - measured).sum(0).argmin()]

    @property
    def cost(self) -> np.ndarray:
        """Expected cost of a call of each window, relative to a call without slots, `[widths]`."""
        return 1 + self._slope * np.array(WIDTHS)

    @property
    def tokens(self) -> np.ndarray:
        """Expected number of tokens that a call of each window commits, `[widths]`."""
        level = (self._kept.sum() + _GAIN * _SHAPE[-1]) / (self._calls @ _SHAPE + _SHAPE[-1])
        kept = (self._kept + _BELIEF * level * _SHAPE) / (self._calls + _BELIEF)
        return np.minimum(1 + kept, WIDTHS)

    def choose(self) -> int:
        """Return the window of the next call."""
        early = self._probes < _FIRST_PROBES
        seldom = self.held == 1 or self._since > _LONG
        every = 2 if early else _PROBE_SELDOM if seldom else _PROBE_EVERY
        if self._seen and self._seen % every == 0:
            self._probes += 1
            return WIDTHS[0] if early else self._probe()
        if not early:
            speed, held = self.tokens / self.cost, WIDTHS.index(self.held)
            best = int(speed.argmax())
            if speed[best] > _BETTER * speed[held]:
                self.held, self._since = WIDTHS[best], 0
                if self.held == 1 and not self._told:
                    self._told = True
                    logger.warning(
                        "No window pays on this model at this batch size: its tokens cannot be guessed well enough for "
                        "the time of a wider call. Plain decoding goes on, with the same tokens."
                    )
        return self.held

    def _probe(self) -> int:
        """Another window than the held one, in turn: at most two steps wider, because a wide call is a dear probe."""
        held = WIDTHS.index(self.held)
        others = [width for width in WIDTHS[: held + 3] if width != self.held]
        return others[self._probes % len(others)] if others else self.held


def adaptive(
    advance: Callable[[], object],
    run: Run,
    state: IdenticalState,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], None]:
    """Return `advance`, one step on `state`, with the policy of the model that chooses the window of every call.

    Args:
        state: has `width`, which is set, and `lengths`, long `[B]`, which `advance` increases.
        clock: seconds. On CUDA a step waits for the previous call, so the time of a call is known one call late.
    """
    policy = WindowPolicy.of(run.model, (run.batch_size, run.law_given.guided, str(run.device)))
    on_host, widths = HostCopy(), deque()
    state.width = policy.choose()

    def step() -> None:
        before, start = state.lengths.clone(), clock()  # clone: a recorded step changes it in place
        widths.append(state.width)
        advance()
        whole = state.lengths < run.num_tokens
        committed = on_host((state.lengths - before) * whole)
        if committed is not None:
            numbers = committed.numpy()
            policy.saw(widths.popleft(), numbers[numbers > 0], clock() - start)
        state.width = policy.choose()

    return step
