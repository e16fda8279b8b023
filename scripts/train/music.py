"""Train the embedded music models and their caption encoder on codec tokens of `tunes`.

Two models of one architecture, transformers' `MusicgenForCausalLM`:

* autoregressive, as MusicGen (Copet et al. 2023): teacher-forced cross entropy over all codebooks in a delay pattern,
  or in another one;
* masked, as MAGNeT (Ziv et al. 2024, section 3): for every clip one codebook is drawn. Spans of three of its frames are
  hidden and predicted; earlier codebooks are known, later ones hidden. The hidden share is cos(pi u / 2) of a uniform
  u, as in the decoder's schedule, and the loss counts the hidden codes of this codebook.

A tenth of the captions is dropped, so that classifier-free guidance works (MusicGen section 2.3).

As in `scripts.train.ar`, most codes follow from earlier ones and the caption matters in few places. So until the
last part of an autoregressive run, a share of the clips has hidden input steps, most of them all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import EncodecModel, MusicgenForCausalLM
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

from visual_spec.data.tunes import (
    ATTRIBUTES,
    NUM_FORMS,
    NUM_FRAMES,
    VOCABULARY,
    Tune,
    caption,
)
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.patterns import LAYOUTS, CodebookPattern
from visual_spec.models.core.settings import Count, OneOf, Share, read_fields
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.models.text.caption_encoder import CaptionEncoder, split_words
from visual_spec.training.loop import Descent, RunOptions, Trainer, muon_and_adamw, option, read_options
from visual_spec.training.tokens import tokenize_tunes

KINDS = ("autoregressive", "masked")
SPAN = 3  # frames that MAGNeT hides together, 60 ms


@dataclass(frozen=True)
class MusicTraining:
    """Settings of a run.

    `kind` is one of `KINDS`. `pattern` lays out the codebooks of an autoregressive model, with the `frame_order` of
    "stack_delay". `hidden_clips` is the share of clips with hidden steps, `wholly_hidden` the share of those with all
    steps hidden, and `hidden_until` the share of the run until which steps are hidden; masked models use their own
    masks. `bfloat16` computes the matrix products in bfloat16.
    """

    kind: Annotated[str, OneOf(KINDS)] = "autoregressive"
    pattern: Annotated[str, OneOf(LAYOUTS)] = "delay"
    frame_order: list[int] = field(default_factory=list)
    steps: Count = 4000
    batch_size: Count = 32
    clips: Count = 24000
    held_out_clips: Count = 200
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.02
    caption_dropout: Share = 0.1
    hidden_clips: Share = 0.3
    wholly_hidden: Share = 0.6
    hidden_until: Share = 0.6
    reach: int = 5
    train_text_encoder: bool = True
    bfloat16: bool = False
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        read_fields(self)


def music_config(
    vocab_size: int, num_codebooks: int, dim: int = 192, num_layers: int = 4, num_heads: int = 4
) -> MusicgenDecoderConfig:
    """Return MusicGen's decoder at a small size, without dropout: a procedural data set has no limit in size."""
    return MusicgenDecoderConfig(
        vocab_size=vocab_size,
        num_codebooks=num_codebooks,
        hidden_size=dim,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        ffn_dim=4 * dim,
        max_position_embeddings=512,
        pad_token_id=vocab_size,
        bos_token_id=vocab_size,
        dropout=0.0,
        is_decoder=True,
        add_cross_attention=True,
    )


def initialise(model: MusicgenForCausalLM) -> None:
    """Initialise code embeddings and the caption projections at a scale of order one.

    With the usual standard deviation of 0.02 the blocks drown the words (see `scripts.train.ar.initialise`).
    """
    decoder: Any = model.model.decoder
    for table in decoder.embed_tokens:
        nn.init.normal_(table.weight, std=0.3)
    for layer in decoder.layers:
        for projection in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)


# -- the data ----------------------------------------------------------------------------------------------------------


def tunes_vocabulary() -> list[str]:
    """Return every word that a `tunes` caption can hold, in any of its forms."""
    words: Any = {name: VOCABULARY[name][0] for name in ATTRIBUTES}
    first = Tune(**words, unit=1, notes=())
    tunes = [replace(first, **{name: value}) for name in ATTRIBUTES for value in VOCABULARY[name]]
    seen = [word for form in range(NUM_FORMS) for tune in tunes for word in split_words(caption(tune, form))]
    return list(dict.fromkeys(seen))


