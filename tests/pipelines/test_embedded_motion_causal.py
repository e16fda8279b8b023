"""The embedded `motion_causal`: loaded by name, small, and what the parser reads in its clips."""

import json

import numpy as np
import pytest
import torch

from benchmarks.motion_long import consistency
from tests.helpers.tiny import quiet
from visual_spec.data.motion import held_out_prompts
from visual_spec.pipelines.chunk_video import ChunkVideoPipeline
from visual_spec.pipelines.embedded import describe, embedded_folder
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.video_files import pixels_of


@pytest.fixture(scope="module")
def pipe() -> ChunkVideoPipeline:
    return quiet(load_pipeline("motion_causal"))


def test_it_was_trained_on_clips_of_its_usual_length(pipe):
    folder = embedded_folder("motion_causal")
    assert describe(folder)["image_size"] == 64
    record = json.loads((folder / "transformer" / "training.json").read_text())
    assert pipe.training_frames == record["settings"]["chunk"] * record["settings"]["chunks"]


def test_objects_are_kept_for_the_training_length(pipe):
    """As recorded in docs/RESULTS.md, with room for another processor's rounding."""
    moving = [
        text
        for text in held_out_prompts(200, 3)
        if "bounces" in text and "plain" in text and "past" not in text
    ]
    prompts = moving[:12]
    drawn = pipe(prompts, generator=[torch.Generator().manual_seed(seed) for seed in range(12)])
    read = [consistency(text, pixels_of(clip)) for text, clip in zip(prompts, drawn.frames, strict=True)]
    for name, least in (("background", 0.9), ("kept", 0.55), ("colour", 0.55), ("continuous", 0.5)):
        assert np.mean([one[name].mean() for one in read]) > least, name
