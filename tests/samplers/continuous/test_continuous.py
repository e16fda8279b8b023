"""Plain decoding of continuous tokens beside a straight-line computation, and what all such samplers refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.continuous import LABELS, LAW, noise_of, token
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.models.continuous import straight
from tests.models.continuous.tiny import calm, tiny_causal, tiny_mar
from visual_spec.models.core.orders import hidden_after
from visual_spec.samplers.continuous.base import ContinuousTrace
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.continuous.denoising import Chains
from visual_spec.samplers.continuous.drafted import SpeculativeContinuousSampler
from visual_spec.samplers.continuous.head import HeadSpeculativeSampler, _Walk
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ORDER


def calm_one(make: Any, size: float = 0.1, **settings: Any) -> Any:
    return calm(make(**settings), size)


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [None, "raster", [5, 3, *range(6, 16), 0, 1, 2, 4]], ids=str)
@pytest.mark.parametrize("steps", [None, 5])
def test_mar_is_the_published_loop(order, steps):
    model = calm_one(tiny_mar, head_kind="velocity")
    sampler = ContinuousSampler(steps, order, head_steps=4)
    found: Any = sampler(model, LABELS, law=LAW, generator=seeded(7, 8), batch_size=2)
    for row in range(2):
        noise = noise_of(7 + row)
        by_noise = noise.uniform(torch.arange(16)[None], ORDER, dtype=torch.float64)[0].argsort().tolist()
        places = {None: by_noise, "raster": list(range(16))}.get(
            order if isinstance(order, str | None) else "", order
        )
        tokens, known = torch.zeros(16, 3, dtype=torch.float64), torch.zeros(16, dtype=torch.bool)
        left, calls = 16, []
        for after in hidden_after(16, steps or 16)[:-1] + [0]:
            chosen = places[16 - left : 16 - after]
            scale = 1 + 2.0 * (16 - max(1, after)) / 16
            conditions = [
                straight.mar(model.state_dict(), 2, label, tokens, known)
                for label in (int(LABELS[row]), None)
            ]
            drawn = [
                token(
                    model, "diffloss.net", conditions[0][p], conditions[1][p], scale, p, noise, head_steps=4
                )
                for p in chosen
            ]
            for place, one in zip(chosen, drawn, strict=True):
                tokens[place], known[place] = one, True
            calls += [(place, len(calls)) for place in chosen]
            left = after
        check(found.tokens[row], tokens)
    assert found.trace.target_calls.tolist() == [steps or 16] * 2
    assert found.trace.head_calls.tolist() == [4 * (steps or 16)] * 2
    assert (
        found.trace.commit_call[1, places[0]] == 0
        and found.trace.commit_call[1, places[-1]] == (steps or 16) - 1
    )


@pytest.mark.parametrize("guidance", ["linear", "constant"])
@pytest.mark.parametrize(
    "chain",
    [dict(head_steps=4), dict(head_steps=4, eta=0.5, final_noise=0.1), dict(head_steps=4, eta=0.0)],
    ids=["published", "noise", "deterministic"],
)
@pytest.mark.parametrize("kind", ["velocity", "flow"])
def test_the_causal_model_is_drawn_slot_by_slot(kind, chain, guidance):
    places = [*range(15, -1, -1)]
    model = calm_one(tiny_causal, head_kind=kind, order=places)
    sampler = ContinuousSampler(guidance=guidance, **chain)
    found = sampler(model, LABELS, law=LAW, generator=seeded(7, 8), batch_size=2)
    noise, drawn = noise_of(8), torch.zeros(0, 3, dtype=torch.float64)
    for slot, place in enumerate(places):
        z, other = (straight.causal(model.state_dict(), 2, label, drawn, places)[-1] for label in (1, None))
        scale = 1 + 2.0 * (slot + 1) / 16 if guidance == "linear" else 3.0
        drawn = torch.cat([drawn, token(model, "head", z, other, scale, place, noise, **chain)[None]])
    check(found.tokens[1], drawn.flip(0))
    assert found.trace.commit_call[1].tolist() == places  # by place, the last one first


def test_settings_that_are_not_given_are_the_models_own():
    model = tiny_causal(head_kind="flow", head_steps=3, eta=0.7, final_noise=0.2)
    own = ContinuousSampler()(model, None, law=TokenLaw(), generator=seeded(1))
    same = ContinuousSampler(head_steps=3, eta=0.7, final_noise=0.2)
    bare = tiny_causal(head_kind="flow")
    bare.load_state_dict(model.state_dict())
    assert torch.equal(own.tokens, same(bare, None, law=TokenLaw(), generator=seeded(1)).tokens)
    other = ContinuousSampler(head_steps=3, eta=0.7, final_noise=0.0)
    assert not torch.equal(own.tokens, other(model, None, law=TokenLaw(), generator=seeded(1)).tokens)


def test_the_trace_counts_and_tells():
    trace = ContinuousSampler(head_steps=2)(tiny_causal(), None, law=TokenLaw(), generator=seeded(1)).trace
    assert isinstance(trace, ContinuousTrace) and trace.acceptance is None
    assert trace.summary().endswith("another law than plain decoding's (head_steps=2); 32 head calls")


# -- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_causal, tiny_mar])
@pytest.mark.parametrize("rule", ["chain", "path", "ode"])
def test_a_model_that_drafts_for_itself_is_always_right(make, rule):
    """So drafts are verified given all drafts before them, and the drafter's context is never stale."""
    quiet = rule == "ode"
    eta, final_noise = (0.0, 0.0) if quiet else (0.5, 0.1)
    model = calm_one(make, 0.01, head_kind="velocity")  # smooth, so that rule "ode" has densities
    sampler = SpeculativeContinuousSampler(rule, 3, head_steps=3, eta=eta, final_noise=final_noise)
    found: Any = sampler(model, LABELS, law=LAW, generator=seeded(1, 2), batch_size=2, drafter=model)
    assert found.trace.acceptance == 1.0
    assert found.trace.target_calls.tolist() == [1 + 4] * 2  # 15 slots after the first, four a call
    assert found.trace.draft_calls.tolist() == [12] * 2