# -- MAGNeT's masks ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def span_counts(num_frames: int, span: int = SPAN) -> tuple[int, ...]:
    """Return how many spans hide 0, 1, ..., 100 percent of the frames on average.

    u spans with different uniformly drawn start frames may overlap. They leave a frame visible with probability
    C(T - span, u) / C(T, u) (MAGNeT, appendix C).

    Raises:
        ValueError: the clip is not longer than a span.
    """
    if num_frames <= span:
        raise ValueError(f"{num_frames} frames hold no spans of {span}; pass longer clips.")
    hidden, left = [0.0], 1.0
    for already in range(num_frames):
        left *= max(0, num_frames - span - already) / (num_frames - already)
        hidden.append(1 - left)
    return tuple(int(np.searchsorted(hidden, percent / 100)) for percent in range(101))


def span_mask(shares: np.ndarray, num_frames: int, rng: np.random.Generator, span: int = SPAN) -> np.ndarray:
    """Which frames to hide, bool `[B, T]`: overlapping spans, at least one, of about these shares `[B]` of frames.

    A span that starts near the end is cut off.
    """
    counts = np.maximum(1, np.array(span_counts(num_frames, span))[np.rint(100 * shares).astype(int)])
    starts = rng.random((len(shares), num_frames)).argsort(1) < counts[:, None]
    mask = starts.copy()
    for shift in range(1, span):
        mask[:, shift:] |= starts[:, :-shift]
    return mask


def hidden_codes(stages: Tensor, mask: Tensor, num_codebooks: int) -> Tensor:
    """Which codes are hidden, bool `[B, K, T]`: the ones of `mask` `[B, T]` at `stages`, long `[B]`, and all later."""
    books = torch.arange(num_codebooks, device=stages.device)[None, :, None]
    at = stages[:, None, None]
    return (books > at) | ((books == at) & mask[:, None])


# -- training ----------------------------------------------------------------------------------------------------------


def autoregressive_losses(
    model: MusicgenColumnModel, condition: TextCondition, codes: Tensor, dropped: Tensor, hidden_steps: Tensor
) -> Tensor:
    """Return the cross entropy `[B, K, T]` of every code."""
    logits = model.teacher_forced(codes, condition, dropped, hidden_steps)  # [B, K, T, V]
    return F.cross_entropy(logits.permute(0, 3, 1, 2), codes, reduction="none")


def masked_losses(
    model: MagnetModel, condition: TextCondition, codes: Tensor, dropped: Tensor, stages: Tensor, mask: Tensor
) -> Tensor:
    """Return the cross entropy `[B, T]` of the codebooks `stages`; only the frames of `mask` `[B, T]` count."""
    hidden = hidden_codes(stages, mask, model.num_codebooks)
    logits = model.logits(
        codes.masked_fill(hidden, model.special_id), condition, stages, dropped
    )  # [B, T, V]
    wanted = codes[torch.arange(len(codes), device=codes.device), stages]
    return F.cross_entropy(logits.mT, wanted, reduction="none")


