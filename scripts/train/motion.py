"""Train the embedded video model `motion`: a LlamaGen over the frames of clips, and its caption encoder.

Teacher-forced cross entropy over whole clips, put together from encoded parts
(`scripts.train.motion_tokens`), so every step sees new ones. The tokenizer comes from `shapes` and is not
trained. Weights of the `shapes` transformer are a good start: frames look like its pictures, and the same words name
the same things.

The first part of a run learns from the first frames of more clips: what words look like and where things go is decided
there, and later frames mostly repeat them. As in `scripts.train.ar`, some of these have hidden input tokens.
Places in and around an object of the frame before weigh more than the still background, and so does the first frame.
The weight of a place depends on what the model has seen there, never on the token to predict, so the law that it learns
is not biased. A tenth of the captions is dropped for guidance.

With `--near-to-far`, `motion_nar`: NAR's order over clips (arXiv 2503.10696), from the first blocks of a
trained `motion`, whose caption encoder it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train.ar import hidden_inputs, initialise
from scripts.train.motion_tokens import SIDE, MotionTokens, encode_parts
from visual_spec.data.motion import (
    CAMERAS,
    DIRECTIONS,
    ENDINGS,
    NUM_FRAMES,
    SIZES,
    SPEEDS,
    TEXTURES,
    caption,
    held_out_prompts,
    sample_clips,
)
from visual_spec.data.motion_parser import score
from visual_spec.data.shapes import BACKGROUND_COLOURS, OBJECT_COLOURS, SHAPES
from visual_spec.files.documents import write_json
from visual_spec.models.core.protocol import RASTER_ORDER
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_blocks import CaptionEmbedding
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder, split_words
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.training.flashar import Pass
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    print_record,
    read_options,
    round_matrices,
)


@dataclass(frozen=True)
class MotionTraining:
    """Settings of a run. `short_share` of the steps learn from the first `short_frames` frames of more clips."""

    steps: int = 2400
    batch_size: int = 4
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.02
    caption_dropout: float = 0.1
    short_share: float = 0.35
    short_frames: int = 4
    hidden_clips: float = 0.5
    wholly_hidden: float = 0.6
    near_weight: float = 3.0
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


def motion_vocabulary() -> list[str]:
    """Return every word that a `motion` caption can hold."""
    words = ["a", "on", "background", "moves", "and", "stays", "still", "past", "camera", *SIZES]
    words += [*OBJECT_COLOURS, *BACKGROUND_COLOURS, *SHAPES, *TEXTURES, *DIRECTIONS, *SPEEDS, *ENDINGS]
    words += [word for camera in CAMERAS for word in split_words(camera)]
    return list(dict.fromkeys(words))


def place_weights(frames: Tensor, ground: Tensor, near_weight: float) -> Tensor:
    """Return the weight of every place of clips `frames` `[N, T, h, w]`, float `[N, T * h * w]`.

    The first frame, and places at most one token away from an object in the frame before, weigh `near_weight`, others
    1. `ground`: the codes of backgrounds; others are of objects.
    """
    objects = (~torch.isin(frames[:, :-1], ground)).float()
    near = F.max_pool2d(objects, 3, stride=1, padding=1) > 0  # [N, T - 1, h, w]
    near = torch.cat([torch.ones_like(frames[:, :1], dtype=torch.bool), near], 1)
    return torch.where(near, near_weight, 1.0).flatten(1)


class ClipDraws:
    """The clips of a step, the same for the same seed and step."""

    def __init__(self, parts: MotionTokens, encoder: CaptionEncoder, settings: MotionTraining) -> None:
        self.parts, self.encoder, self.settings = parts, encoder, settings
        self.ground = torch.from_numpy(parts.ground.reshape(-1).astype(np.int64)).unique()

    def frames(self, count: int, seed: int, num_frames: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return word ids `[N, T]` and tokens `[N, frames, h, w]` of clips."""
        clips = sample_clips(count, seed, held_out=held_out)
        words = self.encoder.word_ids([caption(clip) for clip in clips]).cpu()
        frames = np.stack([self.parts.encode(clip, num_frames) for clip in clips])
        return words, torch.from_numpy(frames).long()

    def __call__(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return words, tokens `[N, L]`, dropped captions, hidden inputs and weights of a step."""
        settings = self.settings
        short = step < settings.short_share * settings.steps
        count = settings.batch_size * (NUM_FRAMES // settings.short_frames if short else 1)
        seed = 10_000_019 * (settings.seed + 1) + step
        words, frames = self.frames(count, seed, settings.short_frames if short else NUM_FRAMES)
        weights = place_weights(frames, self.ground, settings.near_weight)
        tokens = frames.flatten(1)
        rng = np.random.default_rng((settings.seed, step))
        dropped = torch.from_numpy(rng.random(count) < settings.caption_dropout)
        share = settings.hidden_clips * short
        _, hidden = hidden_inputs(rng, share, settings.wholly_hidden, (count, tokens.shape[1] - 1))
        return words, tokens, dropped, hidden, weights


def train_motion(
    model: LlamaGenTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: MotionTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train both networks in place, on their device; save them in `out/transformer` and `out/text_encoder`; return the
    record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.
    """
    torch.manual_seed(settings.seed)
    device, raster = model.device, model.trained_order == RASTER_ORDER
    draws = ClipDraws(encode_parts(vq_model), encoder, settings)
    modules = torch.nn.ModuleDict({"transformer": model, "text_encoder": encoder}).train()
    encoder.requires_grad_(raster)
    passes = (
        {}
        if raster
        else {
            frames: Pass(model, replace(model.grid, frames=frames))
            for frames in (settings.short_frames, NUM_FRAMES)
        }
    )
    optimisers = muon_and_adamw(
        model.layers,
        [parameter for parameter in modules.parameters() if parameter.requires_grad],
        settings.learning_rate,
        settings.weight_decay,
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate)

    def loss_of(words: Tensor, tokens: Tensor, dropped: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            condition: TextCondition = encoder(words)
            if raster:
                logits = model.teacher_forced(tokens, condition, dropped, hidden)
            else:
                forced = passes[tokens.shape[1] // SIDE**2]
                logits = forced(model, tokens, condition, dropped)[0]
                tokens, weights = tokens[:, forced.targets], weights[:, forced.targets]
        losses = F.cross_entropy(logits.mT, tokens, reduction="none")
        return (losses * weights).sum() / weights.sum()

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model], parts={"modules": modules})
    # Two shapes, short clips and whole ones, each compiled for itself.
    return run.run(
        loss_of,
        draws,
        lambda: {"held_out_loss": round(_held_out_loss(model, encoder, draws), 4)},
        lambda: store(model, encoder, out),
        dynamic=False,
    )


def store(model: Any, encoder: CaptionEncoder, out: Path) -> None:
    """Write `out/transformer`, and `out/text_encoder` if it learned, with matrices in 8 bits."""
    round_matrices(model, out / "transformer")
    if getattr(model, "trained_order", RASTER_ORDER) == RASTER_ORDER:  # masked frames have no order
        round_matrices(encoder, out / "text_encoder")


@torch.no_grad()
def _held_out_loss(model: LlamaGenTransformer, encoder: CaptionEncoder, draws: ClipDraws) -> float:
    """Return the cross entropy in nats a token on 80 held-out clips, every place counted once."""
    words, frames = draws.frames(80, 777, NUM_FRAMES, held_out=True)
    forced = None if model.trained_order == RASTER_ORDER else Pass(model)
    losses = []
    for word_ids, tokens in zip(words.split(8), frames.flatten(1).split(8), strict=True):
        tokens, condition = tokens.to(model.device), encoder(word_ids.to(model.device))
        if forced is None:
            logits = model.teacher_forced(tokens, condition)
        else:
            logits, tokens = forced(model, tokens, condition)[0], tokens[:, forced.targets]
        losses.append(F.cross_entropy(logits.mT, tokens).item())
    return float(np.mean(losses))


@torch.no_grad()
def judge(
    model: Any,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    count: int,
    *,
    guidance_scale: float,
    temperature: float = 1.0,
    sampler: Any = None,
    batch_size: int = 20,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the shares of attributes that clips drawn for held-out prompts have, by the parser.

    `sampler` draws with `model`; None: the plain sampler of its order.
    """
    if sampler is None:
        sampler = AutoregressiveSampler() if model.trained_order == RASTER_ORDER else OrderedSampler()
    prompts = held_out_prompts(count, seed)
    results: list[dict[str, bool]] = []
    for start in range(0, count, batch_size):
        part = prompts[start : start + batch_size]
        drawn = sampler(
            model,
            encoder(part),
            law=TokenLaw(guidance_scale=guidance_scale, temperature=temperature),
            generator=[torch.Generator().manual_seed(1000 + start + i) for i in range(len(part))],
            batch_size=len(part),
        )
        for prompt, tokens in zip(part, drawn.tokens, strict=True):
            results.append(score(prompt, decode(vq_model, tokens.view(-1, SIDE, SIDE))))
    names = dict.fromkeys(name for hits in results for name in hits)
    rates = {
        name: round(float(np.mean([hits[name] for hits in results if name in hits])), 4) for name in names
    }
    mean = float(np.mean([np.mean(list(hits.values())) for hits in results]))
    return {
        "clips": count,
        "guidance_scale": guidance_scale,
        "mean_attribute": round(mean, 4),
        "all_correct": round(float(np.mean([all(hits.values()) for hits in results])), 4),
        "attributes": rates,
    }


@torch.no_grad()
def decode(vq_model: VQModel, frames: Tensor) -> np.ndarray:
    """Return frames uint8 `[T, H, W, 3]` of tokens `[T, h, w]`."""
    pixels = vq_model.decode_latents(vq_model.quantize.lookup(frames.to(vq_model.device))).clamp(-1, 1)
    return ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


@torch.no_grad()
def start_from_shapes(model: LlamaGenTransformer, encoder: CaptionEncoder, folder: Path) -> None:
    """Copy what a trained `shapes` model knows: its first layers, embeddings, head, and the words of both vocabularies.

    Args:
        folder: holds `transformer/` and `text_encoder/`.

    Raises:
        ValueError: the networks differ in width or vocabulary of tokens.
    """
    known = LlamaGenTransformer.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    for name in ("dim", "num_heads", "vocab_size", "caption_dim"):
        if known.config[name] != model.config[name]:
            raise ValueError(
                f"{folder} has {name}={known.config[name]}, this model {model.config[name]}; pass the same size."
            )
    weights = known.state_dict()
    for name, value in model.state_dict().items():
        if name in weights and weights[name].shape == value.shape:
            value.copy_(weights[name])
    # Layers that the other model lacks start without effect.
    added: list[Any] = list(model.layers)[len(known.layers) :]
    for layer in added:
        layer.attention.wo.weight.zero_()
        layer.feed_forward.w2.weight.zero_()
    words = CaptionEncoder.from_pretrained(folder / "text_encoder", torch_dtype=torch.float32)
    length = min(words.max_words, encoder.max_words)
    encoder.position_embedding.weight[:length] = words.position_embedding.weight[:length]
    assert isinstance(known.cls_embedding, CaptionEmbedding) and isinstance(
        model.cls_embedding, CaptionEmbedding
    )
    # Both are padded on the left.
    model.cls_embedding.uncond_embedding[-length:] = known.cls_embedding.uncond_embedding[-length:]
    ids = {
        word: index + 2 for index, word in enumerate(words.config["vocabulary"])
    }  # after padding and unknown
    for index, word in enumerate(encoder.config["vocabulary"]):
        if word in ids:
            encoder.word_embedding.weight[index + 2] = words.word_embedding.weight[ids[word]]
    encoder.norm.load_state_dict(words.norm.state_dict())


@torch.no_grad()
def start_from_motion(folder: Path, num_layers: int) -> tuple[LlamaGenTransformer, CaptionEncoder]:
    """Return a near-to-far model with the weights of a trained `motion`, and its caption encoder.

    Its blocks are the first ones of `motion`, of which the last two lead to the lower and the later head. All heads
    start as the one of `motion`.

    Args:
        folder: holds `transformer/` and `text_encoder/`.
        num_layers: blocks in front of the right head.

    Raises:
        ValueError: `motion` has fewer blocks than this model.
    """
    raster = LlamaGenTransformer.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    encoder = CaptionEncoder.from_pretrained(folder / "text_encoder", torch_dtype=torch.float32)
    if not 1 <= num_layers <= raster.config["num_layers"] - 2:
        raise ValueError(
            f"num_layers={num_layers} of a model that starts from {raster.config['num_layers']} blocks; pass 1 to "
            f"{raster.config['num_layers'] - 2}, as two more lead to the other heads."
        )
    config = {key: value for key, value in raster.config.items() if not key.startswith("_")}
    model = LlamaGenTransformer(**config | {"order": "nar", "num_layers": num_layers})
    known = raster.state_dict()
    for head in ("medusa_", "later_"):
        known |= {f"{head}{part}": known[part] for part in ("norm.weight", "output.weight")}
    model.load_state_dict({key: known[key] for key in model.state_dict()})
    return model, encoder


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded video model and its caption encoder.

`python scripts/train motion --tokenizer FOLDER --start-from FOLDER --out FOLDER`

Afterwards `--out` holds `transformer/` and `text_encoder/`, with matrices in 8 bits, and `training.json` with the loss
curve and what the parser reads in clips drawn with them. An interrupted run resumes.

With `--near-to-far` the model draws all tokens at one distance from the corner in a call. Then `--start-from` names a
trained motion, whose text_encoder it shares, and `--num-layers` the blocks in front of its right head.
"""


def new_encoder() -> CaptionEncoder:
    """Return a fresh encoder of captions of clips."""
    return CaptionEncoder(motion_vocabulary(), dim=128, num_layers=0, num_heads=4, max_words=22)


def new_model(
    vq_model: VQModel, dim: int, num_layers: int, num_heads: int
) -> tuple[LlamaGenTransformer, CaptionEncoder]:
    """Return fresh networks for the codes of a tokenizer."""
    encoder = new_encoder()
    model = LlamaGenTransformer(
        vocab_size=vq_model.config["codebook_size"],
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        grid_size=SIDE,
        num_frames=NUM_FRAMES,
        prefix_length=encoder.max_words,
        num_classes=None,
        caption_dim=encoder.config["dim"],
        zero_prefix_keys=False,
    )
    initialise(model)
    return model, encoder


@dataclass(kw_only=True)
class ClipOptions(RunOptions):
    """Options that the trainers of models of frames share."""

    tokenizer: Path = option("folder that python scripts/train tokenizer wrote")
    dim: int = 192
    num_heads: int = 4
    judged_clips: int = option("drawn for the accuracy; 0: none", 60)
    guidance_scale: float = option("of these clips", 1.5)


@dataclass(kw_only=True)
class Options(ClipOptions):
    start_from: Path | None = option(
        "folder with transformer/ and text_encoder/ of shapes to start from", None
    )
    near_to_far: bool = option("train motion_nar; --start-from is then of motion", False)
    num_layers: int = 6


def main() -> None:
    options, settings = read_options(HELP, Options, MotionTraining)
    torch.manual_seed(settings.seed)
    vq_model = VQModel.from_pretrained(options.tokenizer, torch_dtype=torch.float32).eval()
    if options.near_to_far:
        if options.start_from is None:
            raise ValueError("--near-to-far without --start-from; name the folder of a trained motion.")
        model, encoder = start_from_motion(options.start_from, options.num_layers)
    else:
        model, encoder = new_model(vq_model, options.dim, options.num_layers, options.num_heads)
        if options.start_from is not None:
            start_from_shapes(model, encoder, options.start_from)
    for part in (model, encoder, vq_model):
        part.to(options.device)
    record = train_motion(model, encoder, vq_model, settings, options.out)
    if options.judged_clips:
        scale = options.guidance_scale
        record["drawn"] = judge(model, encoder, vq_model, options.judged_clips, guidance_scale=scale)
        write_json(options.out / "training.json", record)
    print_record(record)
