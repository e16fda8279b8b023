"""The law of a token, against the plain definition written out below."""

import inspect
import math
import random
from typing import get_type_hints

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from visual_spec.families import all_pipelines
from visual_spec.models.core.settings import LAW_SETTINGS, LawSettings
from visual_spec.pipelines import components
from visual_spec.samplers.core.law import TokenLaw, check_finite, non_finite

FORBIDDEN = -math.inf


def law_by_hand(law: TokenLaw, conditional: list[float], unconditional: list[float] | None) -> list[float]:
    """The definition, one token at a time: probabilities."""
    scores = list(conditional)
    if unconditional is not None:
        for v, (c, u) in enumerate(zip(conditional, unconditional, strict=True)):
            scores[v] = FORBIDDEN if FORBIDDEN in (c, u) else u + law.guidance_scale * (c - u)
    if law.allowed is not None:
        scores = [s if law.allowed[0] <= v < law.allowed[1] else FORBIDDEN for v, s in enumerate(scores)]
    if law.temperature == 0:
        return [float(v == scores.index(max(scores))) for v in range(len(scores))]
    scores = [s / law.temperature for s in scores]
    if 0 < law.top_k < len(scores):
        smallest = sorted(scores, reverse=True)[law.top_k - 1]
        scores = [s if s >= smallest else FORBIDDEN for s in scores]
    if law.top_p < 1:
        mass, smallest = 0.0, max(scores)
        for probability, score in sorted(zip(normalise(scores), scores, strict=True), reverse=True):
            if mass >= law.top_p:
                break
            mass, smallest = mass + probability, score
        scores = [s if s >= smallest else FORBIDDEN for s in scores]
    return normalise(scores)


def normalise(scores: list[float]) -> list[float]:
    weights = [math.exp(s - max(scores)) for s in scores]
    return [weight / sum(weights) for weight in weights]


