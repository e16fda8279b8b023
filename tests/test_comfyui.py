"""The nodes for ComfyUI, by the contract of its documentation: a workflow is run as its executor runs it."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.tiny import seeded, tiny_pipeline, tiny_video_pipeline
from tests.helpers.tiny_audio import tiny_audio_pipeline
from visual_spec.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler


def execute(name: str, **inputs: Any) -> tuple:
    """As ComfyUI does: an instance of the class, its FUNCTION by keywords, one value for each of RETURN_TYPES."""
    kind = NODE_CLASS_MAPPINGS[name]
    declared = kind.INPUT_TYPES()
    usual = {
        key: spec[1]["default"] for key, spec in declared["required"].items() if "default" in (*spec, {})[1]
    }
    assert set(inputs) <= {*declared["required"], *declared.get("optional", {})}
    answer = getattr(kind(), kind.FUNCTION)(**usual | inputs)
    assert isinstance(answer, tuple) and len(answer) == len(kind.RETURN_TYPES)
    return answer


def test_every_node_declares_what_comfyui_reads() -> None:
    assert NODE_CLASS_MAPPINGS.keys() == NODE_DISPLAY_NAME_MAPPINGS.keys()
    made = {kind.RETURN_TYPES[0] for kind in NODE_CLASS_MAPPINGS.values()}
    for kind in NODE_CLASS_MAPPINGS.values():
        declared = kind.INPUT_TYPES()
        function = inspect.signature(getattr(kind, "draw", getattr(kind, kind.FUNCTION)))
        for section in declared.values():
            for name, (sort, *options) in section.items():
                assert name in function.parameters
                assert sort in ("STRING", "INT", "FLOAT", *made) or isinstance(sort, list)
                assert all(isinstance(one, dict) for one in options)


def test_pictures_are_those_of_the_pipeline(tmp_path: Path) -> None:
    tiny_pipeline().save_pretrained(tmp_path / "tiny")
    (model,) = execute("VisualSpecLoadModel", model=str(tmp_path / "tiny"), device="cpu", dtype="float32")
    plain = {"model": model, "prompt": "a red circle", "seed": 5, "batch_size": 3}
    (image,) = execute("VisualSpecGenerateImage", **plain)
    wanted = tiny_pipeline()(["a red circle"] * 3, generator=seeded(5, 6, 7), output_type="np").images
    assert image.dtype == torch.float32 and image.shape == (3, 8, 8, 3)
    assert 0 <= image.min() and image.max() <= 1 and np.allclose(image.numpy(), wanted, atol=1e-6)
    (sampler,) = execute("VisualSpecSampler", sampler="speculative-jacobi:window=3")
    before = model.sampler
    (again,) = execute("VisualSpecGenerateImage", sampler=sampler, **plain)
    assert model.last_trace.sampler == "SpeculativeJacobiSampler" and model.sampler is before
    assert torch.equal(again, image)
    (other,) = execute("VisualSpecGenerateImage", temperature=0.0, guidance_scale=-1.0, **plain)
    assert not torch.equal(other, image)


def test_clips_and_music() -> None:
    pipe = tiny_video_pipeline(AutoregressiveSampler())
    (frames,) = execute("VisualSpecGenerateImage", model=pipe, prompt="a red circle", seed=1, batch_size=2)
    wanted = pipe(["a red circle"] * 2, generator=seeded(1, 2), output_type="np").frames
    assert np.allclose(frames.numpy(), wanted.reshape(-1, *wanted.shape[2:]), atol=1e-6)
    pipe = tiny_audio_pipeline()
    (audio,) = execute("VisualSpecGenerateAudio", model=pipe, prompt="a slow sad organ", seed=1, batch_size=2)
    heard = pipe(["a slow sad organ"] * 2, generator=seeded(1, 2))
    assert np.array_equal(audio["waveform"].numpy(), heard.audios) and audio["waveform"].dim() == 3
    assert audio["sample_rate"] == heard.sampling_rate and isinstance(audio["sample_rate"], int)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="makes audio"):
        execute("VisualSpecGenerateImage", model=tiny_audio_pipeline(), prompt="x", seed=0)
    for setting in ("guidance_scale", "temperature"):
        for number in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{setting}={number}"):
                execute(
                    "VisualSpecGenerateImage", model=tiny_pipeline(), prompt="x", seed=0, **{setting: number}
                )
    with pytest.raises(ValueError, match="no-such"):
        execute("VisualSpecSampler", sampler="no-such")