@pytest.mark.parametrize("make", [tiny_causal, tiny_mar])
def test_kept_tokens_are_seen_as_committed_by_later_calls(make):
    """With a wide tolerance all drafts stay, and what is committed is the target's: the cache is fed it again."""
    model, drafter = calm_one(make, head_steps=3), calm_one(make, head_kind="velocity")
    sampler = SpeculativeContinuousSampler("aligned", 2, tolerance=1e9)
    seen: list[Tensor] = []
    forward = type(model).forward

    def watched(self: Any, state: Any, tokens: Tensor, *rest: Any) -> Tensor:
        if self is model:
            seen.append(tokens.clone())
        return forward(self, state, tokens, *rest)

    type(model).forward = watched  # type: ignore[method-assign]
    try:
        found: Any = sampler(model, LABELS[:1], law=TokenLaw(), generator=seeded(1), drafter=drafter)
    finally:
        type(model).forward = forward  # type: ignore[method-assign]
    assert found.trace.acceptance == 1.0
    if make is tiny_causal:
        # The last call also feeds what the call before it committed, and its own drafts.
        assert seen[-1].shape[1] == 5
        committed = found.tokens[0]
        assert all((committed == one).all(-1).any() for one in seen[-1][0, :3])
    else:
        first = found.trace.commit_call[0] < found.trace.commit_call.max()
        assert torch.equal(seen[-1][0][first], found.tokens[0][first])


