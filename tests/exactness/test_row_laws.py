"""Sequence laws of the row-parallel samplers, by enumeration of their real steps.

They are not lossless, but what they are is exact: where a model ignores the tokens that a row-parallel column may not
see, the law is the autoregressive one, and elsewhere it is the one that the papers' rules define.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.exactness.branching import _hash, _quantise, _unique
from tests.exactness.replay import ReplayNoise
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.tabular import TabularModel
from visual_spec.samplers import parallel_jacobi
from visual_spec.samplers import zipar as rows
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.core.row_order import RowOrder
from visual_spec.samplers.core.trace import Stopwatch
from visual_spec.samplers.parallel_jacobi import ParallelJacobiOptions, ParallelJacobiSampler
from visual_spec.samplers.zipar import RowState, ZipARSampler

PLAIN = TokenLaw()
COMBINATIONS = [
    ("gumbel", "identical"),
    ("gumbel", "exact"),
    ("independent", "exact"),
    ("maximal", "exact"),
]
_LEAST = 1e-18
_STATES = 3000  # states that are replayed together


class Intervals:
    """With two ids the noise of a slot is one uniform number, and regions are intervals: id 0 wins below its share."""

    def __init__(self) -> None:
        self.bounds = [(0.0, 1.0)]
        self.number = {(0.0, 1.0): 0}

    def draw(self, regions: Tensor, laws: Tensor) -> tuple[Tensor, Tensor]:
        probability, left = [], []
        for region, cut in zip(regions.tolist(), laws[:, 0].tolist(), strict=True):
            low, high = self.bounds[region]
            middle = min(max(cut, low), high)
            share = (middle - low) / (high - low)
            probability.append((share, 1 - share))
            left.append([self._add(low, middle), self._add(middle, high)])
        return torch.tensor(probability, dtype=torch.float64), torch.tensor(left)

    def _add(self, low: float, high: float) -> int:
        if high <= low:
            return 0
        bounds = (low, high)
        if bounds not in self.number:
            self.number[bounds] = len(self.bounds)
            self.bounds.append(bounds)
        return self.number[bounds]


@dataclass
class RowNoise(ReplayNoise):
    """Draws for places past the grid are nobody's: they take outcome 0, and no branch."""

    num_tokens: int = 0

    def _draw_unless_scratch(self, law: Tensor, at: Tensor) -> Tensor:
        nobody = torch.zeros_like(law).index_fill(1, torch.tensor(0), 1.0)
        if (at >= self.num_tokens).all():
            return torch.zeros(len(law), dtype=torch.long)
        law = torch.where(at >= self.num_tokens, nobody, law)
        return self._draw(lambda: law)

    def _token(self, law: Tensor, at: Tensor, stream: int) -> Tensor:
        if stream:
            return self._draw_unless_scratch(law, at)
        before = self.regions.gather(1, at)
        probability, left = self.table.draw(before[:, 0], law)
        outcome = self._draw_unless_scratch(probability, at)
        if self.pending is None:
            after = left.gather(1, outcome[:, None])
            self.regions = self.regions.scatter(1, at, torch.where(at >= self.num_tokens, before, after))
        return outcome

    def _columns(self, laws: Tensor, slots: Tensor) -> Tensor:
        columns = zip(laws.unbind(1), slots.unbind(1), strict=True)
        outcomes = [self._draw_unless_scratch(law, at[:, None]) for law, at in columns]
        return torch.stack(outcomes, 1) if outcomes else torch.zeros_like(slots)


@dataclass
class Branch:
    """States between two calls and their probabilities, one a row."""

    weight: Tensor
    regions: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    def take(self, index: Tensor) -> Branch:
        return Branch(
            self.weight[index],
            self.regions[index],
            {name: value[index] for name, value in self.state.items()},
        )


@dataclass
class Enumeration:
    law: Tensor  # [V ** L]
    moved: float  # expectation of the distance that `raster_divergence` measures
    calls: float


Start = Callable[..., RowState]
Step = Callable[..., None]
FIELDS = ("tokens", "lengths", "row", "held", "draft_law", "used_law")


