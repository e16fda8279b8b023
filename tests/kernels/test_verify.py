"""Verifying a window in one kernel: the kernel against the parts that samplers take on a CPU, and Jacobi decoding by
the fused step against the step without it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.tabular import TabularModel
from tests.kernels.laws import LAWS
from tests.kernels.verification import case, verify_by_parts
from visual_spec.kernels import draw as draw_module
from visual_spec.kernels import verify as verify_module
from visual_spec.kernels.law import NO_DRAFT, POINT_LAW
from visual_spec.kernels.verify import verify
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core import state, verification
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

COMBINATIONS = [("gumbel", "identical"), ("gumbel", "exact"), ("independent", "exact"), ("maximal", "exact")]
CONDITION = torch.tensor([2, 0, 1, 2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"drafts": torch.zeros(2, 3, dtype=torch.long)}, ValueError, r"\(2, 3\).*draft_laws"),
        ({"stored": torch.zeros(2, 3, 36)}, ValueError, r"stored_laws.*\(2, 3, 36\).*\[2, columns, 37\]"),
        ({"stored": torch.zeros(2, 3, 37).double()}, TypeError, r"stored_laws.*torch\.float64.*float32"),
    ],
)
def test_refusals(change, error, message):
    here = case(LAWS["both"])
    for name, value in change.items():
        setattr(here, name, value)
    with pytest.raises(error, match=message):
        here.ask(verify)


def test_a_window_on_the_cpu_is_sent_elsewhere():
    with pytest.raises(ValueError, match="GPU.*Triton"):
        case(LAWS["both"]).ask(verify)


# ----------------------------------------------------------------------------------- Jacobi decoding by the operators


def decode(sampler, law: TokenLaw = TokenLaw(), *, grid: TokenGrid = TokenGrid(6, 6), seed: int = 0):  # noqa: B008
    model = TabularModel(grid, 16, order=2, conditions=3, dependence=0.2, dtype=torch.float32)
    return sampler(model, CONDITION, law=law, generator=torch.Generator().manual_seed(seed), batch_size=4)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the path of a GPU, with PyTorch in the kernels' place. Lists the kernels that were asked."""
    asked: list[str] = []

    def watched(name: str, real: Callable[..., Any]):
        def call(*args, **kwargs):
            asked.append(name)
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(draw_module, "draw", watched("draw", draw_module.draw))
    monkeypatch.setattr(verify_module, "verify", watched("verify", verify_by_parts))
    for module in (state, verification):
        monkeypatch.setattr(module, "fits", lambda logits: logits.dtype == torch.float32)
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
    assert asked[0] == "draw" and set(asked[1:]) == {kernel}  # slot 0, and the windows


def test_identical_to_autoregressive_sampling_by_the_same_kernel(on_a_gpu):
    expected = decode(AutoregressiveSampler())
    assert set(on_a_gpu) == {"draw"} and len(on_a_gpu) == 36
    found = decode(SpeculativeJacobiSampler(8))
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("coupling", ["gumbel", "independent", "maximal"])
def test_drafts_from_the_last_law_are_drawn_without_the_kernel(request, coupling):
    sampler = SpeculativeJacobiSampler(4, coupling, "exact", "last_law")
    expected = decode(sampler)
    asked = request.getfixturevalue("on_a_gpu")
    assert torch.equal(decode(sampler).tokens, expected.tokens)
    assert asked[0] == "draw" and set(asked[1:]) == {"verify"}


def test_what_a_kernel_cannot_do_is_done_without_it(on_a_gpu):
    decode(SpeculativeJacobiSampler(4, acceptance="grouped", relaxation={"code_distance": None}))
    assert on_a_gpu == ["draw"]  # slot 0


def test_identical_drafts_from_the_last_law_are_drawn_beside_the_kernel(request):
    sampler = SpeculativeJacobiSampler(4, "gumbel", "identical", "last_law")
    expected = decode(sampler)
    asked = request.getfixturevalue("on_a_gpu")
    assert torch.equal(decode(sampler).tokens, expected.tokens)
    assert set(asked) == {"draw"}


def test_fused_state_holds_one_law_a_position(monkeypatch, on_a_gpu):
    """And labels by number: what the window moves over is not copied."""
    settle, seen = SpeculativeJacobiSampler.settle, []

    def watched(self, run, state, *rest):
        settle(self, run, state, *rest)
        assert state.label.laws.shape == (len(state.lengths), 6, 16)
        assert state.label.rows.shape == (len(state.lengths), 5) and (state.label.rows != NO_DRAFT).all()
        seen.append(state.label.rows)

    monkeypatch.setattr(SpeculativeJacobiSampler, "settle", watched)
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
        with pytest.raises(FloatingPointError, match="sample 0.*21.*nan"):
            sampler(model, CONDITION, law=TokenLaw(top_k=4), batch_size=4)