def test_many_levels_at_once_are_scored_as_one_after_the_other():
    model = calm_one(tiny_causal, head_kind="velocity")
    sampler = HeadSpeculativeSampler(4, head_steps=6)
    watched: list[Chains] = []
    walk = Chains.start

    def start(self: Chains, *args: Any) -> Tensor:
        watched.append(self)
        return walk(self, *args)

    Chains.start = start  # type: ignore[method-assign]
    try:
        sampler(model, LABELS, law=LAW, generator=seeded(1, 2), batch_size=2)
    finally:
        Chains.start = walk  # type: ignore[method-assign]
    chains = watched[3]
    points = torch.randn(4, 2, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    levels = torch.tensor([5, 3])[:, None] - torch.arange(4)[:, None, None]  # [W, B, N]
    walker = _Walk(chains, 4)
    tokens, rest = walker.evaluate(points, levels)
    mean, sigma = walker.law(points, levels, tokens, rest)
    for place in range(4):
        for row in range(2):
            level = int(levels[place, row, 0])
            expected = chains.kernel(points[place], level)
            torch.testing.assert_close(
                (mean[place, row], sigma[place, row]), tuple(part[row] for part in expected)
            )


# -- bad input --------------------------------------------------------------------------------------------------------


def refused(
    told: str, sampler: Any, model: Any, law: TokenLaw = LAW, error: Any = ValueError, **parts: Any
) -> None:
    model.prefill = model.prepare = None  # before any compute
    refuses(error, told, sampler, model, LABELS, law=law, generator=seeded(1, 2), batch_size=2, **parts)


def test_requests_that_cannot_be_decoded_are_refused():
    refused("top_k=5", ContinuousSampler(), tiny_causal(), TokenLaw(top_k=5))
    refused("top_p=0.5 given", ContinuousSampler(), tiny_causal(), TokenLaw(top_p=0.5))
    refused("guidance_until=3", ContinuousSampler(), tiny_causal(), TokenLaw(guidance_until=3))
    refused("order='raster'", ContinuousSampler(order="raster"), tiny_causal())
    refused("steps=4", ContinuousSampler(steps=4), tiny_causal())


def test_steps_and_orders_that_do_not_fit_the_grid_are_refused():
    for steps in (0, 17):
        with pytest.raises(ValueError, match=f"steps={steps}; .*1 to"):
            ContinuousSampler(steps)(tiny_mar(), LABELS, law=LAW, batch_size=2)
    for order, told in (([0, 1], "2 places"), ([0] * 16, "row 0")):
        with pytest.raises(ValueError, match=told):
            ContinuousSampler(order=order)(tiny_mar(), LABELS, law=LAW, batch_size=2)


def test_drafters_of_other_tokens_are_refused():
    sampler = SpeculativeContinuousSampler("aligned")
    model = tiny_causal()
    refuses(ValueError, "needs a drafter.*4 x 4.*3", sampler, model, LABELS, law=LAW, batch_size=2)
    for drafter, told in (
        (tiny_causal(token_dim=4), "4 x 4.*4.*4 x 4.*3"),
        (tiny_causal(grid_size=3), "3 x 3.*3"),
        (torch.nn.Linear(1, 1), "no such tokens"),
        (tiny_mar(), "masked.*causal"),
        (tiny_causal(order=[*range(15, -1, -1)]), "another order"),
    ):
        refuses(ValueError, told, sampler, model, LABELS, law=LAW, batch_size=2, drafter=drafter)


@pytest.mark.parametrize(
    ("rule", "settings", "told"),
    [
        ("chain", {}, "rule='chain'.*final_noise=0"),
        ("path", dict(eta=0.0, final_noise=0.1), "rule='path'.*eta"),
        ("cspd", dict(eta=0.0, final_noise=0.1), "rule='cspd'.*eta"),
        ("ode", dict(eta=1.0), "rule='ode'.*eta=0"),
        ("ode", dict(eta=0.0, final_noise=0.1), "rule='ode'.*final_noise=0.1"),
        ("cspd-release", {}, "rule='cspd-release'.*causal"),
    ],
)
def test_rules_without_densities_are_refused(rule, settings, told):
    model = tiny_causal(head_kind="velocity")
    with pytest.raises(ValueError, match=told):
        SpeculativeContinuousSampler(rule, **settings)(model, LABELS, law=LAW, batch_size=2, drafter=model)


def test_chains_that_no_speculation_fits_are_refused():
    with pytest.raises(ValueError, match="temperature 0"):
        SpeculativeContinuousSampler("chain", final_noise=0.1)(
            tiny_causal(), LABELS, law=TokenLaw(temperature=0.0), batch_size=2, drafter=tiny_causal()
        )
    with pytest.raises(ValueError, match="eta=None"):
        HeadSpeculativeSampler()(tiny_causal(head_kind="flow"), LABELS, law=LAW, batch_size=2)
