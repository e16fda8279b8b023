"""The bookkeeping of Jacobi decoding by its kernels, in Triton's interpreter; `test_interpreted.py` runs this file."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tabular import TabularModel
from visual_spec.kernels import jacobi_step
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.drafts import LEFT, PREVIOUS_FRAME, UP
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster import jacobi_identical
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.jacobi_identical import FedWindow, IdenticalState, close, enter, opened

ROWS = 12
GRIDS = [TokenGrid(6, 7), TokenGrid(3, 4, 3)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a search of few tokens takes several."""
    monkeypatch.setattr(jacobi_step, "BLOCK", 8)


def on_gpu(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    monkeypatch.setattr(jacobi_identical, "on_gpu", lambda tensor: value)


def state_of(
    grid: TokenGrid, window: int, *, pictured: bool, judged: bool, round: int | Tensor = 5
) -> IdenticalState:
    """A batch in the middle: few different tokens, so that many agree; a row has one token, one is complete."""
    generator, size = torch.Generator().manual_seed(0), grid.num_tokens
    draw = lambda low, high: torch.randint(low, high, (ROWS, size + window), generator=generator)  # noqa: E731
    lengths = torch.randint(1, size + 1, (ROWS,), generator=generator)
    lengths[:3] = torch.tensor([1, size, size - 1])
    places, reach = torch.arange(size + window), torch.randint(1, 2 * window, (ROWS,), generator=generator)
    calls = draw(1, 5) * (places < (lengths + reach)[:, None])  # an earlier, wider call may have scored more
    steady = judged or not pictured
    return IdenticalState(
        cache=None,
        tokens=draw(0, 3),
        lengths=lengths,
        round=round,
        target_calls=torch.randint(1, 9, (ROWS,), generator=generator),
        commit_call=calls,
        meter=None,
        near_ties=torch.randint(0, 9, (ROWS,), generator=generator),
        window=window,
        inputs=draw(-1, 3),
        picture=draw(0, 3) if pictured else None,
        steady=draw(0, 3) if steady else None,
        copies_ahead=torch.randint(-1, 2, (ROWS,), generator=generator) if judged else None,
    )


def tensors_of(value: Any) -> dict[str, Tensor]:
    fields = value._asdict() if isinstance(value, FedWindow) else vars(value)
    return {name: one for name, one in fields.items() if isinstance(one, Tensor)}


@pytest.mark.parametrize("grid", GRIDS, ids=["picture", "clip"])
@pytest.mark.parametrize(("pictured", "judged"), [(False, True), (True, False), (False, False)])
def test_opens_a_window_as_the_host_does(monkeypatch, grid, pictured, judged):
    for width, count in ((1, 5), (9, 5), (9, 20), (8, 1)):
        found = {}
        for kernel in (False, True):
            on_gpu(monkeypatch, kernel)
            state = state_of(grid, 9, pictured=pictured, judged=judged)
            found[kernel] = tensors_of(opened(state, width, count, grid)), state.inputs
        (host, noted), (device, noted_there) = found.values()
        assert torch.equal(noted, noted_there)
        if host.get("copies") is None:  # none anywhere
            host["copies"] = torch.full_like(device["copies"], jacobi_identical.UNKNOWN)
        assert host.keys() == device.keys()
        assert all(torch.equal(host[name], device[name]) for name in host)
        if count > 1 and width > 1:
            assert host["replaced"].any() and not host["replaced"].all()
            assert not judged or (host["copies"] != jacobi_identical.UNKNOWN).any()


@pytest.mark.parametrize("grid", GRIDS, ids=["picture", "clip"])
@pytest.mark.parametrize(("pictured", "judged"), [(False, True), (True, False), (False, False)])
def test_closes_a_window_as_the_host_does(monkeypatch, grid, pictured, judged):
    """The same state afterwards, of rows that are not complete, and their results."""
    generator = torch.Generator().manual_seed(1)
    for width, initial, ties in product((1, 4, 9), (LEFT, UP, PREVIOUS_FRAME), (False, True)):
        if initial == PREVIOUS_FRAME and grid.frames == 1:
            continue
        run: Any = SimpleNamespace(model=SimpleNamespace(grid=grid), num_tokens=grid.num_tokens)
        drawn = torch.randint(0, 3, (ROWS, width), generator=generator)
        near = torch.rand(drawn.shape, generator=generator) < 0.5 if ties else None
        after = []
        for kernel in (False, True):
            on_gpu(monkeypatch, kernel)
            state = state_of(grid, 9, pictured=pictured, judged=judged, round=torch.tensor(5))
            window = opened(state, width, 5, grid)
            # Half of the draws confirm their drafts, so that rows advance by different numbers.
            right = torch.rand(drawn.shape, generator=torch.Generator().manual_seed(2)) < 0.5
            draws = drawn.clone()
            draws[:, :-1] = torch.where(right[:, :-1], window.fed[:, 1:], drawn[:, :-1])
            entered = close(initial, run, state, window, draws, near)
            assert entered == kernel
            if not entered:
                enter(initial, run, state, torch.empty(0), window.slots[:, -1:])
            after.append(tensors_of(state))
        host, device = after
        assert host.keys() == device.keys()
        open_rows = host["lengths"] < grid.num_tokens
        assert open_rows.any() and not open_rows.all()
        for name, value in host.items():
            there = device[name]
            if value.dim() == 2:
                assert torch.equal(value[:, : grid.num_tokens], there[:, : grid.num_tokens]), name
                assert torch.equal(value[open_rows], there[open_rows]), name
            else:
                assert torch.equal(value, there), name


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(initial_draft="last_law"),
        dict(acceptance="exact", drafts="repaired"),
        dict(window=3, initial_draft="up", redrafts=1),
        dict(initial_draft="uniform", drafts="carried"),
        dict(end=2),
    ],
)
def test_decodes(monkeypatch, settings):
    """Tokens, and the call that committed each, are those of the host."""
    settings = dict(settings)
    law = TokenLaw(end=settings.pop("end", None))
    model = TabularModel(TokenGrid(3, 4), 3, order=2, conditions=2, dependence=0.5)
    monkeypatch.setattr("visual_spec.samplers.core.state.fits", lambda logits: False)
    results = []
    for kernel in (False, True):
        on_gpu(monkeypatch, kernel)
        sampler = SpeculativeJacobiSampler(**{"window": 6, **settings})
        given: Any = dict(law=law, generator=torch.Generator().manual_seed(3), batch_size=2)
        results.append(sampler(model, torch.tensor([1, 0]), **given))
    host, device = results
    assert torch.equal(host.tokens, device.tokens)
    assert torch.equal(host.trace.commit_call, device.trace.commit_call)
    assert torch.equal(host.trace.target_calls, device.trace.target_calls)