class RowEnumerator:
    """Runs `start` and `step` on every outcome of every draw."""

    def __init__(
        self, model: TabularModel, order: RowOrder, start: Start, step: Step, measured: bool
    ) -> None:
        self.model, self.order, self.start, self.step = model, order, start, step
        self.length = model.grid.num_tokens
        self.law = CheckedLaw(PLAIN, self.length)
        self.table = Intervals()
        self.measured = measured

    def run(self) -> Enumeration:
        size = self.length + self.order.columns
        none = Branch(torch.ones(1, dtype=torch.float64), torch.zeros(1, size, dtype=torch.long))
        branches, call = self._expand(none, 0), 0
        law = torch.zeros(self.model.vocab_size**self.length, dtype=torch.float64)
        powers = self.model.vocab_size ** torch.arange(self.length - 1, -1, -1)
        calls, moved = 1.0, 0.0
        while len(branches.weight):
            call += 1
            calls += float(branches.weight.sum())
            branches = self._expand(branches, call)
            done = self.order.done(branches.state["lengths"])
            ended, branches = branches.take(done.nonzero()[:, 0]), branches.take((~done).nonzero()[:, 0])
            tokens = ended.state["tokens"][:, : self.length]
            law.index_add_(0, tokens @ powers, ended.weight)
            if self.measured and len(ended.weight):
                used = ended.state["used_law"][:, : self.length]
                distance = rows.raster_divergence(self.model, None, tokens, used, self.law, guided=False)
                moved += float(distance @ ended.weight)
        return Enumeration(law, moved, calls)

    def _expand(self, branches: Branch, call: int) -> Branch:
        parts = [
            self._merge(self._replay(branches.take(states), call))
            for states in torch.arange(len(branches.weight)).split(_STATES)
        ]
        names = parts[0].state
        return self._merge(
            Branch(
                torch.cat([part.weight for part in parts]),
                torch.cat([part.regions for part in parts]),
                {name: torch.cat([part.state[name] for part in parts]) for name in names},
            )
        )

    def _replay(self, branches: Branch, call: int) -> Branch:
        given: list[Tensor] = []
        while True:
            noise = RowNoise(
                weight=branches.weight,
                regions=branches.regions,
                table=self.table,  # type: ignore[arg-type]
                call=call,
                cells=self.model.vocab_size,
                given=given,
                num_tokens=self.length,
            )
            state, cache = self._call(branches, noise, call)
            if noise.pending is None:
                held = {name: getattr(state, name) for name in FIELDS if getattr(state, name) is not None}
                return Branch(noise.weight, noise.regions, {**held, "cache": cache})
            row, outcome = (noise.weight[:, None] * noise.pending > _LEAST).nonzero(as_tuple=True)
            branches = branches.take(row)
            given = [*(earlier[row] for earlier in given), outcome]

    def _call(self, branches: Branch, noise: CounterNoise, call: int) -> tuple[RowState, Tensor]:
        count = len(branches.weight)
        cache = self.model.prefill(None, batch_size=count, guided=False, window=self.order.columns)
        if call == 0:
            return self.start(self.order, cache, self.law, noise, measured=self.measured), cache.tokens
        cache.tokens = branches.state["cache"].clone()
        state = RowState(
            cache=cache,
            round=call - 1,
            target_calls=torch.zeros(count, dtype=torch.long),
            commit_call=torch.zeros_like(branches.state["tokens"]),
            **{name: branches.state[name].clone() if name in branches.state else None for name in FIELDS},  # type: ignore[arg-type]
        )
        self.step(self.model, self.order, state, self.law, noise, Stopwatch())
        return state, cache.tokens

    def _merge(self, branches: Branch) -> Branch:
        """Add up branches that nothing to come can tell apart."""
        state, width = branches.state, self.order.width
        slot = torch.arange(self.length)
        committed = slot % width < state["lengths"][:, slot // width]
        branches.regions[:, : self.length] *= ~committed  # the noise of a drawn slot is spent
        keys = [branches.regions[:, : self.length], state["tokens"][:, : self.length], state["lengths"]]
        keys += [state["row"], state["held"].long()]
        for name in ("draft_law", "used_law"):
            if name in state:
                keys.append(_quantise(state[name].exp()).flatten(1))
        first, inverse = _unique(_hash(torch.cat(keys, 1)))
        merged = branches.take(first)
        merged.weight = torch.zeros(len(first), dtype=torch.float64).index_add_(0, inverse, branches.weight)
        return merged


def enumerate_zipar(
    model: TabularModel, window: int, *, adaptive: bool = False, measured: bool = False
) -> Enumeration:
    def start(*arguments, **options):
        return rows.prepare(*arguments, **options)[0]

    def step(model, order, state, law, noise, watch):
        rows.zipar_step(model, order, state, law, noise, adaptive, watch)

    return RowEnumerator(model, RowOrder.over(model.grid, window), start, step, measured).run()


def enumerate_parallel_jacobi(
    model: TabularModel, options: ParallelJacobiOptions, *, measured: bool = False, step: Step | None = None
) -> Enumeration:
    def start(order, cache, law, noise, **named):
        return parallel_jacobi.parallel_jacobi_prepare(order, cache, law, noise, options, **named)

    def real_step(model, order, state, law, noise, watch):
        parallel_jacobi.parallel_jacobi_step(model, order, state, law, noise, options, watch)

    order = RowOrder.over(model.grid, options.lead, windows=options.rows, drafts=options.drafts)
    return RowEnumerator(model, order, start, step or real_step, measured).run()


def model(rows: int, width: int, **options) -> TabularModel:
    return TabularModel(TokenGrid(rows, width), 2, **{"scale": 1.5, **options})


def local(rows: int, width: int, lead: int) -> TabularModel:
    """A model that looks at the tokens which a column sees in any case, and at no others."""
    made = model(rows, width)
    for slot in range(made.grid.num_tokens):
        row, column = divmod(slot, width)
        contexts = torch.arange(2**made.order)
        projected = torch.zeros_like(contexts)
        for back in range(made.order):  # the digit of slot - 1 - back
            other = slot - 1 - back
            if other < 0:
                continue
            up = row - other // width
            # One row up `lead` more tokens are there, two rows up (at the call before) one less than twice that, ...
            if up == 0 or other % width < column + up * lead - (up - 1):
                projected += (contexts // 2**back % 2) * 2**back
        made.logits[:, slot] = made.logits[:, slot, projected]
    return made


def distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().sum() / 2)


def check(found: Enumeration, want: Tensor) -> None:
    assert float(found.law.sum()) == pytest.approx(1, abs=1e-10)
    assert distance(found.law, want) < 1e-10


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("height", "width", "window"), [(2, 3, 1), (2, 4, 2), (3, 3, 2), (4, 2, 1)])
def test_zipar_is_exact_for_a_model_that_ignores_what_is_not_seen(height, width, window, adaptive):
    local_model = local(height, width, window)
    found = enumerate_zipar(local_model, window, adaptive=adaptive)
    check(found, local_model.law_of_sequences(PLAIN))
    whole = model(height, width)  # which is not so for any other model
    assert distance(
        enumerate_zipar(whole, window, adaptive=adaptive).law, whole.law_of_sequences(PLAIN)
    ) > 1e-2 or (adaptive and window == width - 1)


