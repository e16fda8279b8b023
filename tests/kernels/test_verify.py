"""Verifying a window in one kernel: the reference against the samplers' own parts, the kernel against the reference,
and Jacobi decoding through the operators against the step without them.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.interpreter import run_interpreted
from tests.kernels.laws import LAWS
from tests.kernels.verification import case
from visual_spec.kernels.verify import NO_DRAFT, POINT_LAW, UNIFORM_LAW, verify
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.tabular import TabularModel
from visual_spec.samplers import jacobi
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.core import fused
from visual_spec.samplers.core.acceptance import exact_acceptance, residual
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

COMBINATIONS = [
    ("gumbel", "identical"),
    ("gumbel", "exact"),
    ("independent", "exact"),
    ("maximal", "exact"),
]
CONDITION = torch.tensor([2, 0, 1, 2])


def verified(here):
    window = here.window
    return verify(
        window.logits,
        here.drafts,
        here.stored,
        here.kinds,
        window.keys,
        window.slots,
        window.numbers,
        round=7,
        accept_stream=ACCEPT,
        residual_stream=RESIDUAL,
        draw_stream=DRAFT,
        draw_round=4,
    )


@pytest.mark.parametrize("name", LAWS)
def test_reference_does_what_the_samplers_do(name):
    here = case(LAWS[name], 4, 8, 130, columns=3)
    window, noise, slots = here.window, here.window.noise, here.window.slots
    laws, accept, tokens, drawn, finite = verified(here)
    assert finite.all()
    assert torch.equal(laws.isneginf(), window.target.isneginf())
    torch.testing.assert_close(laws, window.target, rtol=0, atol=2e-6)

    label = torch.full_like(window.target, -torch.inf)
    for sample in range(4):
        for column, kind in enumerate(here.kinds[sample].tolist()):
            if kind >= 0:
                label[sample, column] = here.stored[sample, kind]
            elif kind == POINT_LAW:
                label[sample, column, here.drafts[sample, column]] = 0
            elif kind == UNIFORM_LAW:
                first, stop = window.numbers.first, window.numbers.stop
                label[sample, column, first:stop] = -math.log(stop - first)
    drafted = here.kinds != NO_DRAFT
    assert {POINT_LAW, UNIFORM_LAW, NO_DRAFT, 0, 1, 2} == set(here.kinds.flatten().tolist())
    expected = (
        noise.bernoulli(exact_acceptance(window.target, label, here.drafts), slots, ACCEPT, 7) & drafted
    )
    assert torch.equal(accept, expected)
    assert (accept.any() or name == "greedy") and not accept[drafted].all()
    replacement = noise.categorical(residual(window.target, label), slots, RESIDUAL, 7)
    assert torch.equal(tokens, torch.where(accept, here.drafts, replacement))
    assert torch.equal(drawn, noise.categorical(window.target, slots, DRAFT, 4))


def test_operator_in_a_compiled_function():
    here = case(LAWS["both"])

    def step(stored, kinds):
        here.stored, here.kinds = stored * 1.0, kinds + 0
        return verified(here)

    stored, kinds = here.stored, here.kinds
    expected = step(stored, kinds)
    found = torch.compile(step, backend="aot_eager")(stored, kinds)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    here.stored, here.kinds = stored, kinds
    op = torch.ops.visual_spec.verify.default
    arguments = (*here.arguments[:-1], *here.window.numbers)
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"drafts": torch.zeros(2, 3, dtype=torch.long)},
            ValueError,
            r"drafts have shape \(2, 3\) and draft_laws",
        ),
        (
            {"stored": torch.zeros(2, 3, 36)},
            ValueError,
            r"stored_laws have shape \(2, 3, 36\); pass \[2, columns, 37\]",
        ),
        (
            {"stored": torch.zeros(2, 3, 37).double()},
            TypeError,
            "stored_laws are torch.float64; pass float32",
        ),
    ],
)
def test_refusals(change, error, message):
    here = case(LAWS["both"])
    for name, value in change.items():
        setattr(here, name, value)
    with pytest.raises(error, match=message):
        verified(here)


# ----------------------------------------------------------------------------------- Jacobi decoding by the operators


def decode(sampler, law: TokenLaw = TokenLaw(), *, grid: TokenGrid = TokenGrid(6, 6), seed: int = 0):  # noqa: B008
    model = TabularModel(grid, 16, order=2, conditions=3, dependence=0.2, dtype=torch.float32)
    return sampler(model, CONDITION, law=law, generator=torch.Generator().manual_seed(seed), batch_size=4)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the path of a GPU, with the references in the kernels' place. Lists the kernels that were asked."""
    asked: list[str] = []

    def watched(name: str):
        real = getattr(fused, name)

        def call(*args, **kwargs):
            asked.append(name)
            return real(*args, **kwargs)

        return call

    for name in ("draw", "verify"):
        monkeypatch.setattr(fused, name, watched(name))
    monkeypatch.setattr(fused, "fits", lambda logits: logits.dtype == torch.float32)
    return asked


