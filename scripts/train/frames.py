"""Train the frame-by-frame masked model of `motion`: a `FrameMaskedTransformer`, and its caption encoder.

The loss is the cross entropy of hidden tokens; each frame reads those before as they are given, some of their tokens
hidden, too (autoregressive discrete diffusion forcing: Yuan et al., "Lumos-1", arXiv 2507.08801, section 3.3). Hidden
shares are the cosine of a uniform number, at least `least_hidden` (0.7 in the released scripts). In a tube, all frames
of a clip hide the same places, so that a hidden token cannot be copied from the frame before. The other clips hide
other places, and another share, in every frame: beside still backgrounds, tubes alone rarely show where a shape was.

Clips are put together from encoded parts as by `scripts.train.motion`, and the weights of its model are a good
start. The first part of a run learns from the first frames of more clips. Up to `weighted_until`, places near objects
weigh more; weights change the law that is learned, so later all hidden places weigh the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train.ar import initialise
from scripts.train.motion import (
    ClipDraws,
    ClipOptions,
    MotionTraining,
    judge,
    new_encoder,
    place_weights,
    store,
)
from scripts.train.motion_tokens import SIDE, encode_parts
from visual_spec.data.motion import NUM_FRAMES
from visual_spec.files.documents import write_json
from visual_spec.models.masked.frames import FrameMaskedTransformer
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.masked.frames import FrameMaskedSampler
from visual_spec.training.loop import (
    Descent,
    Trainer,
    muon_and_adamw,
    option,
    print_record,
    read_options,
)


@dataclass(frozen=True)
class FrameTraining:
    """Settings of a run.

    Attributes:
        batch_size: whole clips of a step.
        short_share: share of the steps that learn from the first `short_frames` frames, of as many frames in all.
        least_hidden: least hidden share of a frame.
        tubes: share of the clips that hide the same places in all frames.
        near_weight: weight of places near an object, during the share `weighted_until` of the steps.
        bfloat16: compute the matrix products in it: faster on a GPU, and on CPUs that can.
    """

    steps: int = 4000
    batch_size: int = 6
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.02
    caption_dropout: float = 0.1
    short_share: float = 0.6
    short_frames: int = 6
    least_hidden: float = 0.3
    tubes: float = 0.5
    near_weight: float = 4.0
    weighted_until: float = 0.7
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


def hidden_places(shares: Tensor, noise: Tensor) -> Tensor:
    """Return which places are hidden, bool [N, T, P]: in each frame the ones of least noise, at least one.

    Args:
        shares: [N, T], the hidden share of each frame.
        noise: [N, T, P]. Frames of equal noise and share hide the same places.
    """
    places = noise.shape[-1]
    counts = (shares * places).round().clamp(1, places)
    return noise.argsort(-1).argsort(-1) < counts[..., None]


def drawn_masks(settings: FrameTraining, clips: int, frames: int, places: int, step: int) -> Tensor:
    """Return the hidden places of the clips of a step, bool [N, T, P], the same for the same seed and step."""
    dice = torch.Generator().manual_seed((settings.seed << 32) + step)
    shares = torch.cos(torch.pi / 2 * torch.rand(clips, frames, generator=dice)).clamp(settings.least_hidden)
    noise = torch.rand(clips, frames, places, generator=dice)
    tube = torch.rand(clips, generator=dice) < settings.tubes
    shares = torch.where(tube[:, None], shares[:, :1], shares)
    noise = torch.where(tube[:, None, None], noise[:, :1], noise)
    return hidden_places(shares, noise)


class _Draws:
    """The clips of a step, the same for the same seed and step."""

    def __init__(self, clips: ClipDraws, settings: FrameTraining) -> None:
        self.clips, self.settings = clips, settings

    def __call__(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return words, tokens `[N, L]`, dropped captions, hidden places and weights `[N, L]` of a step."""
        settings = self.settings
        short = step < settings.short_share * settings.steps
        length = settings.short_frames if short else NUM_FRAMES
        count = settings.batch_size * NUM_FRAMES // length
        seed = 10_000_019 * (settings.seed + 1) + step
        words, frames = self.clips.frames(count, seed, length)
        weights = torch.ones(frames.flatten(1).shape)
        if step < settings.weighted_until * settings.steps:
            weights = place_weights(frames, self.clips.ground, settings.near_weight)
        hidden = drawn_masks(settings, count, length, SIDE * SIDE, step).flatten(1)
        rng = np.random.default_rng((settings.seed, step))
        dropped = torch.from_numpy(rng.random(count) < settings.caption_dropout)
        return words, frames.flatten(1), dropped, hidden, weights


