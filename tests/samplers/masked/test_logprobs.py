"""Log-probabilities of tokens of masked models: each call played again, from what the finished trace says it saw."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.causal_tables import TabularCausalLayer, TabularFeatureModel
from tests.helpers.frame_tables import TableFrameModel
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.self_speculative.sampler import SelfSpeculativeMaskedSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.frames import FrameMaskedSampler
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule
from visual_spec.samplers.masked.speculative import SpeculativeMaskedSampler

ONE = TabularFeatureModel(TokenGrid(1, 5), 3, conditions=3)
ROWS = torch.tensor([0, 2, 1])
PLAIN, CUT = TokenLaw(), TokenLaw(guidance_scale=1.8, temperature=0.7, top_k=2)
NEAR: dict[str, Any] = dict(rtol=0, atol=1e-5, check_dtype=False, equal_nan=True)


def drawn(sampler: Any, model: Any, law: TokenLaw, **more: Any) -> Any:
    request: dict[str, Any] = dict(law=law, batch_size=3, output_logprobs=True, **more)
    return sampler(model, ROWS, generator=seeded(0, 1, 2), **request)


def logits_at(model: TabularMaskedModel, tokens: Tensor, seen: Tensor, codebook: int = 0) -> Tensor:
    """Logits [2, V, ...] of rows and of no condition: [2 * 3, L, V], where tokens [3, L, K] are `seen`."""
    state = model.prepare(ROWS, batch_size=3, guided=True)
    return model(state, tokens.masked_fill(~seen, model.mask_id), codebook)


def both(logits: Tensor, tokens: Tensor, law: TokenLaw) -> tuple[Tensor, Tensor]:
    """Under the law and under the model itself, of logits [6, V] and tokens [3]: [3] each."""
    guided = logits if law.guided else logits[:3]
    under, own = law(guided[:, None], law.guided)[:, 0], logits[:3].log_softmax(-1)
    return tuple(part.gather(-1, tokens[:, None])[:, 0] for part in (under, own))  # type: ignore[return-value]


@pytest.mark.parametrize("law", [PLAIN, CUT])
@pytest.mark.parametrize("num_drafts", [0, 2, 7])
@pytest.mark.parametrize("acceptance", ["identical", "exact"])
def test_one_token_a_call_and_what_a_window_of_rows_commits(num_drafts, acceptance, law):
    result = drawn(SpeculativeMaskedSampler(num_drafts, "raster", acceptance), ONE, law)
    for slot in range(5):
        seen = (torch.arange(5) < slot).expand(3, -1)[..., None]
        logits = logits_at(ONE, result.tokens[..., None], seen)[:, slot]
        under, own = both(logits, result.tokens[:, slot], law)
        torch.testing.assert_close(result.trace.logprobs[:, slot], under, **NEAR)
        torch.testing.assert_close(result.trace.model_logprobs[:, slot], own, **NEAR)


@pytest.mark.parametrize("law", [PLAIN, CUT])
@pytest.mark.parametrize("settings", [{}, {"num_drafts": 1}, {"acceptance": "exact"}], ids=str)
def test_groups_of_a_causal_layer(settings, law):
    layer = TabularCausalLayer(ONE)
    sampler = SelfSpeculativeMaskedSampler(steps=2, order="raster", **settings)
    result = drawn(sampler, ONE, law, causal_layer=layer)
    tokens, calls = result.tokens, result.trace.commit_call
    assert len(calls[0].unique()) == 2
    for slot in range(5):
        earlier = calls < calls[:, slot, None]
        logits = logits_at(ONE, tokens[..., None], earlier[..., None])[:, slot].clone()
        for other in range(slot):
            inside = (calls[:, other] == calls[:, slot])[:, None]
            logits += torch.where(inside, layer.table[other, tokens[:, other], slot], 0).repeat(2, 1)
        under, own = both(logits, tokens[:, slot], law)
        torch.testing.assert_close(result.trace.logprobs[:, slot], under, **NEAR)
        torch.testing.assert_close(result.trace.model_logprobs[:, slot], own, **NEAR)


BOOKS = TabularMaskedModel(TokenGrid(1, 3, codebooks=2), 2, conditions=3)
SETTINGS: dict[str, Any] = {
    "as it comes": MaskedSampler(steps=3),
    "noise and spans": MaskedSampler(steps=2, span=2, choice=Choice(choice_temperature=2.0)),
    "falling": MaskedSampler(steps=3, by_step=LawByStep(temperature="falling")),
    "guided first": MaskedSampler(steps=3, by_step=LawByStep(guidance="ramp", guided_steps=2)),
    "halton": MaskedSampler(steps=4, choice=Choice(score="halton")),
    "entropy": MaskedSampler(steps=4, schedule=Schedule(entropy_bound=0.6)),
    "greedy": MaskedSampler(steps=3, choice=Choice(greedy=True)),
    "credit": MaskedSampler(steps=3, by_step=LawByStep(credit=0.7)),
}


def law_of(sampler: Any, law: TokenLaw, step: int, steps: int) -> TokenLaw:
    """The law of a step, by the words of `LawByStep`."""
    config, scale, temperature = sampler.config, law.guidance_scale, law.temperature
    if config.guidance == "ramp" and law.guided:
        scale = 1 + (scale - 1) * step / (steps - 1)
    if config.guided_steps is not None and step >= config.guided_steps:
        scale = 1.0
    if config.temperature == "falling" and temperature:
        temperature = max(temperature * (1 - (step + 1) / steps), 0.01)
    return replace(law, guidance_scale=scale, temperature=temperature)


@pytest.mark.parametrize("law", [PLAIN, CUT, TokenLaw(temperature=0.0)])
@pytest.mark.parametrize("model", [ONE, BOOKS], ids=["one codebook", "two"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_groups_by_what_their_call_saw(name, model, known, law):
    sampler = SETTINGS[name]
    if name == "entropy" and model is BOOKS:
        return
    more, shape = {}, (3, model.grid.num_tokens, model.grid.codebooks)
    if known:
        given = torch.full(shape, model.mask_id)
        given[0, 1], given[2, 0] = 1, 0
        more = {"known_tokens": given}
    result = drawn(sampler, model, law, **more)
    assert result.trace.logprobs_law == ("target" if name == "greedy" else "drawn")
    assert result.trace.logprobs.shape == result.trace.model_logprobs.shape == result.tokens.shape
    tokens, calls = result.tokens.view(shape), result.trace.entry_call
    found = [part.view(shape) for part in (result.trace.logprobs, result.trace.model_logprobs)]
    wanted, steps = [torch.full(shape, torch.nan) for _ in found], sampler.config.steps
    for call in range(int(calls.max()) + 1):
        codebook, step = divmod(call, steps)
        logits = logits_at(model, tokens, calls < call, codebook)
        for slot in range(shape[1]):
            pair = both(logits[:, slot], tokens[:, slot, codebook], law_of(sampler, law, step, steps))
            here = calls[:, slot, codebook] == call
            for whole, values in zip(wanted, pair, strict=True):
                whole[:, slot, codebook] = torch.where(here, values.float(), whole[:, slot, codebook])
    assert bool(wanted[0].isnan().any()) == known
    torch.testing.assert_close(found[1], wanted[1], **NEAR)
    if name != "credit":  # which changes the law by all calls before
        torch.testing.assert_close(found[0], wanted[0], **NEAR)


@pytest.mark.parametrize("law", [PLAIN, CUT])
@pytest.mark.parametrize("hidden", [0.0, 0.5])
def test_frames_by_what_is_written_of_those_before(hidden, law):
    model = TableFrameModel(TokenGrid(1, 4, 3), 3, conditions=3)
    result = drawn(FrameMaskedSampler(steps=2, history_hidden=hidden), model, law)
    tokens, calls = (part.view(3, 3, 4) for part in (result.tokens, result.trace.entry_call))
    state = model.prepare(ROWS, batch_size=3, guided=True)
    found = [part.view(3, 3, 4) for part in (result.trace.logprobs, result.trace.model_logprobs)]
    for frame in range(3):
        if frame:
            written = tokens[:, frame - 1].clone()
            written[:, [round(i * 4 / round(4 * hidden)) for i in range(round(4 * hidden))]] = model.mask_id
            model.write(state, torch.cat([written, torch.full_like(written, model.mask_id)]))
        for call in calls[:, frame].unique():
            seen = calls[:, frame] < call
            logits = model(state, tokens[:, frame].masked_fill(~seen, model.mask_id))
            for slot in range(4):
                here = calls[:, frame, slot] == call
                for part, values in zip(
                    found, both(logits[:, slot], tokens[:, frame, slot], law), strict=True
                ):
                    torch.testing.assert_close(part[here, frame, slot], values[here], **NEAR)
