"""Philox4x32-10: published vectors, and one set of bits from PyTorch, NumPy and Triton."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import visual_spec
from visual_spec.kernels import philox
from visual_spec.kernels.philox import (
    box_muller,
    philox_normal,
    philox_reference,
    philox_uniform,
    philox_uniform_reference,
)

# Counter, key, output: the vectors for philox4x32, 10 rounds, in Random123's `kat_vectors`.
PUBLISHED = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(key: int) -> int:
    """64 unsigned bits as the int64 with the same bits."""
    return key - 2**64 if key >= 2**63 else key


def philox_by_hand(key: int, counter: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 on Python integers, straight from the paper."""
    key0, key1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    word0, word1, word2, word3 = counter
    for _ in range(10):
        high0, low0 = divmod(word0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(word2 * 0xCD9E8D57, 2**32)
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return word0, word1, word2, word3


def random_keys(batch_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator)


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_vectors(counter, key, expected):
    bits = signed(key[1] << 32 | key[0])
    words = philox_reference(torch.tensor(bits), *(torch.tensor(word) for word in counter))
    assert tuple(int(word) for word in words) == expected
    arrays = philox_reference(np.array([bits]), *(np.array([word]) for word in counter))
    assert tuple(int(word[0]) for word in arrays) == expected


def test_reference_agrees_with_python_integers():
    keys = random_keys(50)
    words = torch.randint(0, 2**32, (4, 50), generator=torch.Generator().manual_seed(1))
    got = torch.stack(philox_reference(keys, *words))
    for index in range(50):
        expected = philox_by_hand(int(keys[index]), tuple(words[:, index].tolist()))
        assert tuple(got[:, index].tolist()) == expected


def test_reference_broadcasts():
    keys, slots, blocks = random_keys(2)[:, None, None], torch.arange(3)[None, :, None], torch.arange(5)
    words = philox_reference(keys, slots, blocks, torch.tensor(7), torch.tensor([[[9]]]))
    for word in words:
        assert word.shape == (2, 3, 5)
    assert words[2][1, 2, 4] == philox_by_hand(int(keys[1]), (2, 4, 7, 9))[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_reads_the_documented_word(dtype):
    keys, slots = random_keys(2), torch.tensor([[0, 5, 2**32 - 1], [3, 3, 4]])
    uniform = philox_uniform(keys, slots, 11, stream=2, round=6, first_block=8, dtype=dtype)
    assert uniform.shape == (2, 3, 11) and uniform.dtype == dtype
    for row, column, number in np.ndindex(2, 3, 11):
        counter = (int(slots[row, column]), 8 + number // 4, 2, 6)
        word = philox_by_hand(int(keys[row]), counter)[number % 4]
        expected = (np.array(word, dtype=uniform.numpy().dtype) + 0.5) * 2.0**-32
        assert uniform[row, column, number] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (3, 5, 1023), (1, 2, 2049), (2, 0, 9)])
@pytest.mark.parametrize("piece", [1, 600, 1 << 20])
def test_cpu_path_gives_the_bits_of_the_reference(monkeypatch, dtype, shape, piece):
    monkeypatch.setattr(philox, "_PIECE", piece)
    batch_size, window, count = shape
    slots = torch.randint(0, 2**32, (batch_size, window), generator=torch.Generator().manual_seed(2))
    per_slot = torch.arange(batch_size * window).reshape(batch_size, window)
    for round in (0, 3, torch.tensor(4), torch.arange(batch_size), per_slot):
        arguments = (random_keys(batch_size), slots, count, 1, round, 2, dtype)
        assert torch.equal(philox_uniform(*arguments), philox_uniform_reference(*arguments))


def test_slots_may_be_strided_views():
    keys, slots = random_keys(4)[::2], torch.arange(24).reshape(2, 12)[:, ::3]
    assert torch.equal(
        philox_uniform(keys, slots, 5, 0), philox_uniform(keys.clone(), slots.contiguous(), 5, 0)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ends_stay_open(dtype):
    unit = philox._to_unit(torch.tensor([0, 1, 2**32 - 129, 2**32 - 128, 2**32 - 1]).to(dtype))
    assert unit.min() > 0
    assert unit.max() < 1
    assert unit.diff().min() >= 0


def test_normal_numbers_read_the_documented_words():
    keys, slots = random_keys(2), torch.tensor([[0, 5, 2**32 - 1], [3, 3, 4]])
    normal = philox_normal(keys, slots, 11, stream=2, round=6, first_block=8, dtype=torch.float64)
    assert normal.shape == (2, 3, 11)
    for row, column, number in np.ndindex(2, 3, 11):
        words = philox_by_hand(int(keys[row]), (int(slots[row, column]), 8 + number // 4, 2, 6))
        first, second = ((word + 0.5) / 2**32 for word in words[number % 4 // 2 * 2 :][:2])
        angle = 2 * math.pi * second
        expected = math.sqrt(-2 * math.log(first)) * (math.sin(angle) if number % 2 else math.cos(angle))
        assert normal[row, column, number].item() == pytest.approx(expected, rel=1e-13, abs=1e-13)
    assert torch.equal(philox_normal(keys, slots, 11, 2, 6, 8), normal.float())


def test_normal_numbers_of_the_first_and_the_last_word_are_finite():
    ends = philox._to_unit(torch.tensor([0.0, 1, 2**31, 2**32 - 1], dtype=torch.float64))
    normal = box_muller(torch.cartesian_prod(ends, ends).flatten())
    radius = normal.view(-1, 2).norm(dim=-1)
    assert radius.max() == pytest.approx(math.sqrt(66 * math.log(2))) and radius.max() < 6.77
    assert 0 < radius.min() < 2e-5


def test_kernel_gives_the_bits_of_the_reference():
    """In a process of its own: Triton reads TRITON_INTERPRET when the kernel is defined."""
    program = """
import torch
from visual_spec.kernels.philox import philox_normal, philox_normal_triton
from visual_spec.kernels.philox import philox_uniform_reference, philox_uniform_triton

generator = torch.Generator().manual_seed(0)
kinds = [(torch.float32, float("nan")), (torch.float64, -7.0)]
cases = 0
for batch_size, window, count in [(1, 1, 1), (2, 3, 7), (1, 1, 1023), (1, 1, 1026), (2, 0, 5)]:
    keys = torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator)
    slots = torch.randint(0, 2**32, (batch_size, window), generator=generator)
    rounds = torch.randint(0, 2**32, (batch_size, window), generator=generator)
    last = 2**32 - (count + 3) // 4
    for stream, round, first_block in [(0, 0, 0), (1, 1, 1), (2**32 - 1, rounds, last), (3, keys, 5)]:
        dtype, poison = kinds[(cases + cases // 4) % 2]
        out = torch.full((batch_size, window, count), poison, dtype=dtype)
        got = philox_uniform_triton(out, keys, slots, stream, round, first_block)
        expected = philox_uniform_reference(keys, slots, count, stream, round, first_block, dtype)
        assert got is out and torch.equal(got, expected), (batch_size, window, count, stream, dtype)
        # Normal numbers are those of the definition up to the last digits of logarithm and cosine.
        got = philox_normal_triton(torch.full_like(out, poison), keys, slots, stream, round, first_block)
        expected = philox_normal(keys, slots, count, stream, round, first_block, dtype)
        near = dict(rtol=2e-7, atol=0) if dtype == torch.float32 else dict(rtol=0, atol=4e-15)
        torch.testing.assert_close(got, expected, **near)
        cases += 1

# The kernel writes its own cells only: the row after the output keeps its poison.
memory = torch.full((2, 3, 7), float("nan"))
philox_uniform_triton(memory[:1], torch.tensor([5]), torch.arange(3)[None], 0)
assert memory[0].isfinite().all() and memory[1].isnan().all()
print("cases", cases)
"""
    root = Path(visual_spec.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cases", "20"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(3, dtype=torch.int64)}, r"keys.*\(3,\).*\(2, 4\)"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"\(2,\).*\[B\].*\[B, W\]"),
        ({"round": torch.zeros(4, dtype=torch.int64)}, r"round.*\(4,\).*\(2, 4\)"),
        ({"count": 0}, "count=0.*1"),
        ({"dtype": torch.float16}, r"dtype=torch\.float16.*torch\.float32"),
    ],
)
def test_refusals(change, message):
    arguments = {
        "keys": random_keys(2),
        "slots": torch.zeros(2, 4, dtype=torch.int64),
        "count": 5,
        "stream": 0,
    }
    with pytest.raises(ValueError, match=message):
        philox_uniform(**{**arguments, **change})
