"""The two kernels of `split_draw` in Triton's interpreter; `test_split_draw.py` runs this file."""

from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import language as tl

from tests.helpers.tabular import TabularModel
from tests.kernels.laws import LAWS, Window, window
from visual_spec.kernels import draw as whole
from visual_spec.kernels import law as law_module
from visual_spec.kernels import split_draw as module
from visual_spec.kernels.draw import draw_reference, whole_draw_triton
from visual_spec.kernels.law import largest_reference
from visual_spec.kernels.philox import philox_log_exponential
from visual_spec.kernels.split_draw import split_draw_triton
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core import state
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

STREAM, ROUND = 2, 7


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies have several chunks, and several tiles of other sizes."""
    sizes(monkeypatch, 32, 64)


def sizes(monkeypatch: pytest.MonkeyPatch, chunk: int, tile: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    for owner in (whole, module):
        monkeypatch.setattr(owner, "TILE", tile)


def arguments(here: Window) -> Any:
    return here.logits, here.keys, here.slots, torch.tensor(ROUND), STREAM, here.numbers


def drawn(here: Window, margins: bool = True) -> Tensor:
    """By the kernels; equal bit by bit to the one kernel's, and to the definition up to rounding."""
    given = arguments(here)
    found, expected = split_draw_triton(*given, margins=margins), draw_reference(*given, margins=margins)
    assert all(
        torch.equal(*pair) for pair in zip(found, whole_draw_triton(*given, margins=margins), strict=True)
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2], rtol=0, atol=2e-5)
    return found[0]


def tokens_of(here: Window, run: Any = split_draw_triton) -> Tensor:
    return run(*arguments(here))[0]


def in_double_precision(here: Window) -> tuple[Tensor, Tensor]:
    """Tokens and margins [B, W] of a law with filters, slot by slot from sorted lists, in float64."""
    count, law = here.logits.shape[-1], here.law
    times = philox_log_exponential(here.keys, here.slots, count, STREAM, ROUND, torch.float64)
    tokens, margins = torch.zeros_like(here.slots), torch.zeros(here.slots.shape, dtype=torch.float64)
    for b, w in torch.cartesian_prod(*map(torch.arange, here.slots.shape)).tolist():
        scores = here.logits[b, w].double()
        if law.guided and int(here.slots[b, w]) < here.numbers.guidance_until:
            other = here.logits[b + len(here.slots), w].double()
            open_ids = (scores > -torch.inf) & (other > -torch.inf)
            scores = torch.where(open_ids, other + law.guidance_scale * (scores - other), -torch.inf)
        values = (scores / law.temperature).tolist()
        order = sorted(values, reverse=True)
        kept = [value for value in values if value > -torch.inf]
        if law.top_k:
            kept = [value for value in kept if sum(more > value for more in order) < law.top_k]
        if law.top_p < 1:
            weights = {value: torch.tensor(value - order[0]).double().exp().item() for value in kept}
            mass = sum(weights[value] for value in kept)
            kept = [
                value
                for value in kept
                if sum(weights[more] for more in kept if more > value) < law.top_p * mass
            ]
        race = sorted(
            (times[b, w, token].item() - value, token) for token, value in enumerate(values) if value in kept
        )
        tokens[b, w] = race[0][1]
        margins[b, w] = race[1][0] - race[0][0] if len(race) > 1 else torch.inf
    return tokens, margins


