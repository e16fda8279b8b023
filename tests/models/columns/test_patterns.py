"""Codebook patterns: against the tables of the research note, and against layouts built literally, step by step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from visual_spec.models.columns.patterns import LAYOUTS, CodebookPattern

SPECIAL = 99
DIA = [0, *range(8, 16)]
MOSHI = [0, 1, 1, 1, 1, 1, 1, 1]

PATTERNS = {
    "parallel": CodebookPattern.parallel(3),
    "musicgen": CodebookPattern.delay([0, 1, 2, 3]),
    "partial delay": CodebookPattern.delay([0, 1, 1, 1]),
    "dia": CodebookPattern.delay(DIA),
    "higgs": CodebookPattern.delay(range(8)),
    "moshi": CodebookPattern.delay(MOSHI),
    "unsorted": CodebookPattern.delay([2, 0, 1]),
    "flat": CodebookPattern.flat(3),
    "partial flat": CodebookPattern.flat(4, [0, 1, 1, 1]),
    "partial flat, delayed": CodebookPattern.flat(3, [0, 1, 1], [0, 3, 3]),
    "coarse first": CodebookPattern.coarse_first(4),
    "coarse first, delayed": CodebookPattern.coarse_first(4, [0, 1, 2]),
    "grouped": CodebookPattern.grouped(4, 2),
    "stack": CodebookPattern.stack(3),
    "stack-delay": CodebookPattern.stack_delay(4, [0, 2, 1, 3]),
    "one codebook": CodebookPattern.delay([0]),
}


def codes_of(codebooks: int, frames: int, batch_size: int = 2) -> Tensor:
    return torch.arange(batch_size * codebooks * frames).view(batch_size, codebooks, frames)


def printed(pattern: CodebookPattern, frames: int) -> list[str]:
    """One line a codebook: the frame, counted from 1, that each step holds, or a dot."""
    table = pattern.frames_by_step(frames).tolist()
    return [" ".join("." if frame < 0 else str(frame + 1) for frame in row) for row in table]


# Drawn by hand from the definitions; audiocraft's documentation shows the same, after its initial empty step.
TABLES: list[tuple[str, int, list[str]]] = [
    ("parallel", 4, ["1 2 3 4", "1 2 3 4", "1 2 3 4"]),
    ("musicgen", 4, ["1 2 3 4 . . .", ". 1 2 3 4 . .", ". . 1 2 3 4 .", ". . . 1 2 3 4"]),
    ("partial delay", 3, ["1 2 3 .", ". 1 2 3", ". 1 2 3", ". 1 2 3"]),
    ("flat", 3, ["1 . . 2 . . 3 . .", ". 1 . . 2 . . 3 .", ". . 1 . . 2 . . 3"]),
    ("partial flat", 2, ["1 . 2 .", ". 1 . 2", ". 1 . 2", ". 1 . 2"]),
    ("partial flat, delayed", 4, ["1 2 3 . 4 . . . . .", *2 * [". . . 1 . 2 . 3 . 4"]]),
    ("coarse first", 3, ["1 2 3 . . .", *3 * [". . . 1 2 3"]]),
    ("coarse first, delayed", 2, ["1 2 . . . .", ". . 1 2 . .", ". . . 1 2 .", ". . . . 1 2"]),
    ("grouped", 2, ["1 . 2 . . . . .", ". 1 . 2 . . . .", ". . . . 1 . 2 .", ". . . . . 1 . 2"]),
    ("stack", 2, ["1 . . 2 . .", ". 1 . . 2 .", ". . 1 . . 2"]),
    ("stack-delay", 4, ["1 3 2 4 . . .", ". 1 3 2 4 . .", ". . 1 3 2 4 .", ". . . 1 3 2 4"]),
]


@pytest.mark.parametrize("name, frames, table", TABLES, ids=[name for name, *_ in TABLES])
def test_tables(name, frames, table):
    assert printed(PATTERNS[name], frames) == table


def literal(pattern: CodebookPattern, codes: Tensor) -> Tensor:
    """The sequence, one entry at a time: the (pass, place, turn) of every code, counted off in order."""
    batch_size, codebooks, frames = codes.shape
    size = len(pattern.frame_order)
    blocks = [[start + frame for frame in pattern.frame_order] for start in range(0, frames, size)]
    order = [frame for block in blocks for frame in block if frame < frames]
    at: dict[tuple, dict[int, int]] = {}  # the step's key: frame by codebook
    for number in range(1 + max(pattern.passes)):
        members = [k for k in range(codebooks) if pattern.passes[k] == number]
        turns = sorted({(-pattern.delays[k], pattern.levels[k]) for k in members})
        single = len({pattern.levels[k] for k in members}) == 1
        last = frames - 1 + max(pattern.delays[k] for k in members)
        for k in members:
            turn = 0 if single else turns.index((-pattern.delays[k], pattern.levels[k]))
            first = 0 if single else pattern.delays[k]
            for place in range(first, last + 1):  # the steps exist, also where they stay empty
                at.setdefault((number, place, turn), {})
            for rank, frame in enumerate(order):
                at[number, rank + pattern.delays[k], turn][k] = frame
    keys = sorted(at)
    while not at[keys[-1]]:
        keys.pop()
    sequence = torch.full((batch_size, codebooks, len(keys)), SPECIAL)
    for step, key in enumerate(keys):
        for k, frame in at[key].items():
            sequence[:, k, step] = codes[:, k, frame]
    return sequence


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("name", PATTERNS)
def test_apply_is_the_literal_construction_and_revert_undoes_it(name, frames):
    pattern = PATTERNS[name]
    codes = codes_of(pattern.codebooks, frames)
    sequence = pattern.apply(codes, SPECIAL + codes.numel())
    expected = literal(pattern, codes + 1000)
    assert sequence.shape == (2, pattern.codebooks, pattern.steps(frames))
    assert torch.equal(torch.where(pattern.valid(frames), sequence + 1000, SPECIAL), expected)
    assert (sequence == SPECIAL + codes.numel()).equal(~pattern.valid(frames).expand_as(sequence))
    assert torch.equal(pattern.revert(sequence), codes)
    assert pattern.num_frames(sequence.shape[2]) == frames


def test_reverts_logits():
    pattern = PATTERNS["musicgen"]
    codes = codes_of(4, 5)
    logits = torch.nn.functional.one_hot(pattern.apply(codes, 0), 40)  # [B, K, S, V]
    assert torch.equal(pattern.revert(logits).argmax(-1), codes)


def test_frames_are_complete_when_their_last_code_is():
    assert PATTERNS["musicgen"].complete_after(3).tolist() == [4, 5, 6]
    assert PATTERNS["coarse first"].complete_after(3).tolist() == [4, 5, 6]
    assert PATTERNS["partial flat"].complete_after(2).tolist() == [2, 4]
    assert PATTERNS["stack-delay"].complete_after(4).tolist() == [4, 6, 5, 7]


def test_only_whole_stacks_are_retained():
    assert PATTERNS["flat"].retained(2).all()
    assert PATTERNS["stack"].retained(2).tolist() == [False, False, True, False, False, True]
    assert PATTERNS["stack-delay"].retained(3).tolist() == [False] * 3 + [True] * 3


def test_tables_are_built_once_and_patterns_compare_by_value():
    pattern = CodebookPattern.delay([0, 1, 2, 3])
    assert pattern == CodebookPattern.named("delay", 4) and hash(pattern) == hash(PATTERNS["musicgen"])
    assert pattern.frames_by_step(500) is CodebookPattern.delay((0, 1, 2, 3)).frames_by_step(500)


def test_layouts_by_name():
    settings: dict[str, Any] = {"grouped": dict(group_size=2), "stack_delay": dict(frame_order=[1, 0])}
    for layout in LAYOUTS:
        pattern = CodebookPattern.named(layout, 4, **settings.get(layout, {}))
        assert pattern.codebooks == 4 and pattern.revert(pattern.apply(codes_of(4, 3), 0)).shape == (2, 4, 3)
    assert CodebookPattern.named("delay", 9, delays=DIA) == PATTERNS["dia"]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CodebookPattern.named("diagonal", 4), "layout='diagonal'.*parallel"),
        (lambda: CodebookPattern.named("delay", 4, delays=[0, 1]), r"delays=\(0, 1\).*4"),
        (lambda: CodebookPattern.parallel(0), "codebooks=0.*1"),
        (lambda: CodebookPattern.delay([]), "0 delays.*0.*0"),
        (lambda: CodebookPattern.delay([0, -1]), r"delays=\(0, -1\).*0"),
        (lambda: CodebookPattern.delay([1, 2]), r"\[1, 2\].*0"),
        (lambda: CodebookPattern.flat(3, [0, 2, 2]), r"levels=\(0, 2, 2\)"),
        (lambda: CodebookPattern.flat(3, [0, 1]), "3 delays, 2.*3"),
        (lambda: CodebookPattern.flat(3, [0, 1, 1], [0, 1, 2]), r"level 1.*\[1, 2\]"),
        (lambda: CodebookPattern.grouped(4, 3), "group_size=3.*4"),
        (lambda: CodebookPattern.stack_delay(4, [0, 2]), r"frame_order=\(0, 2\).*0"),
        (lambda: PATTERNS["musicgen"].steps(0), "num_frames=0.*1"),
        (lambda: PATTERNS["musicgen"].apply(codes_of(3, 5), 0), r"4.*\[B, 4, length\]"),
        (lambda: PATTERNS["musicgen"].revert(codes_of(4, 3)), "3 steps.*4"),
        (lambda: PATTERNS["flat"].revert(codes_of(3, 7)), "7 steps.*3.*3"),
    ],
)
def test_refuses(make, message):
    refuses(ValueError, message, make)