def logits_with_ties(*shape: int, seed: int = 0) -> Tensor:
    """float64 logits on a coarse grid, so that many are equal; about one in 20 is -inf, token 0 never."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, generator=generator, dtype=torch.float64) * 4).round() / 2
    forbidden = torch.rand(*shape, generator=generator) < 0.05
    forbidden[..., 0] = False
    return logits.masked_fill(forbidden, -torch.inf)


def assert_is_law_by_hand(law: TokenLaw, logits: Tensor, guided: bool, tolerance: float = 1e-12) -> None:
    got = law(logits, guided)
    rows = logits.shape[0] // 2 if guided else logits.shape[0]
    assert got.shape == (rows, *logits.shape[1:])
    for row in range(rows):
        for column in range(logits.shape[1]):
            unconditional = logits[rows + row, column].tolist() if guided else None
            expected = torch.tensor(
                law_by_hand(law, logits[row, column].tolist(), unconditional), dtype=torch.float64
            )
            assert torch.equal(got[row, column] > -torch.inf, expected > 0), law
            assert (got[row, column].exp().double() - expected).abs().max() < tolerance, law


@pytest.mark.every_set
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"guidance_scale": 3.5},
        {"guidance_scale": 0.5},
        {"allowed": (3, 17)},
        {"allowed": (0, 1)},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"temperature": 3.0},
        {"temperature": 0},
        {"temperature": 0, "allowed": (5, 20), "top_k": 4, "top_p": 0.3},
        {"top_k": 1},
        {"top_k": 6},
        {"top_k": 22},
        {"top_k": 23},
        {"top_k": 1000},
        {"top_p": 0.05},
        {"top_p": 0.55},
        {"top_p": 0.97},
        {"top_k": 9, "top_p": 0.6},
        {"guidance_scale": 2.0, "temperature": 1.3, "top_k": 12, "top_p": 0.8, "allowed": (2, 21)},
    ],
)
def test_law_is_the_definition(settings, guided):
    assert_is_law_by_hand(TokenLaw(**settings), logits_with_ties(4, 5, 23), guided)


def test_random_laws_are_the_definition():
    pick = random.Random(0)
    for seed in range(60):
        first = pick.randrange(0, 20)
        law = TokenLaw(
            guidance_scale=pick.choice([1.0, pick.uniform(1, 9)]),
            temperature=pick.choice([1.0, pick.uniform(0.2, 3)]),
            top_k=pick.choice([0, pick.randrange(1, 40)]),
            top_p=pick.choice([1.0, pick.uniform(0.01, 0.999)]),
            allowed=pick.choice([None, (first, pick.randrange(first + 8, 31))]),
        )
        assert_is_law_by_hand(law, logits_with_ties(2, 2, 31, seed=seed), law.guided)


@pytest.mark.parametrize("vocab_size", [1, 2, 257])
def test_odd_vocabularies(vocab_size):
    logits = torch.randn(2, 3, vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for law in (TokenLaw(), TokenLaw(top_k=2), TokenLaw(top_p=0.5), TokenLaw(top_k=2, top_p=0.9)):
        assert_is_law_by_hand(law, logits, guided=False)
    assert_is_law_by_hand(TokenLaw(temperature=0), logits, guided=False)


@pytest.mark.parametrize("top_k", [3, 9])
def test_a_top_p_that_rounded_sums_do_not_reach_keeps_what_top_k_left(top_k):
    logits = torch.randn(1, 300, 17, generator=torch.Generator().manual_seed(0))
    assert (logits.topk(top_k).values.softmax(-1).cumsum(-1)[..., -1] < 1).any()
    for top_p in (1 - 1e-9, 1 - 1e-12):
        kept = TokenLaw(top_k=top_k, top_p=top_p)(logits, False) > -torch.inf
        assert torch.equal(kept, logits >= logits.topk(top_k).values[..., -1:])


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0}, {"allowed": (2, 9)}]
)
def test_precision(settings):
    law, logits = TokenLaw(guidance_scale=2.0, **settings), logits_with_ties(2, 3, 11)
    assert law(logits, True).dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert law(logits.to(dtype), True).dtype == torch.float32
    assert_is_law_by_hand(law, logits.float(), True, tolerance=1e-6)


@pytest.mark.parametrize("settings", [{}, {"top_k": 40}, {"top_p": 0.8}, {"top_k": 100, "top_p": 0.8}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_slot_has_the_same_bits_in_any_window_and_batch(settings, dtype):
    law = TokenLaw(guidance_scale=3.0, temperature=0.9, **settings)
    logits = torch.randn(6, 8, 515, generator=torch.Generator().manual_seed(0), dtype=dtype)
    together = law(logits, True)
    for row in range(3):
        for column in range(8):
            alone = law(logits[[row, 3 + row], column : column + 1], True)
            assert torch.equal(alone[0, 0], together[row, column])


def test_logits_are_left_alone():
    logits = logits_with_ties(2, 3, 11)
    before = logits.clone()
    for law in (TokenLaw(), TokenLaw(top_k=3, top_p=0.5), TokenLaw(temperature=0)):
        law(logits, False)
    for law in (TokenLaw(guidance_scale=2.0), TokenLaw(guidance_scale=2.0, temperature=2.0, allowed=(0, 5))):
        law(logits, True)
    assert torch.equal(logits, before)


# --- guidance up to a slot ---


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 4}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 0}, {"allowed": (2, 20)}],
)
def test_slots_at_or_beyond_guidance_until_are_conditional(settings):
    """Ragged rows whose windows end before, straddle, and lie after the boundary."""
    logits = logits_with_ties(6, 4, 23)
    slots = torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 10]])
    law = TokenLaw(guidance_scale=3.0, guidance_until=6, **settings)
    got = law(logits, True, slots)
    for row in range(3):
        for column in range(4):
            unconditional = logits[3 + row, column].tolist() if slots[row, column] < 6 else None
            by_hand = law_by_hand(law, logits[row, column].tolist(), unconditional)
            assert (got[row, column].exp() - torch.tensor(by_hand, dtype=torch.float64)).abs().max() < 1e-12


def test_after_the_boundary_the_law_has_the_bits_of_the_conditional_one():
    logits = logits_with_ties(4, 3, 17).float()
    logits[2:, :, 5] = FORBIDDEN  # what the unconditional rows forbid is their own affair there
    slots = torch.tensor([[4, 5, 6], [9, 10, 11]])
    late = TokenLaw(guidance_scale=7.5, top_k=6, guidance_until=4)(logits, True, slots)
    assert torch.equal(late, TokenLaw(top_k=6)(logits[:2], False))
    early = TokenLaw(guidance_scale=7.5, top_k=6, guidance_until=12)(logits, True, slots)
    assert torch.equal(early, TokenLaw(guidance_scale=7.5, top_k=6)(logits, True))


def test_a_schedule_without_slots_is_refused():
    law = TokenLaw(guidance_scale=2.0, guidance_until=3)
    refuses(ValueError, "guidance_until=3", law, torch.zeros(2, 1, 5), True)
    law(torch.zeros(1, 1, 5), False)  # nothing is guided, so there is nothing to schedule


def test_guided():
    assert TokenLaw(guidance_scale=1.01).guided
    assert not TokenLaw(guidance_scale=1.0).guided
    assert not TokenLaw(guidance_scale=0.0).guided
    assert TokenLaw(guidance_scale=2.0, guidance_until=1).guided
    assert not TokenLaw(guidance_scale=2.0, guidance_until=0).guided


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance_scale": -1.0}, "guidance_scale=-1.0; pass"),
        ({"guidance_scale": math.nan}, "guidance_scale=nan; pass"),
        ({"temperature": -0.1}, r"temperature=-0.1; pass"),
        ({"temperature": 1e-9}, "temperature=1e-09; pass"),
        ({"temperature": math.inf}, "temperature=inf; pass"),
        ({"temperature": math.nan}, "temperature=nan; pass"),
        ({"top_k": -1}, "top_k=-1; pass"),
        ({"top_k": 5.0}, "top_k=5.0; pass"),
        ({"top_k": True}, "top_k=True; pass"),
        ({"top_p": 0.0}, "top_p=0.0; pass"),
        ({"top_p": 1.1}, "top_p=1.1; pass"),
        ({"top_p": math.nan}, "top_p=nan; pass"),
        ({"allowed": (5, 5)}, r"allowed=\(5, 5\).*1"),
        ({"allowed": (-1, 5)}, r"allowed=\(-1, 5\); pass"),
        ({"allowed": (1, 2, 3)}, r"allowed=\(1, 2, 3\); pass"),
        ({"allowed": (0, 2.5)}, r"allowed=\(0, 2.5\); pass"),
        ({"guidance_until": -1}, "guidance_until=-1; pass"),
        ({"guidance_until": 2.5}, "guidance_until=2.5; pass"),
        ({"guidance_until": True}, "guidance_until=True; pass"),
    ],
)
def test_construction_refuses(settings, message):
    refuses(ValueError, message, TokenLaw, **settings)


def test_call_refuses():
    with pytest.raises(ValueError, match=r"\(2, 9\).*\[rows, window, vocabulary\]"):
        TokenLaw()(torch.zeros(2, 9), False)
    with pytest.raises(ValueError, match="3 rows"):
        TokenLaw(guidance_scale=2.0)(torch.zeros(3, 1, 9), True)
    with pytest.raises(ValueError, match=r"allowed=\(2, 10\).*9"):
        TokenLaw(allowed=(2, 10))(torch.zeros(1, 1, 9), False)


# --- logits that define no law ---


def test_minus_infinity_is_legal_beside_a_finite_logit():
    logits = torch.zeros(2, 3, 5)
    logits[1, 2, :4] = -torch.inf
    assert not non_finite(logits).any()
    check_finite(logits, torch.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("values", "found"), [(math.nan, "nan"), (math.inf, r"\+inf"), (-math.inf, "only -inf")]
)
def test_check_finite_names_row_and_slot(values, found):
    slots = torch.tensor([[4, 5, 6], [10, 11, 12]])
    logits = torch.zeros(2, 3, 5)
    logits[1, 2] = values
    assert non_finite(logits).nonzero().tolist() == [[1, 2]]
    place = rf"the logits of sample 1 \(row 1\), column 2, slot 12 hold {found}; a law needs finite logits"
    refuses(FloatingPointError, place, check_finite, logits, slots)
    guided = torch.cat([torch.zeros(2, 3, 5), logits])
    refuses(FloatingPointError, "sample 1.*3.*2", check_finite, guided, slots)
    refuses(FloatingPointError, "sample 1.*1.*2", check_finite, guided.flip(0).roll(2, 0).flip(0), slots)


FEWER = {  # settings of the law that these calls take; all others take all of them
    "AmusedImagePipeline": LAW_SETTINGS[:4],
    "ScaleImagePipeline": LAW_SETTINGS[:4],
    "MageImagePipeline": LAW_SETTINGS[1:4],
    "BitDanceImagePipeline": ("guidance_scale", "temperature"),
    "InfinityPipeline": ("guidance_scale", "temperature", "top_p"),
    "MaskgctPipeline": ("guidance_scale", "temperature", "top_k"),
    "ChunkVideoPipeline": (),
}


def test_every_call_takes_the_settings_that_are_declared():
    kinds = get_type_hints(LawSettings)
    for name in all_pipelines():
        parameters = inspect.signature(getattr(components, name).__call__).parameters
        assert tuple(one for one in parameters if one in kinds) == FEWER.get(name, LAW_SETTINGS), name
