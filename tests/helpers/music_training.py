"""A tiny codec that a short run can train."""

import functools

import torch
from transformers import EncodecModel

from scripts.train import codec as codec_module
from scripts.train.codec import codec_config

BOOKS, SIZE, DIM = 2, 16, 16


def tiny_codec() -> EncodecModel:
    torch.manual_seed(0)
    config = codec_config(num_filters=2, hidden_size=8, codebook_size=SIZE, num_codebooks=BOOKS)
    model = EncodecModel(config)
    codec_module.initialise(model)
    return model


@functools.cache
def coding_codec() -> EncodecModel:
    """With codes, unlike a fresh one."""
    model = tiny_codec().eval()
    for layer in model.quantizer.layers:
        layer.codebook.embed.normal_(std=0.1)  # pyright: ignore
    return model
