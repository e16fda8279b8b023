"""Samplers on the path of a GPU: relaxed rules and masked steps by one operator each, with the tokens of the plain one.

Here the operators' references stand in for the kernels; at the end the kernels run in Triton's interpreter.
"""

from typing import Any

import pytest
import torch

from tests.helpers.drafting import MODEL, NEAR
from tests.helpers.musicgen import IDS, MASK, musicgen
from tests.helpers.sampler_settings import lossy
from tests.helpers.tabular import TabularColumnModel, TabularMaskedModel, TabularModel
from visual_spec.kernels import clustered_mass, grouped_mass, lantern_mass, neighbour_mass
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import text_condition
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core import state, verification
from visual_spec.samplers.core.acceptance import Relaxation
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.relaxed import rule_of
from visual_spec.samplers.core.trace import SampleResult
from visual_spec.samplers.masked import unmasking
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import LawByStep, Schedule
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler

OPERATORS = ((grouped_mass, "_grouped_op"), (clustered_mass, "_clustered_op"), (lantern_mass, "_lantern_op"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the path of a GPU from here on. Lists the operators that are asked."""
    names: list[str] = []

    def watched(module: Any, name: str) -> Any:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return real(*args, **kwargs)

        return call

    for module, name in (*OPERATORS, (unmasking, "masked_sample")):
        monkeypatch.setattr(module, name, watched(module, name))
    monkeypatch.setattr(neighbour_mass, "on_gpu", lambda tensor: True)
    for module in (state, verification, unmasking):
        monkeypatch.setattr(module, "fits", lambda logits: logits.dtype != torch.float64)
    return names


def same(found: SampleResult, expected: SampleResult) -> None:
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.trace.commit_call, expected.trace.commit_call)
    if expected.trace.moved_mass is not None:
        torch.testing.assert_close(found.trace.moved_mass, expected.trace.moved_mass, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ relaxed rules

RULES: dict[str, dict[str, Any]] = {
    "grouped": lossy("grouped", group_size=5, code_distance=2.0, probability_gap=0.3),
    "clustered": lossy("clustered", group_size=3),
    "lantern": lossy("lantern", delta=0.3, neighbours=4),
    "lantern++": lossy("lantern", factor=3.0, neighbours=4),
    "bounded": lossy("grouped", group_size=5, code_distance=None, delta=0.1, bounded=True),
}
CODES = torch.nn.functional.normalize(
    torch.randn(4, 12, 3, generator=torch.Generator().manual_seed(0)), dim=-1
)
COLUMNS = TabularColumnModel(
    CodebookPattern.delay([0, 1, 2]).valid(8).T, 6, order=1, conditions=3, dependence=0.3, dtype=torch.float32
)


def single(source: TabularModel) -> TabularModel:
    """The same in float32."""
    model = TabularModel(source.grid, source.vocab_size, order=source.order, conditions=source.conditions)
    model.logits = source.logits.float()
    return model


def decode_relaxed(kind: str, rule: dict[str, Any]) -> SampleResult:
    options: dict[str, Any] = dict(law=TokenLaw(guidance_scale=1.8, top_k=9), batch_size=3)
    options["generator"] = torch.Generator().manual_seed(5)
    condition, codebook = torch.tensor([1, 0, 2]), CODES[0]
    if kind == "columns":
        sampler = ColumnJacobiSampler(5, unit="codebook", **rule)
        return sampler(COLUMNS, condition, codebook=CODES[:3, :6], **options)
    target, drafter = single(MODEL), single(NEAR)
    if kind == "jacobi":
        return SpeculativeJacobiSampler(6, "maximal", **rule)(target, condition, codebook=codebook, **options)
    sampler = DraftedSampler(4, **rule) if kind == "drafted" else TreeSampler(3, 3, **rule)
    return sampler(target, condition, drafter=drafter, codebook=codebook, **options)


@pytest.mark.parametrize("kind", ["jacobi", "columns", "drafted", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_relaxed_samplers_decode_the_same_tokens_by_the_operators(request, kind, rule):
    expected = decode_relaxed(kind, RULES[rule])
    asked = request.getfixturevalue("asked")
    same(decode_relaxed(kind, RULES[rule]), expected)
    assert set(asked) == {f"_{RULES[rule]['acceptance']}_op"}


def test_laws_in_float64_are_tested_without_the_operators(asked):
    options: dict[str, Any] = dict(law=TokenLaw(), batch_size=3, codebook=CODES[0])
    for rule in RULES.values():
        SpeculativeJacobiSampler(4, **rule)(MODEL, torch.tensor([1, 0, 2]), **options)
        wide, narrow = torch.zeros(1, 1, 12).log_softmax(-1).double(), torch.zeros(1, 1, 12).log_softmax(-1)
        probability = rule_of(
            Relaxation.of(rule["acceptance"], rule["relaxation"]), CODES[0], "cpu"
        ).probability
        found = probability(narrow, wide, torch.tensor([[3]]))
        torch.testing.assert_close(found, torch.ones(1, 1, dtype=torch.float64), rtol=0, atol=1e-6)
    assert not asked


# -------------------------------------------------------------------------------------------------------- masked steps

MUSIC = TokenLaw(guidance_scale=4.0, temperature=2.0, top_p=0.9)
MASKED: dict[str, tuple[dict[str, Any], TokenLaw]] = {
    "maskgit": (dict(choice_temperature=2.0), TokenLaw()),
    "magnet": (dict(clock="magnet", temperature="falling", guidance="falling"), MUSIC),
    "spans": (dict(clock="magnet", span=2, span_score="sum", guidance="rising"), MUSIC),
    "filtered": (dict(filtered_score=True, score="probability"), TokenLaw(top_k=2, temperature=0.7)),
    "unfiltered": (dict(score="probability", choice_temperature=0.5), TokenLaw(top_k=2, allowed=(1, 3))),
    "greedy": (dict(clock="magnet"), TokenLaw(temperature=0.0, guidance_scale=2.0)),
    "certain": (dict(filtered_score=True, choice_temperature=1.0), TokenLaw(temperature=0.0)),
    "halton": (dict(score="halton"), TokenLaw(top_k=2)),
}


def decode_masked(settings: dict[str, Any], law: TokenLaw, dtype: torch.dtype = torch.float32) -> Any:
    model = TabularMaskedModel(TokenGrid(1, 5), 3, conditions=2, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    given = torch.full((3, 5), 3)
    given[1, 2] = 1
    condition = torch.tensor([1, 0, 1])
    sampler = of_settings(MaskedSampler, 4, **settings)
    return sampler(model, condition, law=law, generator=generator, batch_size=3, known_tokens=given)


@pytest.mark.parametrize("name", MASKED)
def test_masked_samplers_decode_the_same_tokens_by_the_operator(request, name):
    expected = decode_masked(*MASKED[name])
    asked = request.getfixturevalue("asked")
    found = decode_masked(*MASKED[name])
    same(found, expected)
    assert torch.equal(found.trace.entry_call, expected.trace.entry_call)
    assert asked == ["masked_sample"] * 4


def test_entropies_and_float64_need_the_law(request):
    settings, law = dict(score="entropy"), TokenLaw(top_k=2)
    expected = decode_masked(settings, law)
    asked = request.getfixturevalue("asked")
    same(decode_masked(settings, law), expected)
    assert asked == ["masked_sample"]  # the last step asks for no score
    decode_masked(*MASKED["magnet"], torch.float64)
    assert len(asked) == 1


@pytest.mark.parametrize("rescored", [False, True])
def test_magnet_decodes_the_same_clips_by_the_operator(request, rescored):
    """Several codebooks, spans and stages, with what a second model says of the draws."""
    source = musicgen(dtype=torch.float32)
    model, condition = MagnetModel(source, 10, reach=2), text_condition(source, IDS, MASK)
    rescorer = MusicgenColumnModel(source, 10) if rescored else None

    def decode() -> SampleResult:
        sampler = MaskedSampler(
            [5, 3, 2, 1],
            span=3,
            schedule=Schedule(clock="magnet"),
            by_step=LawByStep(temperature="falling", guidance="falling"),
        )
        generator = torch.Generator().manual_seed(2)
        options: dict[str, Any] = dict(law=MUSIC, generator=generator, batch_size=3, rescorer=rescorer)
        return sampler(model, condition, **options)

    expected = decode()
    asked = request.getfixturevalue("asked")
    same(decode(), expected)
    assert asked == ["masked_sample"] * 11


@pytest.mark.parametrize("guided", [False, True])
def test_logits_without_a_law_are_reported_where_tokens_are_drawn(asked, guided):
    law, condition = TokenLaw(guidance_scale=2.0 if guided else 1.0), torch.tensor([1, 0, 1])

    class Broken(TabularMaskedModel):
        def forward(self, state: Any, tokens: torch.Tensor, stage: int) -> torch.Tensor:
            logits = super().forward(state, tokens, stage)
            logits[-2, 3] = torch.nan  # of sample 1: the last rows are the unconditional ones
            return logits

    model = Broken(TokenGrid(1, 5), 3, conditions=2, dtype=torch.float32)
    with pytest.raises(FloatingPointError, match="sample 1.*3.*nan"):
        MaskedSampler(2)(model, condition, law=law, batch_size=3)
    given = torch.full((3, 5), 3)
    given[1, 3] = 0  # nothing is drawn there
    tokens = MaskedSampler(2)(model, condition, law=law, batch_size=3, known_tokens=given).tokens
    assert tokens[1, 3] == 0 and (tokens < 3).all()