@pytest.mark.parametrize("initial_draft", ["uniform", "left"])
@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
@pytest.mark.parametrize(
    "law", [TokenLaw(), TokenLaw(guidance_scale=2.0, top_k=9, top_p=0.9, allowed=(2, 15))]
)
def test_fused_step_decodes_the_same_tokens(request, coupling, acceptance, initial_draft, law):
    sampler = SpeculativeJacobiSampler(6, coupling, acceptance, initial_draft)
    expected = decode(sampler, law)
    asked = request.getfixturevalue("on_a_gpu")
    found = decode(sampler, law)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.trace.commit_call, expected.trace.commit_call)
    assert torch.equal(found.trace.target_calls, expected.trace.target_calls)
    kernel = "draw" if acceptance == "identical" else "verify"
    assert asked[0] == "draw" and set(asked[1:]) == {kernel}


def test_identical_to_autoregressive_sampling_by_the_same_kernel(on_a_gpu):
    expected = decode(AutoregressiveSampler())
    assert set(on_a_gpu) == {"draw"} and len(on_a_gpu) == 36
    found = decode(SpeculativeJacobiSampler(8))
    assert torch.equal(found.tokens, expected.tokens)


def test_what_a_kernel_cannot_do_is_done_without_it(on_a_gpu):
    for sampler in (
        SpeculativeJacobiSampler(4, "gumbel", "exact", "last_law"),
        SpeculativeJacobiSampler(4, acceptance="grouped", code_distance=None),
    ):
        decode(sampler)
    assert set(on_a_gpu) == {"draw"} and len(on_a_gpu) == 2  # slot 0


def test_fused_state_holds_one_law_a_column(monkeypatch, on_a_gpu):
    """And labels by number: what the window moves over is not copied."""
    real_step, seen = jacobi.step, []

    def step(model, state, *rest):
        real_step(model, state, *rest)
        assert state.draft_law.shape == (len(state.lengths), 6, 16)
        kinds = state.draft_columns
        assert (kinds[:, -1] == NO_DRAFT).all() and (kinds[:, :-1] != NO_DRAFT).all()
        seen.append(kinds)

    monkeypatch.setattr(jacobi, "step", step)
    decode(SpeculativeJacobiSampler(6, "maximal", "exact", "left"))
    assert {POINT_LAW, 1, 2, 5} <= set(torch.cat(seen).flatten().tolist())


def test_logits_without_a_law_are_reported_in_the_end(on_a_gpu):
    class Broken(TabularModel):
        def forward(self, state, tokens, slots):
            logits = super().forward(state, tokens, slots)
            return logits.masked_fill((slots == 20)[..., None], torch.nan)

    model = Broken(TokenGrid(6, 6), 16, order=2, conditions=3, dependence=0.2, dtype=torch.float32)
    for sampler in (
        AutoregressiveSampler(),
        SpeculativeJacobiSampler(4),
        SpeculativeJacobiSampler(4, "maximal", "exact"),
    ):
        with pytest.raises(FloatingPointError, match="sample 0, slot 21 hold nan"):
            sampler(model, CONDITION, law=TokenLaw(top_k=4), batch_size=4)


def test_kernels():
    run_interpreted("interpreted_verify.py")
