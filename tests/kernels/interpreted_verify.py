"""The kernel of `verify` in Triton's interpreter, and a decode by the kernels; `test_verify.py` runs this file."""

import numpy as np
import pytest
import torch

from tests.helpers.tabular import TabularModel
from tests.kernels.laws import LAWS, window
from tests.kernels.verification import Case, case, compare
from visual_spec.kernels import draw as draw_module
from visual_spec.kernels import verify as module
from visual_spec.kernels.law import NO_DRAFT, POINT_LAW, UNIFORM_LAW
from visual_spec.kernels.verify import verify, verify_triton
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core import state, verification
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies have several."""
    for owner in (draw_module, module):
        monkeypatch.setattr(owner, "TILE", 64)


def both(here: Case) -> tuple[torch.Tensor, ...]:
    found = verify_triton(*here.arguments)
    compare(found, here.expected)
    return found


@pytest.mark.fast_sets(4)
@pytest.mark.parametrize("name", LAWS)
def test_kernel_does_what_the_samplers_do(name):
    kept = both(case(LAWS[name], 1, 6, 130))[1]
    assert (name == "greedy" or kept.any()) and not kept[:, :-1].all()


@pytest.mark.parametrize("kind", [1, POINT_LAW, UNIFORM_LAW])
def test_replacements_of_refused_drafts(kind):
    """Flat laws and unlikely drafts: half of what the law alone would draw is not in the residual."""
    here = case(TokenLaw(allowed=(2, 65), temperature=8.0), 1, 6, 66, columns=2)
    if kind == POINT_LAW:  # then only the draft is not in it
        here = case(TokenLaw(allowed=(2, 65), top_k=2), 1, 6, 66, columns=2)
    target = here.window.target
    here.kinds = torch.full((1, 6), kind)
    here.drafts = (
        target.argmax(-1) if kind == POINT_LAW else target.masked_fill(target.isneginf(), 1).argmin(-1)
    )
    accept, tokens = both(here)[1:3]
    without = here.window.noise.categorical(target, here.window.slots, 3, 7)
    assert (tokens != without)[~accept].any()


def test_without_a_redraft_and_in_low_precision():
    here = case(LAWS["both"], 2, 2, 37, draw_stream=-1, dtype=torch.bfloat16)
    assert both(here)[3].shape == (2, 0)


def test_equal_laws():
    """Nothing is refused, except where rounding says so; then the residual has no mass and the law takes its place."""
    here = case(LAWS["plain"], 1, 5, 37)
    here.stored = here.window.target.clone()
    here.kinds = torch.arange(5)[None]
    here.drafts = here.window.target.argmax(-1)
    assert both(here)[1].all()
    # As much as rounding could do, and more: a label above the law everywhere.
    here.stored += 40
    found = both(here)
    assert not found[1].any()
    expected = here.window.noise.categorical(here.window.target, here.window.slots, 3, 7)
    assert torch.equal(found[2], expected)


def test_logits_that_define_no_law_end_and_are_reported():
    here = case(TokenLaw(top_k=4, top_p=0.9), 1, 4, 37)
    here.window.logits[0, 0, 5] = torch.nan
    here.window.logits[0, 1, 30] = torch.inf
    here.window.logits[0, 2] = -torch.inf
    _, _, tokens, drawn, finite = verify_triton(*here.arguments)
    assert finite.tolist() == [[False, False, False, True]]
    for ids in (tokens, drawn):
        assert ((ids >= 0) & (ids < 37)).all()


def test_rows_far_apart(tmp_path):
    """Offsets beyond 2**31 numbers, in the logits and in the stored laws. The files are sparse."""
    stride = 2**30 + 48
    here = case(LAWS["plain"], 3, 1, 37, columns=1)
    expected = here.expected
    for name, dtype in (("logits", np.float16), ("stored", np.float32)):
        flat = torch.from_numpy(np.memmap(tmp_path / name, dtype, "w+", shape=(2 * stride + 64,)))
        far = flat.as_strided((3, 1, 37), (stride, 37, 1))
        if name == "logits":
            here.window.logits = here.window.logits.half()
            expected = here.expected
            here.window.logits = far.copy_(here.window.logits)
        else:
            here.stored = far.copy_(here.stored)
        compare(verify_triton(*here.arguments), expected)


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize(
    ("coupling", "acceptance"), [("gumbel", "identical"), ("gumbel", "exact"), ("maximal", "exact")]
)
def test_decodes_by_the_kernels_as_without_them(monkeypatch, coupling, acceptance):
    model = TabularModel(TokenGrid(2, 4), 7, order=2, conditions=2, dependence=0.2, dtype=torch.float32)
    sampler = SpeculativeJacobiSampler(3, coupling, acceptance)

    def decode():
        generator = torch.Generator().manual_seed(3)
        law = TokenLaw(guidance_scale=1.5, top_k=5)
        return sampler(model, torch.tensor([1]), law=law, generator=generator)

    expected = decode()
    for owner in (state, verification):
        monkeypatch.setattr(owner, "fits", lambda logits: True)
    for owner in (draw_module, module):
        monkeypatch.setattr(owner, "on_gpu", lambda tensor: True)
    found = decode()
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.trace.commit_call, expected.trace.commit_call)


@pytest.mark.slow
def test_operator_passes_the_checks_of_pytorch(monkeypatch):
    monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    here = case(LAWS["both"])
    compare(here.ask(verify), here.expected)
    arguments = (*here.arguments[:-1], *here.window.numbers)
    op = torch.ops.visual_spec.verify.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_constants_are_those_in_the_kernel():
    assert (NO_DRAFT, POINT_LAW, UNIFORM_LAW) == (-1, -2, -3)
    assert window(TokenLaw()).numbers.guidance_until == 2**31 - 1
