"""Small parts that several trainers read."""

import numpy as np
import pytest
import torch

from scripts.train.motion_tokens import MotionTokens
from tests.helpers.tiny import tiny_readers, tiny_vq_model
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder


@pytest.fixture(scope="module")
def readers() -> tuple[CaptionEncoder, VQModel]:
    """A random encoder of captions of `shapes`, and a random tokenizer of their pictures."""
    torch.manual_seed(1)
    return tiny_readers()


@pytest.fixture
def parts() -> MotionTokens:
    """Random codes of parts: those of backgrounds below 36, those of shapes above."""
    rng = np.random.default_rng(0)
    ground = np.arange(36, dtype=np.int16).reshape(6, 2, 3)
    ground[:, 0, 1:] = ground[:, 0, :1]  # a plain background has one code
    shapes = rng.integers(40, 200, (6, 2, 3, 6, 8, 2, 6, 6)).astype(np.int16)
    shapes[:, 0, 1:] = shapes[:, 0, :1]
    return MotionTokens(ground, shapes)


@pytest.fixture
def vq_model() -> VQModel:
    """For clips of `motion`."""
    return tiny_vq_model(codebook_size=200, channel_multipliers=(1, 1, 1, 1), base_channels=4, image_size=64)
