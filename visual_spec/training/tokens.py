"""Captioned pictures, and clips of `tunes`, as what trainers learn from: words of captions, and tokens."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from transformers import EncodecModel

from visual_spec.data import shapes
from visual_spec.data.captions import PICTURES
from visual_spec.data.tunes import NUM_FORMS
from visual_spec.data.tunes import caption as caption_of_tune
from visual_spec.data.tunes_synth import sample_dataset as sample_tunes
from visual_spec.models.columns.encodec import encode_waves
from visual_spec.models.core.checkpoints import read_written, write_content
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder

Painted = tuple[list[str], np.ndarray]  # captions and pictures


def to_signed(pictures: np.ndarray | Tensor) -> Tensor:
    """Return uint8 pictures `[B, H, W, 3]` as floats `[B, 3, H, W]` in [-1, 1]."""
    return rearrange(torch.as_tensor(pictures), "b h w c -> b c h w").float() / 127.5 - 1.0


@torch.no_grad()
def tokenize_dataset(
    vq_model: VQModel,
    encoder: CaptionEncoder,
    count: int,
    seed: int,
    *,
    held_out: bool = False,
    side: int = 16,
    cache: Path | None = None,
    workers: int = 1,
    data: str = "shapes",
    **kinds: Any,
) -> tuple[Tensor, Tensor]:
    """Return word ids `[N, T]` and tokens int16 `[N, side * side]` of fresh scenes of `PICTURES[data]`.

    `cache`, a folder, stores them if given. For a `side` below the tokenizer's own, pixels are averaged to shrink the
    pictures first. So many `workers` paint the pictures, each in a process of its own if there are several. `kinds`
    says what scenes, to `sample_dataset`.

    Raises:
        ValueError: `cache` holds the tokens of another tokenizer, or the words of another vocabulary.
    """
    which = "".join(f"_{value:g}" for value in kinds.values())
    path = cache / f"tokens_{data}_{side}_{count}_{seed}_{int(held_out)}{which}.pt" if cache else None
    owner = f"{fingerprint([vq_model])} {list(encoder.config['vocabulary'])} {encoder.max_words}"

    def draw() -> dict[str, Tensor]:
        words, tokens = [], []
        for captions, pictures in _painted(count, seed, held_out, workers, partial(_paint, data, **kinds)):
            words.append(encoder.word_ids(captions).cpu())
            for part in to_signed(pictures).split(20):
                part = F.adaptive_avg_pool2d(part, side * vq_model.patch_size)
                tokens.append(vq_model.encode_tokens(part.to(vq_model.device)).to(torch.int16).cpu())
        return {"words": torch.cat(words), "tokens": torch.cat(tokens)}

    saved = stored(path, owner, "tokens of another tokenizer or words of another encoder", draw)
    return saved["words"], saved["tokens"]


def stored(
    path: Path | None, owner: str, others: str, draw: Callable[[], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """What `draw` returns, from a file if it was drawn before; a path of None stores nothing.

    Raises:
        ValueError: the file is of another `owner`; says that it holds `others`.
    """
    if path is None:
        return draw()
    if not path.exists():
        write_content(path, {**draw(), "owner": owner})
    saved = read_written(path)
    if not isinstance(saved, dict) or saved.get("owner") != owner:
        raise ValueError(f"{path} holds {others}; pass another --out folder, or remove it.")
    return saved


def object_tokens(words: Tensor, tokens: Tensor) -> Tensor:
    """Return which tokens `[N, L]` belong to objects: those other than the usual background tokens of their slot.

    A caption ends in "<texture> <colour> background" or "a <colour> background", so pictures `[N, T]` with equal last
    words share a background.
    """
    _, group = words[:, -3:-1].unique(dim=0, return_inverse=True)
    usual = torch.stack([tokens[group == number].mode(0).values for number in range(int(group.max()) + 1)])
    return tokens != usual[group]


def weighted_cross_entropy(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of logits `[B, L, V]`, over tokens `[B, L]` with such weights `[B, L]`."""
    # Flat: with the codes in the middle a processor takes five to eight times as long.
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def dataset_scenes(count: int, seed: int, *, held_out: bool = False) -> list[shapes.Scene]:
    """Return the scenes of `shapes` whose words and tokens `tokenize_dataset` returns."""
    parts = zip(*_parts(count, seed, held_out), strict=True)
    return [scene for size, own, held in parts for scene in shapes.sample_scenes(size, own, held_out=held)]


def _parts(count: int, seed: int, held_out: bool) -> tuple[list[int], list[int], list[bool]]:
    """Sizes, seeds and kinds of the parts of a dataset, of at most 500 scenes each."""
    starts = range(0, count, 500)
    sizes, seeds = [min(500, count - start) for start in starts], [seed * 100_003 + start for start in starts]
    return sizes, seeds, [held_out] * len(starts)


def _painted(
    count: int, seed: int, held_out: bool, workers: int, paint: Callable[..., Painted]
) -> Iterator[Painted]:
    """Captions and pictures of scenes, a part at a time."""
    settings = _parts(count, seed, held_out)
    if workers == 1:
        yield from map(paint, *settings)
        return
    # Spawned, because a process that uses a GPU cannot be forked.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(paint, *settings)


def _paint(data: str, count: int, seed: int, held_out: bool, **kinds: Any) -> Painted:
    scenes, pictures = PICTURES[data].sample_dataset(count, seed, held_out=held_out, **kinds)
    return [PICTURES[data].caption(scene) for scene in scenes], pictures


@torch.no_grad()
def tokenize_tunes(
    codec: EncodecModel,
    encoder: CaptionEncoder,
    count: int,
    seed: int,
    *,
    held_out: bool = False,
    cache: Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Return word ids `[N, F, T]` of all caption forms, and codes int16 `[N, K, NUM_FRAMES]`, of fresh clips.

    `cache`, a folder, stores them if given.

    Raises:
        ValueError: `cache` holds the codes of another codec.
    """
    books = torch.stack([layer.codebook.embed.cpu() for layer in codec.quantizer.layers])  # pyright: ignore
    path = cache / f"codes_{count}_{seed}_{int(held_out)}.pt" if cache else None
    if path and path.exists():
        saved = read_written(path)
        if not torch.equal(saved["codebooks"], books):
            raise ValueError(f"{path} holds codes of another codec; pass another --out folder, or remove it.")
        return saved["words"], saved["codes"]
    words, codes = [], []
    for start in range(0, count, 100):
        tunes, waves = sample_tunes(min(100, count - start), seed * 100_003 + start, held_out=held_out)
        forms = [
            encoder.word_ids([caption_of_tune(tune, form) for tune in tunes]) for form in range(NUM_FORMS)
        ]
        words.append(torch.stack(forms, 1).cpu())
        for part in torch.from_numpy(waves).split(20):
            codes.append(encode_waves(codec, part[:, None]).to("cpu", torch.int16))
    result = torch.cat(words), torch.cat(codes)
    if path:
        write_content(path, {"words": result[0], "codes": result[1], "codebooks": books})
    return result
