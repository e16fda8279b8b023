"""Small networks in the layouts of published judges, and distances in float64."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, PreTrainedTokenizerFast


def save_clap(folder: Path, *, fusion: bool = False) -> ClapModel:
    """A CLAP model of real architecture, tiny and random, saved with its tokenizer and a default extractor."""
    torch.manual_seed(0)
    text = dict(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
    )
    sound = dict(
        patch_embeds_hidden_size=8,
        depths=[1, 1],
        num_attention_heads=[1, 2],
        hidden_size=16,
        enable_fusion=fusion,
        fusion_type="channel_map" if fusion else None,
    )
    model = ClapModel(ClapConfig(text_config=text, audio_config=sound, projection_dim=6)).eval()
    for parameter in model.parameters():  # larger than usual, so that a random network tells its inputs apart
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    words = ["<s>", "<pad>", "</s>", "<unk>", "a", "slow", "fast", "organ", "bell", "melody"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    ends = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)  # type: ignore
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=10,
    ).save_pretrained(folder)
    ClapFeatureExtractor().save_pretrained(folder)  # the default truncation, as released models have it
    return model


def make_pictures(folder, count, seed, size=24):
    """Smooth pictures that differ in colour, as PNG files."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        small = Image.fromarray(rng.integers(0, 256, (3, 3, 3), np.uint8))
        small.resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{index:03d}.png")
    return folder


def exact_distance(one, other):
    """Squared Frechet distance of few samples of many features: the root of a product by its singular values."""
    one, other = one.double(), other.double()
    first, second = ((part - part.mean(0)) / (len(part) - 1) ** 0.5 for part in (one, other))
    inner = torch.linalg.svdvals(first @ second.T).sum()
    return float(
        (one.mean(0) - other.mean(0)).square().sum()
        + first.square().sum()
        + second.square().sum()
        - 2 * inner
    )