@pytest.mark.fast_sets(3)
@pytest.mark.parametrize("name", LAWS)
def test_draws_what_one_kernel_draws(name):
    here = window(LAWS[name], 2, 1, 100)
    assert torch.equal(drawn(here), here.noise.categorical(here.target, here.slots, STREAM, ROUND))


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize(
    "law",
    [
        TokenLaw(top_k=9),
        TokenLaw(top_p=0.6, temperature=0.5),
        TokenLaw(guidance_scale=3.0, top_k=30, top_p=0.5),
        TokenLaw(guidance_scale=2.0, guidance_until=50, top_k=3),
        TokenLaw(guidance_scale=1.5, temperature=2.0),
    ],
    ids=str,
)
def test_draws_the_law_of_double_precision(law):
    here = window(law, 2, 2, 100, seed=11)
    tokens, margins = in_double_precision(here)
    found, finite, margin = split_draw_triton(*arguments(here), margins=True)
    assert torch.equal(found, tokens) and finite.all()
    largest = largest_reference(here.logits, law.guidance_scale != 1, law.guidance_scale)
    torch.testing.assert_close(margin.double() * largest, margins, rtol=0, atol=2e-5)


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("vocab_size, chunk, tile", [(1000, 128, 256), (16387, 1024, 2048)])
def test_large_vocabularies(monkeypatch, vocab_size, chunk, tile):
    sizes(monkeypatch, chunk, tile)
    for dtype, law in [
        (torch.bfloat16, TokenLaw(guidance_scale=2.0, top_k=vocab_size // 10)),
        (torch.float16, TokenLaw(top_p=0.8, allowed=(3, vocab_size - 2))),
    ]:
        drawn(window(law, 1, 1, vocab_size, dtype=dtype), False)


@pytest.mark.slow
def test_thresholds_at_hard_places(monkeypatch):
    """Ties at the threshold, all scores equal, spreads of all sizes; and filters that keep nearly all, or one token."""
    sizes(monkeypatch, 64, 128)
    ties = torch.arange(70) // 5 * 1.0
    wide = torch.cat([torch.tensor([3e38, -3e38, 1e30, -1e30]), torch.linspace(-1e-3, 1e-3, 66)])
    for row in (ties, torch.zeros(70), wide, 1 + torch.arange(70) * 2.0**-23):
        for law in (
            TokenLaw(top_k=1),
            TokenLaw(top_k=7),
            TokenLaw(top_k=69),
            TokenLaw(top_k=70),
            TokenLaw(top_k=500),
            TokenLaw(top_p=0.05),
            TokenLaw(top_k=12, top_p=0.3),
        ):
            here = window(law, 1, 1, 70)
            here.logits = row.flip(0)[None, None].clone()
            drawn(here, law.top_k < 8)


@pytest.mark.slow
def test_draws_that_are_refused_again_and_again(monkeypatch):
    """The flattest laws and the narrowest filters: nearly every first token is refused, and many of the next."""
    sizes(monkeypatch, 64, 128)
    asked, real = [], module.weight_above

    def counted(*given: Any) -> Any:
        asked.append(given)
        return real(*given)

    monkeypatch.setattr(module, "weight_above", counted)
    for law in (TokenLaw(top_k=2), TokenLaw(top_p=0.03), TokenLaw(top_k=5, top_p=0.4)):
        asked.clear()
        here = window(law, 1, 3, 100, scale=0.5, seed=5)
        drawn(here)
        assert len(asked) > 3 * 3  # of three slots
        tokens, _ = in_double_precision(here)
        assert torch.equal(tokens, tokens_of(here))


@triton.jit
def _no_noise(key, slot, round, start, STREAM: tl.constexpr, BLOCKS: tl.constexpr):
    return tl.full([BLOCKS, 4], 0.5, tl.float32)


def test_ties_go_to_the_lowest_token(monkeypatch):
    """Without noise the race is one of scores, where equal ones tie."""
    for owner in (whole, module):
        monkeypatch.setattr(owner, "uniform_tile", _no_noise)
    for law, first in [
        (TokenLaw(), 0),
        (TokenLaw(top_k=3), 0),
        (TokenLaw(top_p=0.5), 0),
        (TokenLaw(allowed=(6, 90)), 6),
    ]:
        here = window(law, 1, 2, 100)
        here.logits[:, 0] = 0.0
        here.logits[:, 1] = -1.0
        here.logits[:, 1, [77, 41, 69]] = 2.0
        found, _, margin = split_draw_triton(*arguments(here), margins=True)
        assert found.tolist() == [[first, 41]] and (margin == 0).all()
        assert torch.equal(tokens_of(here, whole_draw_triton), found)


def test_logits_that_define_no_law_end_and_are_reported():
    for law in (TokenLaw(), TokenLaw(top_k=4, top_p=0.9), TokenLaw(top_k=4), TokenLaw(temperature=0)):
        here = window(law, 1, 5, 70)
        here.logits[0, 0, 5] = torch.nan
        here.logits[0, 1, 60] = torch.inf
        here.logits[0, 2] = -torch.inf
        here.logits[0, 3, 3:] = torch.nan
        tokens, finite, _ = split_draw_triton(*arguments(here), margins=True)
        assert finite.tolist() == [[False, False, False, False, True]]
        assert ((tokens >= 0) & (tokens < 70)).all()
        assert torch.equal(tokens[0, 4], tokens_of(here, draw_reference)[0, 4])


def test_a_sample_does_not_depend_on_the_others():
    here = window(LAWS["both"], 3, 2, 100)
    tokens = tokens_of(here)
    logits = here.logits[[1, 4], 1:]
    alone = Window(logits, here.keys[1:2], here.slots[1:2, 1:], here.numbers, here.law)
    assert torch.equal(split_draw_triton(*arguments(alone))[0], tokens[1:2, 1:])


def test_without_a_round_it_is_round_0():
    here = window(LAWS["both"], 1, 2, 100)
    logits, keys, slots, _, stream, numbers = arguments(here)
    for run in (split_draw_triton, whole_draw_triton):
        none, zero = (run(logits, keys, slots, round, stream, numbers) for round in (None, torch.tensor(0)))
        assert all(torch.equal(*pair) for pair in zip(none, zero, strict=True))


def test_samplers_draw_by_them(monkeypatch):
    sizes(monkeypatch, 64, 128)
    model = TabularModel(TokenGrid(2, 3), 70, order=1, conditions=2, dependence=0.2, dtype=torch.float32)

    def decode() -> Any:
        generator = torch.Generator().manual_seed(3)
        settings: dict[str, Any] = dict(
            law=TokenLaw(guidance_scale=2.0, top_k=9), generator=generator, batch_size=2
        )
        return SpeculativeJacobiSampler(3)(model, torch.tensor([1, 0]), **settings)

    expected, used = decode(), []
    monkeypatch.setattr(whole, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(state, "fits", lambda logits: logits.dtype == torch.float32)
    monkeypatch.setattr(whole, "splits", lambda *given: used.append(given) or True)
    assert torch.equal(decode().tokens, expected.tokens) and used


def test_the_interpreter_runs_them():
    assert law_module.triton is not None and not isinstance(module._split_kernel, triton.JITFunction)