def train_music(
    model: MusicgenForCausalLM,
    encoder: CaptionEncoder,
    codec: EncodecModel,
    settings: MusicTraining,
    out: Path,
    *,
    every: int = 200,
) -> dict:
    """Train model and encoder in place, on their device; save them in `out/transformer` and `out/text_encoder`; return
    the record, which is also written to `out/training.json`.

    An interrupted run resumes from `out/resume.pt` with the same result; the finished run removes it.

    Raises:
        ValueError: the networks do not fit each other, or `out` holds codes of another codec.
    """
    _check_fit(model, encoder, codec)
    loss = _loss(model, encoder, settings)
    torch.manual_seed(settings.seed)
    words, codes = tokenize_tunes(codec, encoder, settings.clips, settings.seed + 1, cache=out)
    modules = nn.ModuleDict({"transformer": model, "text_encoder": encoder}).train()
    encoder.requires_grad_(settings.train_text_encoder)
    trained = [p for p in modules.parameters() if p.requires_grad]
    optimisers = muon_and_adamw(
        model.model.decoder.layers, trained, settings.learning_rate, settings.weight_decay
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    draw = _draw_masked if settings.kind == "masked" else _draw_autoregressive

    def batch(step: int) -> tuple[Tensor, ...]:
        # One generator per step, so that a resumed run sees the same data.
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(codes), size=settings.batch_size))
        forms = torch.from_numpy(rng.integers(NUM_FORMS, size=settings.batch_size))
        dropped = torch.from_numpy(rng.random(settings.batch_size) < settings.caption_dropout)
        return words[chosen, forms], codes[chosen].long(), dropped, *draw(model, settings, step, rng)

    def save() -> None:
        model.save_pretrained(out / "transformer")
        encoder.save_pretrained(out / "text_encoder")

    run = Trainer(model, settings, out, descend, every=every, reads=[codec], parts={"modules": modules})
    return run.run(
        loss,
        batch,
        lambda: held_out_losses(model, encoder, codec, settings),
        save,
    )


def column_model(model: MusicgenForCausalLM, settings: MusicTraining) -> MusicgenColumnModel:
    """Return the model of whole clips in the pattern of the run.

    Raises:
        ValueError: the pattern lacks settings, or has others.
    """
    return MusicgenColumnModel(model, NUM_FRAMES, pattern=_pattern(model, settings))


def _pattern(model: MusicgenForCausalLM, settings: MusicTraining) -> CodebookPattern:
    order: dict[str, Any] = {"frame_order": settings.frame_order} if settings.frame_order else {}
    return CodebookPattern.named(settings.pattern, model.config.num_codebooks, **order)


def _loss(
    model: MusicgenForCausalLM, encoder: CaptionEncoder, settings: MusicTraining
) -> Callable[..., Tensor]:
    """Return the loss as a function of words, codes, dropped captions, and the output of `_draw_masked` or
    `_draw_autoregressive`."""
    columns = column_model(model, settings)
    magnet = MagnetModel(model, reach=settings.reach)
    device = model.device.type

    def autoregressive(words: Tensor, codes: Tensor, dropped: Tensor, hidden_steps: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=settings.bfloat16):
            return autoregressive_losses(columns, encoder(words), codes, dropped, hidden_steps).mean()

    def masked(words: Tensor, codes: Tensor, dropped: Tensor, stages: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=settings.bfloat16):
            losses = masked_losses(magnet, encoder(words), codes, dropped, stages, mask)
        return (losses * mask).sum() / mask.sum()

    return masked if settings.kind == "masked" else autoregressive


def _draw_autoregressive(
    model: MusicgenForCausalLM, settings: MusicTraining, step: int, rng: np.random.Generator
) -> tuple[Tensor]:
    """Draw input steps to hide, bool `[B, S - 1]`."""
    count = _pattern(model, settings).steps(NUM_FRAMES) - 1
    size = (settings.batch_size, 1)
    hide = rng.random(size) < settings.hidden_clips * (step < settings.hidden_until * settings.steps)
    rate = rng.uniform(0.3, 1.0, size)
    rate[rng.random(size) < settings.wholly_hidden] = 1.0
    return (torch.from_numpy(hide & (rng.random((settings.batch_size, count)) < rate)),)


