"""Small networks in the layouts of published judges, and distances in float64."""

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, PreTrainedTokenizerFast

from visual_spec.cli import main

_WORDS = ("a", "slow", "fast", "organ", "bell", "melody")
PROMPTS = ("a slow organ melody", "fast bell", "a melody", "a fast fast organ")


def words_tokenizer(special: Sequence[str], most: int) -> PreTrainedTokenizerFast:
    """A tokenizer of a few words.

    Args:
        special: what comes before the words.
        most: tokens that it cuts a text to.
    """
    ids = {word: place for place, word in enumerate(dict.fromkeys((*special, *_WORDS, "</s>")))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    ends = [(word, ids[word]) for word in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)  # type: ignore
    named = dict(
        bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=most
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def spread(model: nn.Module) -> None:
    """Larger weights than usual, so that a random network tells its inputs apart."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


def with_manifest(folder: Path, prompts: Sequence[str], kind: str = "png") -> Path:
    """A folder of samples with what `visual-spec sample` writes beside them; a prompt for each."""
    lines = [
        {"index": i, "file": f"{i:03d}.{kind}", "prompt": prompt, "seed": i, "crc32": i, "bytes": 1}
        for i, prompt in enumerate(prompts)
    ]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text("{}")
    return folder


def scores(capsys: Any, *arguments: Any) -> dict[str, Any]:
    """The figures that `visual-spec score` prints."""
    status = main(["score", *map(str, arguments), "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out.splitlines()[-1])["figures"]


def save_clap(folder: Path, *, fusion: bool = False) -> ClapModel:
    """A CLAP model of real architecture, tiny and random, saved with its tokenizer and a default extractor."""
    torch.manual_seed(0)
    text = dict(vocab_size=12, max_position_embeddings=12)
    text |= dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    sound: dict[str, Any] = dict(patch_embeds_hidden_size=8, depths=[1, 1], num_attention_heads=[1, 2])
    sound |= dict(hidden_size=16, enable_fusion=fusion, fusion_type="channel_map" if fusion else None)
    model = ClapModel(ClapConfig(text_config=text, audio_config=sound, projection_dim=6)).eval()
    spread(model)
    model.save_pretrained(folder)
    words_tokenizer(("<s>", "<pad>", "</s>", "<unk>"), 10).save_pretrained(folder)
    ClapFeatureExtractor().save_pretrained(folder)  # the default truncation, as released models have it
    return model


def write_clips(folder: Path, seconds: Sequence[float], seed: int, rate: int = 16_000) -> list[np.ndarray]:
    """Noisy tones of 16 bits as files; their samples."""
    folder.mkdir()
    rng, clips = np.random.default_rng(seed), []
    for index, length in enumerate(seconds):
        time = np.arange(int(length * rate)) / rate
        sound = 0.4 * np.sin(2 * np.pi * rng.uniform(100, 4000) * time) + 0.1 * rng.standard_normal(len(time))
        clips.append(np.clip(np.round(32767 * sound), -32768, 32767).astype("<i2"))
        with wave.open(str(folder / f"{index:03d}.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(clips[-1].tobytes())
    return clips


def mean_colours(setup: Any) -> Any:
    """In the place of an extractor: the mean colours of pictures."""

    def extract(samples: Any, first: int, end: int) -> dict[str, torch.Tensor]:
        rows = torch.from_numpy(samples.pictures(first, end, setup.size)).double().mean((1, 2)) / 255
        return {"features": rows, "logits": rows}

    return extract, [], ""


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
