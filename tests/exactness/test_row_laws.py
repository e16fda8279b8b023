"""Sequence laws of the row-parallel samplers, by enumeration of their real steps.

They are not lossless, but what they are is exact: where a model ignores the tokens that a row-parallel column may not
see, the law is the autoregressive one, and elsewhere it is the one that the papers' rules define.
"""

import itertools

import pytest
import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumeration, Enumerator
from tests.exactness.enumeration import distance as checked_distance
from tests.exactness.planted import target_for_residual
from tests.exactness.regions import total_variation as distance
from tests.helpers.sampler_settings import COMBINATIONS
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.parallel_jacobi import ParallelJacobiSampler
from visual_spec.samplers.core import verification
from visual_spec.samplers.orders import zipar
from visual_spec.samplers.orders.row_order import RowOrder
from visual_spec.samplers.orders.zipar import ZipARSampler


def enumerate_zipar(
    model: TabularModel, window: int, *, adaptive: bool = False, measured: bool = False
) -> Enumeration:
    return Enumerator(ZipARSampler(window, adaptive, measured), model).run()


def enumerate_parallel_jacobi(model: TabularModel, *settings) -> Enumeration:
    return Enumerator(ParallelJacobiSampler(*settings), model).run()


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


def check(found: Enumeration, want: Tensor | TabularModel) -> None:
    assert checked_distance(found, want) < 1e-10


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("height", "width", "window"), [(2, 3, 1), (2, 4, 2), (3, 3, 2), (4, 2, 1)])
def test_zipar_is_exact_for_a_model_that_ignores_what_is_not_seen(height, width, window, adaptive):
    local_model = local(height, width, window)
    found = enumerate_zipar(local_model, window, adaptive=adaptive)
    check(found, local_model)
    whole = model(height, width)  # which is not so for any other model
    apart = checked_distance(enumerate_zipar(whole, window, adaptive=adaptive), whole)
    assert apart > 1e-2 or (adaptive and window == width - 1)


@pytest.mark.parametrize("lead", [1, 2])
@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
def test_parallel_jacobi_is_exact_for_a_model_that_ignores_what_is_not_seen(coupling, acceptance, lead):
    local_model = local(2, 4, lead)  # the shortest rows in which a draft that was drawn again is tested
    found = enumerate_parallel_jacobi(local_model, 2, 2, lead, coupling, acceptance, "left")
    check(found, local_model)
    assert found.calls < RowOrder.over(local_model.grid, lead).calls


@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
@pytest.mark.parametrize("initial_draft", ["uniform", "up"])
def test_parallel_jacobi_of_three_rows(coupling, acceptance, initial_draft):
    local_model = local(3, 2, 1)
    check(enumerate_parallel_jacobi(local_model, 2, 1, 1, coupling, acceptance, initial_draft), local_model)


@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
def test_parallel_jacobi_with_a_lead_of_the_width_is_lossless(coupling, acceptance):
    whole = model(2, 4)
    check(enumerate_parallel_jacobi(whole, 2, 2, 4, coupling, acceptance, "left"), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
@pytest.mark.parametrize("initial_draft", ["left", "uniform", "up"])
def test_parallel_jacobi_of_longer_rows(coupling, acceptance, initial_draft):
    local_model = local(2, 5, 2)
    check(enumerate_parallel_jacobi(local_model, 2, 2, 2, coupling, acceptance, initial_draft), local_model)


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
        starts = [sum(p for (x, _), p in started.items() if x == token) for token in range(2)]
        moved = sum(abs(a - b) for a, b in zip(starts, laws[-1], strict=True)) / 2
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
    check_measured(sampler, whole, Enumerator(sampler, whole).run())


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
    monkeypatch.setattr(verification, "residual", target_for_residual)
    for coupling in ("gumbel", "independent", "maximal"):
        found = enumerate_parallel_jacobi(local_model, 2, 2, 1, coupling, "exact", "left")
        assert distance(found.law, want) > 1e-2


def test_catches_labels_of_the_neighbouring_draft(monkeypatch):
    local_model = local(2, 4, 1)
    want = local_model.law_of_sequences(PLAIN)
    real_step = ParallelJacobiSampler.step

    def step(self, run, state):
        real_step(self, run, state)
        rows = state.label.rows.unflatten(1, (2, 3))
        other = rows[:, :, [1, 0, 2]]
        state.label.rows = torch.where((rows >= 0) & (other >= 0), other, rows).flatten(1)

    monkeypatch.setattr(ParallelJacobiSampler, "step", step)
    for coupling in ("gumbel", "independent", "maximal"):
        found = enumerate_parallel_jacobi(local_model, 2, 2, 1, coupling, "exact", "left")
        assert distance(found.law, want) > 1e-3


def test_catches_an_adaptive_start_that_draws_anew_instead_of_from_the_residual(monkeypatch):
    whole = model(2, 3, scale=2.0)
    want = enumerate_zipar(whole, 1, adaptive=True).law
    monkeypatch.setattr(zipar, "residual", target_for_residual)
    assert distance(enumerate_zipar(whole, 1, adaptive=True).law, want) > 1e-3