@pytest.mark.parametrize("lead", [1, 2])
@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
def test_parallel_jacobi_is_exact_for_a_model_that_ignores_what_is_not_seen(coupling, acceptance, lead):
    local_model = local(2, 4, lead)  # the shortest rows in which a draft that was drawn again is tested
    options = ParallelJacobiOptions(2, 2, lead, coupling, acceptance, "left")
    found = enumerate_parallel_jacobi(local_model, options)
    check(found, local_model.law_of_sequences(PLAIN))
    assert found.calls < RowOrder.over(local_model.grid, lead).calls


@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
@pytest.mark.parametrize("initial_draft", ["uniform", "up"])
def test_parallel_jacobi_of_three_rows(coupling, acceptance, initial_draft):
    local_model = local(3, 2, 1)
    options = ParallelJacobiOptions(2, 1, 1, coupling, acceptance, initial_draft)
    check(enumerate_parallel_jacobi(local_model, options), local_model.law_of_sequences(PLAIN))


@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
def test_parallel_jacobi_with_a_lead_of_the_width_is_lossless(coupling, acceptance):
    whole = model(2, 4)
    options = ParallelJacobiOptions(2, 2, 4, coupling, acceptance, "left")
    check(enumerate_parallel_jacobi(whole, options), whole.law_of_sequences(PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
@pytest.mark.parametrize("initial_draft", ["left", "uniform", "up"])
def test_parallel_jacobi_of_longer_rows(coupling, acceptance, initial_draft):
    local_model = local(2, 5, 2)
    options = ParallelJacobiOptions(2, 2, 2, coupling, acceptance, initial_draft)
    check(enumerate_parallel_jacobi(local_model, options), local_model.law_of_sequences(PLAIN))


# -- what adaptive ZipAR's rule defines ------------------------------------------------------------------------------


def partial_law(
    whole: TabularModel, width: int, column: int, above: tuple[int, ...], known: int, own: tuple[int, ...]
):
    """Law of the second row's `column` when `known` tokens of the row above are known: list of probabilities."""
    seen = list(above[:known]) + [1] * (width - known)  # a slot that is not seen reads as the last id
    if column == 0 and known < width:
        seen[-1] = above[known - 1]  # the stand-in
    index = int("".join(map(str, [*seen, *own[:column]])), 2)
    return whole.logits[0, width + column, index].softmax(0).tolist()


def chain(laws: list[list[float]]) -> tuple[dict[tuple[int, int], float], list[list[float]], float]:
    """The held token of a row start, over laws p_s .. p_width (the paper's rule).

    Returns the probabilities of (token, index of the law at which the row starts), the laws of the held token if
    testing went on to the end, and the probability that it would have been refused after the first success.
    """
    started: dict[tuple[int, int], float] = {}
    held: dict[tuple[int, int | None, bool], float] = {(x, None, False): p for x, p in enumerate(laws[0])}
    if len(laws) == 1:
        return {(x, 0): p for x, p in enumerate(laws[0])}, [laws[0]], 0.0
    marginals = [laws[0]]
    for j in range(1, len(laws)):
        new: dict[tuple[int, int | None, bool], float] = {}
        rest = [max(0.0, b - a) for a, b in zip(laws[j - 1], laws[j], strict=True)]

        def add(key: tuple[int, int | None, bool], probability: float, new=new) -> None:
            new[key] = new.get(key, 0.0) + probability

        for (x, since, refused), probability in held.items():
            keep = min(1.0, laws[j][x] / laws[j - 1][x])
            if since is None:
                started[x, j] = started.get((x, j), 0.0) + probability * keep
            add((x, j if since is None else since, refused), probability * keep)
            for y in range(2):
                share = probability * (1 - keep) * rest[y] / (sum(rest) or 1.0)
                add((y, since, since is not None), share)
                if since is None and j == len(laws) - 1:
                    started[y, j] = started.get((y, j), 0.0) + share
        held = new
        marginals.append([sum(p for (x, _, _), p in held.items() if x == token) for token in range(2)])
    return started, marginals, sum(p for (_, _, refused), p in held.items() if refused)


@pytest.mark.parametrize(("width", "window"), [(3, 1), (4, 1), (4, 2), (3, 3)])
def test_adaptive_starts_follow_the_rule_of_the_paper(width, window):
    whole = model(2, width, scale=2.0)
    first_rows = TabularModel(TokenGrid(1, width), 2, order=width - 1)
    first_rows.logits = torch.cat(
        [whole.logits[:, slot, None, : 2 ** (width - 1)] for slot in range(width)], 1
    )  # contexts of row 0 have leading zeros
    row_law = first_rows.law_of_sequences(PLAIN)
    want = torch.zeros(2 ** (2 * width), dtype=torch.float64)
    late = 0.0
    for index, above in enumerate(itertools.product(range(2), repeat=width)):
        laws = [partial_law(whole, width, 0, above, known, ()) for known in range(window, width + 1)]
        started, marginals, refused_later = chain(laws)
        assert sum(started.values()) == pytest.approx(1, abs=1e-12)
        for marginal, law in zip(marginals, laws, strict=True):
            assert marginal == pytest.approx(law, abs=1e-12)  # tested to the end, the held token is exact
        moved = (
            sum(abs(sum(p for (x, _), p in started.items() if x == t) - laws[-1][t]) for t in range(2)) / 2
        )
        assert moved <= refused_later + 1e-12  # what stopping early costs
        late = max(late, moved)
        for own in itertools.product(range(2), repeat=width):
            for (token, j), probability in started.items():
                if token != own[0]:
                    continue
                for column in range(1, width):
                    known = min(width, window + j + column)
                    probability *= partial_law(whole, width, column, above, known, own)[own[column]]
                want[index * 2**width + int("".join(map(str, own)), 2)] += float(row_law[index]) * probability
    assert late > 1e-2 or window >= width - 1
    check(enumerate_zipar(whole, window, adaptive=True), want)


# -- the distance that is measured -----------------------------------------------------------------------------------


def test_zipar_measures_the_enumerated_distance():
    """Mean total variation of the laws used, by loops over all samples; the sampler's estimate comes within 5%."""
    width, window = 3, 1
    whole = model(2, width)
    total, law = 0.0, torch.zeros(2**6, dtype=torch.float64)
    for index, tokens in enumerate(itertools.product(range(2), repeat=6)):
        probability, moved = 1.0, 0.0
        for slot in range(6):
            row, column = divmod(slot, width)
            raster = whole.logits[0, slot, int("0" + "".join(map(str, tokens[:slot])), 2)].softmax(0).tolist()
            used = raster
            if row:
                known = min(width, window + column)
                used = partial_law(whole, width, column, tokens[:width], known, tokens[width:])
            probability *= used[tokens[slot]]
            moved += sum(abs(a - b) for a, b in zip(raster, used, strict=True)) / 2
        law[index] = probability
        total += probability * moved
    found = enumerate_zipar(whole, window, measured=True)
    check(found, law)
    assert found.moved == pytest.approx(total, abs=1e-10)
    check_measured(ZipARSampler(window, measure=True), whole, found)


@pytest.mark.parametrize(
    "sampler", [ZipARSampler(2, measure=True), ParallelJacobiSampler(2, 2, 1, measure=True)]
)
def test_the_distance_measured_is_that_of_the_enumeration(sampler):
    whole = model(2, 4) if isinstance(sampler, ZipARSampler) else model(2, 3)
    if isinstance(sampler, ZipARSampler):
        found = enumerate_zipar(whole, sampler.config["window"], measured=True)
    else:
        found = enumerate_parallel_jacobi(whole, sampler.options, measured=True)
    check_measured(sampler, whole, found)


def check_measured(sampler, whole: TabularModel, found: Enumeration) -> None:
    # The sum over slots bounds the distance of whole samples.
    assert 1e-2 < distance(found.law, whole.law_of_sequences(PLAIN)) <= found.moved
    generator = torch.Generator().manual_seed(0)
    trace = sampler(whole, None, law=PLAIN, batch_size=4000, generator=generator).trace
    assert trace.divergence * whole.grid.num_tokens == pytest.approx(found.moved, rel=0.05)
    assert float(trace.moved_mass.mean()) == pytest.approx(found.moved, rel=0.05)
    assert float(trace.target_calls.double().mean()) == pytest.approx(found.calls, rel=0.02)


# -- planted bugs ----------------------------------------------------------------------------------------------------


def test_catches_a_residual_replaced_by_the_target(monkeypatch):
    local_model = local(2, 3, 1)
    want = local_model.law_of_sequences(PLAIN)
    monkeypatch.setattr(parallel_jacobi, "residual", lambda target, draft_law: target)
    for coupling in ("gumbel", "independent", "maximal"):
        options = ParallelJacobiOptions(2, 2, 1, coupling, "exact", "left")
        assert distance(enumerate_parallel_jacobi(local_model, options).law, want) > 1e-2


def test_catches_labels_of_the_neighbouring_draft():
    local_model = local(2, 4, 1)
    want = local_model.law_of_sequences(PLAIN)
    for coupling in ("gumbel", "independent", "maximal"):
        options = ParallelJacobiOptions(2, 2, 1, coupling, "exact", "left")

        def step(model, order, state, law, noise, watch, options=options):
            parallel_jacobi.parallel_jacobi_step(model, order, state, law, noise, options, watch)
            state.draft_law = state.draft_law.unflatten(1, (2, 3))[:, :, [1, 0, 2]].flatten(1, 2)

        found = enumerate_parallel_jacobi(local_model, options, step=step)
        assert distance(found.law, want) > 1e-3


def test_catches_an_adaptive_start_that_draws_anew_instead_of_from_the_residual(monkeypatch):
    whole = model(2, 3, scale=2.0)
    want = enumerate_zipar(whole, 1, adaptive=True).law
    monkeypatch.setattr(rows, "residual", lambda target, draft_law: target)
    assert distance(enumerate_zipar(whole, 1, adaptive=True).law, want) > 1e-3
