"""Loop level: the exact law of whole sequences, by enumeration of every branch of the real sampler step."""

import pytest

from tests.exactness.enumeration import PLAIN, Enumeration, Enumerator, distance
from tests.exactness.planted import old_label_step, target_for_residual
from tests.helpers.drafting_sequences import three_tokens as model
from tests.helpers.sampler_settings import COMBINATIONS, EXACT
from tests.helpers.tabular import TabularModel
from visual_spec.samplers.core import drafts, verification
from visual_spec.samplers.core.drafts import INITIAL_DRAFTS, Draft
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import RESIDUAL, TOKEN
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


def check(model: TabularModel, law: TokenLaw, *settings) -> Enumeration:
    found = Enumerator(SpeculativeJacobiSampler(*settings), model, law).run()
    assert distance(found, model, law) < 1e-10
    return found


@pytest.mark.parametrize("initial_draft", INITIAL_DRAFTS)
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_every_combination_is_lossless(window, coupling, acceptance, initial_draft):
    found = check(model(), PLAIN, window, coupling, acceptance, initial_draft)
    if window == 1:
        assert found.calls == pytest.approx(4)
    else:
        assert found.calls < {2: 3.5, 3: 3.25}[window]  # and it saves calls


LAWS = {
    "guidance": TokenLaw(guidance_scale=2.5),
    "guidance of two slots": TokenLaw(guidance_scale=2.5, guidance_until=2),
    "top-k": TokenLaw(top_k=2),
    "top-p": TokenLaw(top_p=0.8),
    "temperature": TokenLaw(temperature=0.7),
    "greedy": TokenLaw(temperature=0.0),
    "allowed": TokenLaw(allowed=(1, 3)),
    "all": TokenLaw(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9),
}


@pytest.mark.fast_sets(32)
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_lossless_under_guidance_and_filters(law, coupling, acceptance, window):
    for initial_draft in ("uniform", "last_law") if window == 2 else ("left",):
        check(model(seed=1), law, window, coupling, acceptance, initial_draft)


@pytest.mark.parametrize("initial_draft", ["left", "last_law"])
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
def test_lossless_on_a_longer_sequence(coupling, acceptance, initial_draft):
    """L = 5 is the shortest at which the coupling of a draft that was refused once changes what comes after."""
    check(model(1, 5), PLAIN, 3, coupling, acceptance, initial_draft)


@pytest.mark.slow
@pytest.mark.parametrize("initial_draft", INITIAL_DRAFTS)
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
def test_lossless_on_a_longer_sequence_from_every_initial_draft(coupling, acceptance, initial_draft):
    check(model(1, 5, seed=3), PLAIN, 3, coupling, acceptance, initial_draft)


@pytest.mark.slow
@pytest.mark.parametrize("initial_draft", ["left", "up"])
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
def test_lossless_where_left_and_up_differ(coupling, acceptance, initial_draft):
    check(model(2, 3, order=2), PLAIN, 3, coupling, acceptance, initial_draft)


@pytest.mark.slow
@pytest.mark.parametrize("initial_draft", INITIAL_DRAFTS)
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
def test_lossless_in_a_window_as_long_as_the_sequence(coupling, acceptance, initial_draft):
    check(model(seed=4), PLAIN, 4, coupling, acceptance, initial_draft)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("initial_draft", ["uniform", "last_law"])
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
def test_lossless_under_guidance_and_filters_in_a_window_of_three(law, coupling, acceptance, initial_draft):
    check(model(seed=1), law, 3, coupling, acceptance, initial_draft)


# ----------------------------------------------------------------------------------------------- planted mistakes


def off(*settings) -> float:
    """TV between what a mistaken sampler returns and the law of the model."""
    return distance(Enumerator(SpeculativeJacobiSampler(*settings), model()).run(), model())


@pytest.mark.parametrize("coupling, acceptance", EXACT)
def test_catches_a_residual_replaced_by_the_target(monkeypatch, coupling, acceptance):
    monkeypatch.setattr(verification, "residual", target_for_residual)
    assert off(2, coupling, acceptance, "uniform") > 1e-2


def test_catches_an_old_label_on_an_accepted_draft(monkeypatch):
    monkeypatch.setattr(SpeculativeJacobiSampler, "step", old_label_step)
    assert off(3, "maximal", "exact", "uniform") > 1e-3


def test_catches_a_replacement_with_the_noise_of_the_slot(monkeypatch):
    """Under Gumbel coupling the slot's noise made the draft that was refused: it is not fresh."""

    def stale_residual_noise(self, run, state):
        draw = run.noise.categorical

        def categorical(log_probs, slots, stream, round=0):
            return draw(log_probs, slots, *((TOKEN, 0) if stream == RESIDUAL else (stream, round)))

        run.noise.categorical = categorical
        real_step(self, run, state)

    real_step = SpeculativeJacobiSampler.step
    monkeypatch.setattr(SpeculativeJacobiSampler, "step", stale_residual_noise)
    assert off(2, "gumbel", "exact", "last_law") > 1e-3


def test_catches_a_uniform_draft_drawn_from_fewer_tokens_than_its_label_says(monkeypatch):
    real_draft = drafts.uniform_tokens
    monkeypatch.setattr(drafts, "uniform_tokens", lambda *given: real_draft(*given).clamp(max=1))
    assert off(2, "independent", "exact", "uniform") > 1e-2


def test_catches_drafts_that_are_read_where_nothing_was_drafted(monkeypatch):
    """What lies after the drafts is scrubbed between calls, so that reading it shows."""

    def one_further(self, run, state):
        slots = state.next_slots(self.window - 1) + 1
        return Draft(state.tokens.gather(1, slots), state.label, "scratch")

    monkeypatch.setattr(SpeculativeJacobiSampler, "propose", one_further)
    assert off(2, "independent", "exact", "last_law") > 1e-3