def train_frames(
    model: FrameMaskedTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: FrameTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train both networks in place, on their device; save them in `out/transformer` and `out/text_encoder`; return the
    record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.
    """
    torch.manual_seed(settings.seed)
    device = model.device
    clips = ClipDraws(encode_parts(vq_model), encoder, MotionTraining())
    draws = _Draws(clips, settings)
    modules = torch.nn.ModuleDict({"transformer": model, "text_encoder": encoder}).train()
    layers = model.transformer.layers
    optimisers = muon_and_adamw(layers, modules.parameters(), settings.learning_rate, settings.weight_decay)
    descend = Descent(optimisers, settings.steps, settings.learning_rate)

    def loss_of(words: Tensor, tokens: Tensor, dropped: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
        seen = tokens.masked_fill(hidden, model.mask_id)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits = model.predictions(seen, encoder(words), dropped)
        losses = F.cross_entropy(logits.float().mT, tokens, reduction="none")
        return (losses * weights * hidden).sum() / (weights * hidden).sum()

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model], parts={"modules": modules})
    # Two shapes, short clips and whole ones, each compiled for itself.
    return run.run(
        loss_of,
        draws,
        lambda: {"held_out_loss": held_out_loss(model, encoder, clips)},
        lambda: store(model, encoder, out),
        dynamic=False,
    )


@torch.no_grad()
def held_out_loss(
    model: FrameMaskedTransformer, encoder: CaptionEncoder, clips: ClipDraws, count: int = 80
) -> float:
    """Return the cross entropy of hidden tokens of held-out clips, in nats; half of the clips have tubes."""
    words, frames = clips.frames(count, 777, NUM_FRAMES, held_out=True)
    hidden = drawn_masks(FrameTraining(), count, NUM_FRAMES, SIDE * SIDE, 777).flatten(1)
    total = 0.0
    for ids, tokens, part in zip(words.split(8), frames.flatten(1).split(8), hidden.split(8), strict=True):
        seen = tokens.masked_fill(part, model.mask_id).to(model.device)
        logits = model.predictions(seen, encoder(ids.to(model.device))).float().cpu()
        total += F.cross_entropy(logits[part], tokens[part], reduction="sum").item()
    return round(total / int(hidden.sum()), 4)


@torch.no_grad()
def start_from_motion(model: FrameMaskedTransformer, encoder: CaptionEncoder, folder: Path) -> None:
    """Copy what a trained `motion` model knows: embeddings, head, words, and some of its layers.

    Layers are taken at even distances, the first and the last among them, and of each the hidden neurons whose weights
    have the largest norms.

    Args:
        folder: holds `transformer/` and `text_encoder/`.

    Raises:
        ValueError: the networks differ in width or vocabulary, or the other one has fewer layers.
    """
    known = LlamaGenTransformer.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    own = model.transformer
    for name in ("dim", "num_heads", "vocab_size", "caption_dim", "num_frames", "grid_size"):
        if known.config[name] != own.config[name]:
            raise ValueError(
                f"{folder} has {name}={known.config[name]}, this model {own.config[name]}; pass the same size."
            )
    count = len(own.layers)
    if count > len(known.layers):
        raise ValueError(
            f"{folder} has {len(known.layers)} layers, this model {count}; pass at most as many."
        )
    weights, mine = known.state_dict(), own.state_dict()
    chosen = np.linspace(0, len(known.layers) - 1, count).round().astype(int)
    for name, value in mine.items():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(chosen[int(parts[1])])
        source = weights[".".join(parts)]
        if name == "tok_embeddings.weight":
            value[:-1] = source
            value[-1] = 0.0  # motion's training hid tokens so
        elif "feed_forward" not in name:
            value.copy_(source)
    for layer, index in enumerate(chosen):
        block: Any = own.layers[layer]
        other: Any = known.layers[int(index)]
        other = other.feed_forward
        norms = other.w1.weight.norm(dim=1) * other.w3.weight.norm(dim=1) * other.w2.weight.norm(dim=0)
        kept = norms.topk(block.feed_forward.w1.weight.shape[0]).indices.sort().values
        block.feed_forward.w1.weight.copy_(other.w1.weight[kept])
        block.feed_forward.w3.weight.copy_(other.w3.weight[kept])
        block.feed_forward.w2.weight.copy_(other.w2.weight[:, kept])
    words = CaptionEncoder.from_pretrained(folder / "text_encoder", torch_dtype=torch.float32)
    encoder.load_state_dict(words.state_dict())


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the frame-by-frame masked model of `motion` and its caption encoder.

`python scripts/train frames --tokenizer FOLDER --start-from FOLDER --out FOLDER`

Afterwards `--out` holds `transformer/` and `text_encoder/`, with matrices in 8 bits, and `training.json` with the loss
curve and what the parser reads in clips drawn with them. An interrupted run resumes.
"""


def new_model(
    vq_model: VQModel, dim: int, num_layers: int, num_heads: int, feed_forward_dim: int | None
) -> tuple[FrameMaskedTransformer, CaptionEncoder]:
    """Return fresh networks for the codes of a tokenizer."""
    encoder = new_encoder()
    model = FrameMaskedTransformer(
        vocab_size=vq_model.config["codebook_size"],
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        grid_size=SIDE,
        num_frames=NUM_FRAMES,
        prefix_length=encoder.max_words,
        caption_dim=encoder.config["dim"],
        feed_forward_dim=feed_forward_dim,
    )
    initialise(model.transformer)
    return model, encoder


@dataclass(kw_only=True)
class Options(ClipOptions):
    start_from: Path | None = option(
        "folder with transformer/ and text_encoder/ of motion to start from", None
    )
    num_layers: int = 3
    feed_forward_dim: int = 224
    judged_clips: int = option("drawn for the accuracy; 0: none", 48)
    guidance_scale: float = option("of these clips", 1.0)
    frame_steps: int = option("calls that draw a frame of these clips", 4)
    history_hidden: float = option("of these clips", FrameTraining.least_hidden)


def main() -> None:
    options, settings = read_options(HELP, Options, FrameTraining)
    torch.manual_seed(settings.seed)
    vq_model = VQModel.from_pretrained(options.tokenizer, torch_dtype=torch.float32).eval()
    sizes = options.dim, options.num_layers, options.num_heads, options.feed_forward_dim
    model, encoder = new_model(vq_model, *sizes)
    if options.start_from is not None:
        start_from_motion(model, encoder, options.start_from)
    for part in (model, encoder, vq_model):
        part.to(options.device)
    record = train_frames(model, encoder, vq_model, settings, options.out)
    if options.judged_clips:
        sampler, scale = (
            FrameMaskedSampler(options.frame_steps, options.history_hidden),
            options.guidance_scale,
        )
        record["drawn"] = judge(
            model, encoder, vq_model, options.judged_clips, guidance_scale=scale, sampler=sampler
        )
        write_json(options.out / "training.json", record)
    print_record(record)
