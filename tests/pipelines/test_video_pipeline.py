"""Clips from prompts: shapes and files, short clips, saving and loading, and what is refused."""

import io
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.refusals import refuses
from tests.helpers.tiny import (
    quiet,
    seeded,
    tiny_text_encoder,
    tiny_transformer,
    tiny_video_pipeline,
    tiny_vq_model,
)
from visual_spec import ParallelJacobiSampler, SpeculativeJacobiSampler, VideoPipeline, ZipARSampler
from visual_spec.pipelines.video_files import video_bytes

PROMPT = "a red circle"


def test_every_output_type_shows_the_same_clip():
    pipe = tiny_video_pipeline()
    pt, latent = (pipe(PROMPT, generator=seeded(1), output_type=kind) for kind in ("pt", "latent"))
    assert pt.frames.shape == (1, 3, 3, 4, 4) and latent.frames.shape == (1, 3, 2, 2)
    assert torch.equal(pt.tokens, latent.frames.flatten(1)) and pt.tokens.shape == (1, 12)
    # An independent computation: the frames as so many pictures.
    codes = pipe.vq_model.quantize.lookup(latent.frames[0])
    expected = (pipe.vq_model.decode_latents(codes).clamp(-1, 1) / 2 + 0.5).detach()
    assert torch.allclose(pt.frames[0], expected, atol=1e-6)
    pictures = pipe(PROMPT, generator=seeded(1)).frames
    assert len(pictures) == 1 and len(pictures[0]) == 3 and isinstance(pictures[0][0], Image.Image)
    assert pt.trace.target_calls.tolist() == [12]


def test_the_default_temperature_is_that_of_calls_without_one(tmp_path):
    pipe = tiny_video_pipeline()

    def draw(pipe: Any, **law: Any) -> torch.Tensor:
        return pipe(
            PROMPT, generator=seeded(1, 2, 3), num_videos_per_prompt=3, output_type="latent", **law
        ).tokens

    cool, warm = draw(pipe, temperature=0.1), draw(pipe, temperature=1.0)
    assert not torch.equal(cool, warm) and torch.equal(draw(pipe), warm)
    pipe.register_to_config(default_temperature=0.1)
    assert torch.equal(draw(pipe), cool) and torch.equal(draw(pipe, temperature=1.0), warm)
    pipe.save_pretrained(tmp_path)
    loaded: Any = quiet(VideoPipeline.from_pretrained(tmp_path))
    assert torch.equal(draw(loaded), cool) and loaded.default_settings()["temperature"] == 0.1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_shorter_clip_is_the_beginning_of_the_whole_one(count):
    whole = tiny_video_pipeline()(PROMPT, generator=seeded(7), output_type="latent").frames
    for sampler in (None, SpeculativeJacobiSampler(8, initial_draft="moved_frame")):
        pipe = tiny_video_pipeline(sampler)
        found = pipe(PROMPT, num_frames=count, generator=seeded(7), output_type="latent")
        assert torch.equal(found.frames, whole[:, :count])
        assert pipe.num_timesteps == int(found.trace.target_calls)  # how often a callback would be called
        assert sampler or pipe.num_timesteps == 4 * count
        assert pipe.transformer.grid.frames == 3  # nothing was changed for good


@pytest.mark.parametrize("sampler", [ZipARSampler(1), ParallelJacobiSampler(1, 2)], ids=["zipar", "rows"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_next_frame_starts_early_in_row_orders(sampler, count):
    """Rows of successive frames form one chain: the first row of a frame starts before the frame above is complete."""
    pipe = tiny_video_pipeline(sampler)
    found = pipe(PROMPT, num_frames=count, generator=seeded(7), output_type="latent")
    assert found.frames.shape == (1, count, 2, 2)
    if isinstance(sampler, ZipARSampler):
        assert found.trace.target_calls.tolist() == [2 + (2 * count - 1) * 1]


@pytest.mark.parametrize("frames", [0, 4, -1, 2.0, True, "2"])
def test_frames_outside_the_grid_are_refused(frames):
    pipe = tiny_video_pipeline()
    pipe.transformer.prefill = None  # nothing may be computed
    refuses(ValueError, "1 to 3", pipe, PROMPT, num_frames=frames)


def test_other_bad_input_is_refused():
    pipe = tiny_video_pipeline()
    refuses(ValueError, "draws 4 x 4 pixels", pipe, PROMPT, height=64)
    with pytest.warns(UserWarning, match="green"):
        pipe("a green circle", generator=seeded(0), output_type="latent")


def test_parts_that_do_not_fit_are_refused():
    parts = tiny_vq_model(), tiny_text_encoder(), None
    refuses(ValueError, "use ImagePipeline", VideoPipeline, tiny_transformer(), *parts)
    refuses(ValueError, "out of 20", VideoPipeline, tiny_transformer(num_frames=2, vocab_size=20), *parts)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_gif_and_sheet_hold_every_frame(tmp_path, output_type):
    output = tiny_video_pipeline()(PROMPT, generator=seeded(3), output_type=output_type)
    plain = tiny_video_pipeline()(PROMPT, generator=seeded(3)).frames[0]
    gif = Image.open(output.save(tmp_path / "clip.gif"))
    assert gif.size == (256, 256)
    sheet = Image.open(output.save(tmp_path / "clip.png"))
    assert sheet.size == (4 + 2 + 4, 4 + 2 + 4)
    for index, (top, left) in enumerate([(0, 0), (0, 6), (6, 0)]):
        part = np.asarray(sheet)[top : top + 4, left : left + 4]
        assert np.array_equal(part, np.asarray(plain[index]))
    with pytest.raises(FileExistsError):
        output.save(tmp_path / "clip.png")
    output.save(tmp_path / "clip.png", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.gif", "clip.png"]


def test_an_mp4_plays_the_frames(tmp_path):
    av = pytest.importorskip("av")
    frames = np.zeros((5, 31, 64, 3), np.uint8)
    for index in range(5):
        frames[index, :, 12 * index : 12 * index + 12] = (220, 40, 40)
    content = video_bytes(frames, 12.5, "mp4")
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == 12.5
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(shown) == 5 and shown[0].shape == (9 * 31 + 1, 9 * 64, 3)  # the least whole factor, made even
    for index, frame in enumerate(shown):
        expected = frames[index].repeat(9, 0).repeat(9, 1).astype(int)
        assert np.abs(frame[:279].astype(int) - expected).mean() < 6


def test_without_pyav_mp4_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    output = tiny_video_pipeline()(PROMPT, generator=seeded(3))
    refuses(ImportError, r"\[video\]", output.save, tmp_path / "clip.mp4")
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_written_are_refused(tmp_path):
    output = tiny_video_pipeline()(PROMPT, generator=seeded(3), output_type="latent")
    refuses(ValueError, "output_type", output.save, tmp_path / "clip.gif")
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    for given, message in (
        ((frames, 8, "avi"), "'avi'"),
        ((frames[0], 8, "gif"), "T, H, W, 3"),
        ((frames, 0, "gif"), "frame_rate=0"),
        ((frames[:0], 8, "gif"), "given"),
    ):
        refuses(ValueError, message, video_bytes, *given)
