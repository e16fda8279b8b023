"""Students decoded in one call, in two, and with the teacher in between: against the forward called by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen_student import straight_line
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_transformer
from tests.helpers.tiny_scales import SIDES, FormulaTokenizer, tiny_var
from tests.helpers.tiny_students import (
    LENGTH,
    SIDE,
    SIZE,
    VOCAB,
    student_weights,
    tiny_student,
    tiny_var_student,
)
from tests.helpers.var import student_logits
from visual_spec.prototype.students.sampler import DistilledSampler
from visual_spec.samplers.core.base import STOP
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CHAIN, CounterNoise, draw_keys
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.scales.scales import ScaleWiseSampler

SLOTS, SPLIT, RESTART = SIDE * SIDE, SIZE["first_continuous"], SIZE["restart"]
CODES = torch.randn(VOCAB, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
LABELS = torch.tensor([5, 1])
STUDENT = tiny_student()
TEACHER = tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1).double()
PLAIN = TokenLaw()
WARM = TokenLaw(guidance_scale=1.5, temperature=1.2, top_k=9)


def draw(
    law: TokenLaw = PLAIN, seeds: tuple[int, ...] = (3, 4), model: Any = STUDENT, **settings: Any
) -> Any:
    parts: dict[str, Any] = {"teacher": TEACHER} if "teacher_from" in settings else {}
    labels = LABELS[: len(seeds)]
    return DistilledSampler(**settings)(
        model, labels, law=law, generator=seeded(*seeds), batch_size=len(seeds), codebook=CODES, **parts
    )


def noise_of(*seeds: int) -> Tensor:
    keys = draw_keys(seeded(*seeds), len(seeds))
    slots = torch.arange(SLOTS).expand(len(seeds), -1)
    return CounterNoise(keys, "cpu").normal(slots, LENGTH, CHAIN, dtype=torch.float64)


def by_hand(label: int, vectors: Tensor, known: int) -> Tensor:
    """Tokens [L, D] after one call: codes up to the split, vectors after it, what is known before both."""
    logits, drawn = straight_line(student_weights(), label, vectors, known)
    tokens = torch.cat([CODES[logits.argmax(-1)][:SPLIT], drawn[SPLIT:]])
    return torch.cat([vectors[:known], tokens[known:]])


@pytest.mark.parametrize("row", [0, 1])
def test_one_call_and_two_are_those_of_the_layout(row):
    noise, label = noise_of(3, 4)[row], int(LABELS[row])
    first = by_hand(label, noise, 0)
    assert torch.allclose(draw(steps=1).tokens[row], first, atol=1e-9)
    again = torch.cat([first[:RESTART], noise[RESTART:]])  # the same noise as in the first call
    second = by_hand(label, again, RESTART)
    found = draw(steps=2)
    assert torch.allclose(found.tokens[row], second, atol=1e-9)
    assert not torch.allclose(first[RESTART:], second[RESTART:], atol=1e-3)
    assert found.trace.target_calls.tolist() == [2, 2]
    assert found.trace.commit_call[row].tolist() == [0] * RESTART + [1] * (SLOTS - RESTART)
    assert not found.trace.lossless and not found.trace.identical


def test_a_second_call_may_draw_no_codes():
    """As in the released B, whose second call begins where the codes end."""
    model, noise = tiny_student(first_continuous=RESTART), noise_of(3, 4)[0]
    logits, drawn = straight_line(student_weights(), int(LABELS[0]), noise, 0)
    kept = CODES[logits.argmax(-1)][:RESTART]
    again = torch.cat([kept, noise[RESTART:]])
    drawn = straight_line(student_weights(), int(LABELS[0]), again, RESTART)[1]
    found = draw(steps=2, model=model)
    assert torch.allclose(found.tokens[0], torch.cat([kept, drawn[RESTART:]]), atol=1e-9)


def test_a_teacher_that_draws_all_kept_slots_draws_its_own_tokens():
    request: dict[str, Any] = dict(law=WARM, batch_size=2)
    plain = AutoregressiveSampler()(TEACHER, LABELS, generator=seeded(3, 4), **request)
    found = draw(WARM, steps=2, teacher_from=0)
    assert torch.equal(found.tokens[:, :RESTART], CODES[plain.tokens[:, :RESTART]])
    assert found.trace.target_calls.tolist() == [RESTART + 1] * 2
    noise = noise_of(3, 4)
    for row in range(2):
        known = torch.cat([CODES[plain.tokens[row, :RESTART]], noise[row, RESTART:]])
        assert torch.allclose(found.tokens[row], by_hand(int(LABELS[row]), known, RESTART), atol=1e-9)


def test_a_teacher_goes_on_from_the_tokens_of_the_first_call():
    """Greedily, so that its tokens are the largest logits of one pass over all that is known."""
    start, greedy = 4, TokenLaw(temperature=0.0)
    found, first = draw(greedy, steps=2, teacher_from=start), draw(steps=1)
    ids = (found.tokens[:, :RESTART, None] == CODES).all(-1).long().argmax(-1)  # [B, r]
    assert torch.equal(CODES[ids[:, :start]], first.tokens[:, :start])
    logits = TEACHER.teacher_forced(torch.cat([ids, ids[:, :1]], 1), LABELS)  # [B, r + 1, V]
    assert torch.equal(ids[:, start:], logits.argmax(-1)[:, start:RESTART])
    # A call of the student, the teacher's prefill, a call for each of its slots, and a call of the student.
    assert found.trace.target_calls.tolist() == [1 + 1 + (RESTART - start) + 1] * 2
    assert found.trace.commit_call[0].tolist() == [0] * start + [1, 2] + [3] * (SLOTS - RESTART)
    noise, known = noise_of(3, 4), CODES[ids]
    second = by_hand(int(LABELS[0]), torch.cat([known[0], noise[0, RESTART:]]), RESTART)
    assert torch.allclose(found.tokens[0], second, atol=1e-9)


def test_a_seed_gives_one_picture_and_another_seed_another():
    assert torch.equal(draw(seeds=(3,)).tokens, draw(seeds=(3,)).tokens)
    assert not torch.allclose(draw(seeds=(3,)).tokens, draw(seeds=(5,)).tokens, atol=1e-3)


def test_a_stopped_decode_keeps_what_no_later_call_would_change():
    found = DistilledSampler(steps=2)(
        STUDENT, LABELS, law=PLAIN, generator=seeded(3, 4), batch_size=2, codebook=CODES,
        callback=lambda call, lengths: STOP,
    )  # fmt: skip
    assert found.trace.stopped and found.trace.target_calls.tolist() == [1, 1]
    assert found.trace.commit_call[0].tolist() == [0] * RESTART + [-1] * (SLOTS - RESTART)
    assert torch.equal(found.tokens, draw(steps=1).tokens)


def test_a_teacher_without_a_second_call_is_refused():
    refuses(ValueError, "teacher_from=2.*steps=1", DistilledSampler, steps=1, teacher_from=2)


def test_requests_that_cannot_be_served_are_refused():
    refuses(ValueError, r"guidance_scale=1\.5.*student alone", draw, WARM)
    refuses(ValueError, "teacher_from=6.*0.*5.*0.*5", draw, steps=2, teacher_from=RESTART)
    with pytest.raises(ValueError, match="teacher.*0.*3"):
        draw(steps=2, teacher_from=4, model=tiny_student(first_continuous=3))
    request: dict[str, Any] = dict(law=PLAIN, batch_size=2, generator=seeded(3, 4))
    sampler: Any = DistilledSampler(steps=2, teacher_from=1)
    refuses(ValueError, "teacher_from=1, but no", sampler, STUDENT, LABELS, codebook=CODES, **request)
    other = tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1, grid_size=3)
    refuses(ValueError, "TokenGrid", sampler, STUDENT, LABELS, codebook=CODES, teacher=other, **request)
    refuses(ValueError, r"\(12, 3\).*\(12, 4\)", sampler, STUDENT, LABELS, codebook=CODES[:, :3], **request)
    with pytest.raises(ValueError, match=r"none.*\(12, 4\)"):
        DistilledSampler()(STUDENT, LABELS, **request)


# -- with a teacher that draws a scale a call -------------------------------------------------------------------------

VAR_STUDENT = tiny_var_student(restart=14)  # keeps three scales: slots 0, 1 to 4, and 5 to 13
VAR_TEACHER: Any = tiny_var(seed=4)
MAPS = FormulaTokenizer(SIDES, 12)
STARTS = [0, 1, 5, 14, 30]


def draw_scales(law: TokenLaw = PLAIN, model: Any = VAR_STUDENT, **settings: Any) -> Any:
    parts: dict[str, Any] = {"teacher": VAR_TEACHER, "tokenizer": MAPS} if "teacher_from" in settings else {}
    return DistilledSampler(**settings)(
        model, torch.tensor([3, 1]), law=law, generator=seeded(3, 4), batch_size=2, codebook=MAPS.codebook, **parts
    )  # fmt: skip


def scales_by_hand(label: int, vectors: Tensor, known: int) -> Tensor:
    """Tokens [L, D] after one call of the student of VAR."""
    logits, drawn = student_logits(VAR_STUDENT, label, vectors, known)
    split = max(known, 14)
    return torch.cat([vectors[:known], MAPS.codebook[logits.argmax(-1)][known:split], drawn[split:]])


def noise_of_scales() -> Tensor:
    slots = torch.arange(30).expand(2, -1)
    return CounterNoise(draw_keys(seeded(3, 4), 2), "cpu").normal(slots, 2, CHAIN, dtype=torch.float64)


def ids_of(tokens: Tensor) -> Tensor:
    return (tokens[:, :, None] == MAPS.codebook).all(-1).long().argmax(-1)


def test_scales_in_one_call_and_two_are_those_of_the_layout():
    noise, found = noise_of_scales()[1], draw_scales(steps=2)
    first = scales_by_hand(1, noise, 0)
    assert torch.allclose(draw_scales(steps=1).tokens[1], first, atol=1e-9)
    second = scales_by_hand(1, torch.cat([first[:14], noise[14:]]), 14)
    assert torch.allclose(found.tokens[1], second, atol=1e-9)
    assert found.trace.target_calls.tolist() == [2, 2]


def test_a_teacher_that_draws_all_kept_scales_draws_its_own_tokens():
    found, law = draw_scales(WARM, steps=2, teacher_from=0), WARM
    plain = ScaleWiseSampler()(
        VAR_TEACHER, torch.tensor([3, 1]), tokenizer=MAPS, law=law, generator=seeded(3, 4), batch_size=2
    )
    assert torch.equal(found.tokens[:, :14], MAPS.codebook[plain.tokens[:, :14]])
    assert found.trace.target_calls.tolist() == [4, 4]  # three scales, and a call of the student
    assert found.trace.commit_call[0].tolist() == [0] + [1] * 4 + [2] * 9 + [3] * 16
    known = torch.cat([found.tokens[0, :14], noise_of_scales()[0, 14:]])
    assert torch.allclose(found.tokens[0], scales_by_hand(3, known, 14), atol=1e-9)


@pytest.mark.parametrize("start", [1, 5])
def test_a_teacher_goes_on_from_the_scales_of_the_first_call(start):
    """Greedily and unguided, so that its tokens are the largest logits of one pass over all maps that are known."""
    found, first = draw_scales(TokenLaw(temperature=0.0), steps=2, teacher_from=start), draw_scales(steps=1)
    ids, calls = ids_of(found.tokens[:, :14]), {1: 4, 5: 3}[start]
    assert torch.equal(MAPS.codebook[ids[:, :start]], first.tokens[:, :start])
    canvas, maps = MAPS.begin(2, torch.device("cpu"), torch.float64), []
    for scale in range(2):
        canvas = MAPS.accumulate(canvas, scale, ids[:, STARTS[scale] : STARTS[scale + 1]])
        maps.append(MAPS.next_map(canvas, scale + 1))
    with torch.no_grad():
        wanted = VAR_TEACHER.teacher_forced(maps, torch.tensor([3, 1])).argmax(-1)
    assert torch.equal(ids[:, start:], wanted[:, start:14])
    assert found.trace.target_calls.tolist() == [calls, calls]
    known = torch.cat([found.tokens[0, :14], noise_of_scales()[0, 14:]])
    assert torch.allclose(found.tokens[0], scales_by_hand(3, known, 14), atol=1e-9)


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 2), MAPS, "teacher", 3])
def test_a_teacher_that_predicts_no_tokens_is_refused(other):
    sampler, labels = DistilledSampler(steps=2, teacher_from=1), torch.tensor([3, 1])
    request: dict[str, Any] = dict(law=PLAIN, batch_size=2, generator=seeded(3, 4), codebook=MAPS.codebook)
    with pytest.raises(TypeError, match=f"teacher.*{type(other).__name__}"):
        sampler(VAR_STUDENT, labels, teacher=other, tokenizer=MAPS, **request)


def test_teachers_of_other_scales_and_slots_inside_one_are_refused():
    refuses(ValueError, "teacher_from=3.*0, 1, 5", draw_scales, steps=2, teacher_from=3)
    refuses(ValueError, "teacher_from=14.*0, 1, 5", draw_scales, steps=2, teacher_from=14)
    request: dict[str, Any] = dict(law=PLAIN, batch_size=2, generator=seeded(3, 4), codebook=MAPS.codebook)
    sampler, labels = DistilledSampler(steps=2, teacher_from=1), torch.tensor([3, 1])
    refuses(ValueError, "no tokenizer", sampler, VAR_STUDENT, labels, teacher=VAR_TEACHER, **request)
    for other in (tiny_var(scales=(1, 2, 4)), TEACHER):
        with pytest.raises(ValueError, match=r"\(1, 2, 3, 4\).*12"):
            sampler(VAR_STUDENT, labels, teacher=other, tokenizer=MAPS, **request)
