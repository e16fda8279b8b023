"""MiniMax-Music 3 of diffusers, tiny and random: its block of codes, accelerated and as it is."""

import copy
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.minimax_music3 import encoders
from torch import Tensor

import visual_spec
from tests.helpers.copies import check_copy, unpickled
from tests.helpers.refusals import refuses
from tests.helpers.tiny_depth import MUSIC_WIDTH as WIDTH
from tests.helpers.tiny_depth import tiny_minimax_music as pipeline
from tests.helpers.tiny_minimax_music import FRAMES, hiddens


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The codes of frames, [2, 8] each, as the loop of diffusers feeds them back."""
    read: list[Tensor] = []

    def embed(language_model: Any, decoder: Any, frame: Tensor) -> Tensor:
        read.append(frame)
        return plain(language_model, decoder, frame)

    plain = encoders._embed_audio_frame
    monkeypatch.setattr(encoders, "_embed_audio_frame", embed)
    return read


@pytest.mark.parametrize("window", (None, "depth-window", "depth-window:window=3"))
@pytest.mark.parametrize("seed", range(3))
def test_codes_frames_and_the_draws_after_them_are_those_of_diffusers(
    codes: list[Tensor], seed: int, window: str | None
) -> None:
    pipe = pipeline()
    expected, after = hiddens(pipe, seed)
    assert visual_spec.accelerate(pipe, window) is pipe
    drawn, then = hiddens(pipe, seed)
    assert len(codes) == 2 * FRAMES
    assert all(map(torch.equal, codes[:FRAMES], codes[FRAMES:]))
    assert expected.shape == (1, FRAMES, 8 * WIDTH)
    torch.testing.assert_close(drawn, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(then, after)
    assert (pipe.last_trace.frames, pipe.last_trace.plain) == (FRAMES, 0)
    assert not torch.allclose(hiddens(pipe, seed + 7)[0], expected)


def test_modules_are_their_own_outside_of_the_block_and_after_restore() -> None:
    pipe = pipeline()
    parts = [*pipe.language_model.modules(), *pipe.rvq_depth_decoder.modules()]
    before = [set(vars(part)) for part in parts]
    block = pipe._blocks.sub_blocks["generate"]
    visual_spec.accelerate(visual_spec.accelerate(pipe))
    hiddens(pipe, 0)
    assert [set(vars(part)) for part in parts] == before
    assert pipe.language_model.lm_head(torch.randn(1, WIDTH, dtype=torch.float64)).isfinite().all()
    assert "6 frames of 7 codes" in visual_spec.summary(pipe)
    visual_spec.restore(pipe)
    assert pipe._blocks.sub_blocks["generate"] is block
    assert "not accelerated" in visual_spec.summary(pipe)


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
def test_a_copy_is_plain_and_stands_alone(copied: Any) -> None:
    check_copy(pipeline(), lambda pipe: hiddens(pipe, 0), copied)


def test_a_sampler_is_refused() -> None:
    refuses(TypeError, "speculative-jacobi", visual_spec.accelerate, pipeline(), "speculative-jacobi")