def _draw_masked(
    model: MusicgenForCausalLM, settings: MusicTraining, step: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Draw stages, long `[B]`, and frames to hide, bool `[B, T]`."""
    stages = rng.integers(model.config.num_codebooks, size=settings.batch_size)
    shares = np.cos(0.5 * math.pi * rng.random(settings.batch_size))
    return torch.from_numpy(stages), torch.from_numpy(span_mask(shares, NUM_FRAMES, rng))


@torch.no_grad()
def held_out_losses(
    model: MusicgenForCausalLM, encoder: CaptionEncoder, codec: EncodecModel, settings: MusicTraining
) -> dict:
    """Return the cross entropy in nats a code on held-out clips: `held_out_loss`, mean of `held_out_loss_by_codebook`.

    For a masked model, only the hidden codes count, at the shares of its schedule.
    """
    words, codes = tokenize_tunes(codec, encoder, settings.held_out_clips, 777, held_out=True)
    columns = column_model(model, settings)
    magnet = MagnetModel(model, reach=settings.reach)
    by_codebook = []
    for number, (word_ids, part) in enumerate(zip(words[:, 0].split(20), codes.split(20), strict=True)):
        word_ids, part = word_ids.to(model.device), part.to(model.device).long()
        condition, kept = encoder(word_ids), torch.zeros(len(part), dtype=torch.bool, device=model.device)
        if settings.kind == "autoregressive":
            nothing = kept[:, None].expand(-1, columns.num_steps - 1)
            by_codebook.append(autoregressive_losses(columns, condition, part, kept, nothing).mean((0, 2)))
            continue
        rng, means = np.random.default_rng(number), []
        for stage in range(model.config.num_codebooks):
            shares = np.cos(0.5 * math.pi * (np.arange(len(part)) + 0.5) / len(part))
            mask = torch.from_numpy(span_mask(shares, NUM_FRAMES, rng)).to(model.device)
            losses = masked_losses(magnet, condition, part, kept, torch.full_like(part[:, 0, 0], stage), mask)
            means.append((losses * mask).sum() / mask.sum())
        by_codebook.append(torch.stack(means))
    mean = torch.stack(by_codebook).mean(0)
    return {
        "held_out_loss": round(mean.mean().item(), 4),
        "held_out_loss_by_codebook": [round(value, 4) for value in mean.tolist()],
    }


def _check_fit(model: MusicgenForCausalLM, encoder: CaptionEncoder, codec: EncodecModel) -> None:
    codes = (codec.config.num_quantizers, codec.config.codebook_size)
    if (model.config.num_codebooks, model.config.vocab_size) != codes:
        raise ValueError(
            f"a model of {model.config.num_codebooks} codebooks of {model.config.vocab_size} codes, and a codec of "
            f"{codes[0]} of {codes[1]}; pass a model made for this codec."
        )
    if encoder.config["dim"] != model.config.hidden_size:
        raise ValueError(
            f"a caption encoder of width {encoder.config['dim']} and a model of width {model.config.hidden_size}; "
            "the model reads its features as they are, pass one of the same width."
        )


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train an embedded music model.

`python scripts/train music --kind masked --codec FOLDER --out FOLDER`

From the embedded model, in another codebook pattern:

`python scripts/train music --pattern flat --codec TUNES/codec --start_from TUNES --text_encoder TUNES/text_encoder \\
--out FOLDER`

Afterwards `--out` holds `transformer/`, `text_encoder/` and `training.json`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    codec: Path = option("folder that python scripts/train codec wrote")
    text_encoder: Path | None = option("a trained text encoder to keep as it is; without: train one", None)
    start_from: Path | None = option("folder with transformer/ and text_encoder/ to start from", None)
    dim: int = 192
    num_layers: int = 4
    num_heads: int = 4


def main() -> None:
    options, settings = read_options(HELP, Options, MusicTraining)
    settings = replace(settings, train_text_encoder=options.text_encoder is None)
    torch.manual_seed(settings.seed)
    codec = EncodecModel.from_pretrained(options.codec, dtype=torch.float32).eval().to(options.device)
    if options.start_from is not None:
        model = MusicgenForCausalLM.from_pretrained(options.start_from / "transformer", dtype=torch.float32)
    else:
        size = (options.dim, options.num_layers, options.num_heads)
        model = MusicgenForCausalLM(
            music_config(codec.config.codebook_size, codec.config.num_quantizers, *size)
        )
        initialise(model)
    kept = options.text_encoder or (options.start_from and options.start_from / "text_encoder")
    if kept:
        encoder = CaptionEncoder.from_pretrained(kept)
    else:
        width = model.config.hidden_size
        encoder = CaptionEncoder(tunes_vocabulary(), dim=width, num_layers=1, num_heads=4, max_words=20)
    parts = model.to(options.device), encoder.to(options.device), codec
    record = train_music(*parts, settings, options.out)
    print({name: record[name] for name in ("parameters", "held_out_loss", "seconds")})
