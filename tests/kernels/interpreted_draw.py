"""The kernels of `draw` and `masked_sample` in Triton's interpreter; `test_draw.py` runs this file."""

import numpy as np
import pytest
import torch

from tests.kernels.laws import LAWS, Window, window
from visual_spec.kernels import draw as module
from visual_spec.kernels import masked_sample as masked_module
from visual_spec.kernels.draw import draw_reference, draw_triton
from visual_spec.kernels.masked_sample import masked_sample_reference, masked_sample_triton
from visual_spec.samplers.core.law import TokenLaw


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies have several."""
    for owner in (module, masked_module):
        monkeypatch.setattr(owner, "TILE", 64)


def drawn(here: Window, stream: int = 0, round: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (here.logits, here.keys, here.slots, torch.tensor(round), stream, here.numbers)
    tokens, finite, none = draw_triton(*arguments)
    expected, expected_finite, margins = draw_reference(*arguments, margins=True)
    assert torch.equal(tokens, expected) and torch.equal(finite, expected_finite) and none.shape == (0,)
    again, _, found = draw_triton(*arguments, margins=True)
    assert torch.equal(again, tokens)
    torch.testing.assert_close(found, margins, rtol=0, atol=2e-5)
    return tokens, finite


@pytest.mark.fast_sets(3)
@pytest.mark.parametrize("name", LAWS)
def test_draws_what_the_samplers_draw(name):
    here = window(LAWS[name], 2, 2, 130)
    tokens, finite = drawn(here, 2, 7)
    assert torch.equal(tokens, here.noise.categorical(here.target, here.slots, 2, 7))
    assert finite.all()


@pytest.mark.slow
def test_larger_vocabularies_and_full_tiles(monkeypatch):
    monkeypatch.setattr(module, "TILE", 256)
    for dtype, law in [(torch.bfloat16, LAWS["both"]), (torch.float16, TokenLaw(top_k=100))]:
        drawn(window(law, 1, 2, 1000, dtype=dtype))
    drawn(window(LAWS["top_p"], 1, 1, 512, scale=0.5))


def test_a_key_alone_decides_a_sample():
    here = window(LAWS["plain"], 3, 2, 130)
    tokens, _ = drawn(here)
    alone = Window(here.logits[1:2, 1:], here.keys[1:2], here.slots[1:2, 1:], here.numbers, here.law)
    assert torch.equal(drawn(alone)[0], tokens[1:2, 1:])


def test_nothing_to_draw():
    here = window(LAWS["plain"], 2, 3)
    none = Window(here.logits[:, :0], here.keys, here.slots[:, :0], here.numbers, here.law)
    assert drawn(none)[0].shape == (2, 0)


def test_logits_that_define_no_law_end_and_are_reported():
    for law in (
        TokenLaw(),
        TokenLaw(top_k=4, top_p=0.9),
        TokenLaw(guidance_scale=2.0, allowed=(3, 31), top_k=3),
    ):
        here = window(law, 1, 5)
        here.logits[0, 0, 5] = torch.nan
        here.logits[-1, 1, 30] = torch.inf
        here.logits[-1, 2] = -torch.inf
        here.logits[0, 3, 3:] = torch.nan
        tokens, finite, _ = draw_triton(here.logits, here.keys, here.slots, torch.tensor(0), 0, here.numbers)
        assert finite.tolist() == [[False, False, False, False, True]]
        assert ((tokens >= here.numbers.first) & (tokens < here.numbers.stop)).all()
        expected = here.noise.categorical(here.target, here.slots, 0)
        assert tokens[0, 4] == expected[0, 4]


def test_thresholds_at_hard_places():
    """Ties at the threshold, all logits equal, and spreads that no fixed number of halvings could cross."""
    ties = torch.arange(37) // 5 * 1.0
    wide = torch.cat([torch.tensor([3e38, -3e38, 1e30, -1e30]), torch.linspace(-1e-3, 1e-3, 33)])
    tight = 1 + torch.arange(37) * 2.0**-23
    for row in (ties, torch.zeros(37), wide, tight):
        for law in (
            TokenLaw(top_k=7),
            TokenLaw(top_k=36),
            TokenLaw(top_p=0.6),
            TokenLaw(top_k=12, top_p=0.05),
        ):
            here = window(law, 1, 1)
            here.logits = row.flip(0)[None, None].clone()
            tokens, log_probs, _, _ = masked_sample_triton(
                here.logits, here.keys, here.slots, torch.tensor(0), 0, here.numbers
            )
            # The mass of the kept set shows in the probability of any one of them.
            assert torch.equal(tokens, here.noise.categorical(here.target, here.slots, 0))
            torch.testing.assert_close(
                log_probs, here.target.gather(-1, tokens[..., None])[..., 0], rtol=1e-6, atol=1e-6
            )


def test_rows_far_apart(tmp_path):
    """Offsets beyond 2**31 numbers, and a row that starts in the middle of a larger one. The file is sparse."""
    stride, vocab_size = 2**30 + 48, 37
    flat = torch.from_numpy(np.memmap(tmp_path / "logits", np.float16, "w+", shape=(2 * stride + 64,)))
    here = window(LAWS["top_k"], 3, 1, vocab_size, dtype=torch.float16)
    far = flat.as_strided((3, 1, vocab_size), (stride, vocab_size, 1), storage_offset=5)
    far.copy_(here.logits)
    expected = drawn(here)
    arguments = (here.keys, here.slots, torch.tensor(0), 0, here.numbers)
    assert all(torch.equal(*pair) for pair in zip(draw_triton(far, *arguments), expected, strict=False))


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize("name", ["until", "top_k", "both", "greedy"])
def test_masked_sample(name):
    here = window(LAWS[name], 1, 3, 130, seed=4)
    arguments = (here.logits, here.keys, here.slots, torch.tensor(5), 1, here.numbers)
    found, expected = masked_sample_triton(*arguments), masked_sample_reference(*arguments)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[3], expected[3])
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
