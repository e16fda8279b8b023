"""Train `motion_planned`: key frames first, from the frame-by-frame model `motion_masked`.

The order of MMPL (arXiv 2508.03334), with the weights of `motion_masked` plus changes of low rank: the first frame, the
key frames together, the others together. All frames of a group hide the same share of their tokens, as while a group is
drawn. In a tube, all frames of a clip hide the same places. Clips, weights of places and words are as in
`scripts.train.frames`; tokenizer and caption encoder do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train.frames import hidden_places
from scripts.train.motion import ClipDraws, MotionTraining, judge, place_weights
from scripts.train.motion_tokens import SIDE, encode_parts
from scripts.train.shuffle import add_changes, merge_changes, save_changes
from visual_spec.data.motion import NUM_FRAMES
from visual_spec.files.documents import write_json
from visual_spec.models.masked.frames import FrameMaskedTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.masked.frames import FrameMaskedSampler
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    option,
    print_record,
    read_options,
)


@dataclass(frozen=True)
class PlannedTraining:
    """Settings of a run; most are as in `FrameTraining`."""

    steps: int = 700
    batch_size: int = 6
    learning_rate: float = 3e-3
    rank: int = 16
    caption_dropout: float = 0.1
    least_hidden: float = 0.1
    tubes: float = 0.3
    near_weight: float = 4.0
    weighted_until: float = 0.5
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


def start_from_frames(folder: Path, key_frames: list[int], rank: int) -> FrameMaskedTransformer:
    """Return a model with the weights of a trained one, of which changes of low rank, norms and places train."""
    known: Any = FrameMaskedTransformer.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    config: dict[str, Any] = {key: value for key, value in known.config.items() if not key.startswith("_")}
    model = FrameMaskedTransformer(**dict(config, key_frames=key_frames))
    model.load_state_dict(known.state_dict())
    own = model.transformer
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(name.startswith("place_embeddings") or parameter.ndim == 1)
    add_changes(own.layers, rank)
    return model


def drawn_masks(settings: PlannedTraining, groups: list[list[int]], clips: int, step: int) -> Tensor:
    """Return the hidden places of the clips of a step, bool [N, T, P], the same for the same seed and step."""
    dice = torch.Generator().manual_seed((settings.seed << 32) + step)
    group = torch.tensor([next(i for i, own in enumerate(groups) if t in own) for t in range(NUM_FRAMES)])
    shares = torch.cos(torch.pi / 2 * torch.rand(clips, len(groups), generator=dice))[:, group]
    noise = torch.rand(clips, NUM_FRAMES, SIDE * SIDE, generator=dice)
    tube = torch.rand(clips, generator=dice) < settings.tubes
    return hidden_places(
        shares.clamp(settings.least_hidden), torch.where(tube[:, None, None], noise[:, :1], noise)
    )


def train_planned(
    model: FrameMaskedTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: PlannedTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train in place; save the changes in `out`, and return the record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.
    """
    encoder.eval().requires_grad_(False)
    clips = ClipDraws(encode_parts(vq_model), encoder, MotionTraining())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    descend = Descent([optimiser], settings.steps, settings.learning_rate, warmup=30)

    def loss_of(words: Tensor, tokens: Tensor, dropped: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits = model.predictions(tokens.masked_fill(hidden, model.mask_id), encoder(words), dropped)
        losses = F.cross_entropy(logits.float().mT, tokens, reduction="none")
        return (losses * weights * hidden).sum() / (weights * hidden).sum()

    def batch(step: int) -> tuple[Tensor, ...]:
        count = settings.batch_size
        words, frames = clips.frames(count, 10_000_019 * (settings.seed + 1) + step, NUM_FRAMES)
        near = settings.near_weight if step < settings.weighted_until * settings.steps else 1.0
        hidden = drawn_masks(settings, model.frame_groups, count, step).flatten(1)
        dropped = np.random.default_rng((settings.seed, step)).random(count) < settings.caption_dropout
        weights = place_weights(frames, clips.ground, near)
        return words, frames.flatten(1), torch.from_numpy(dropped), hidden, weights

    def judged() -> dict[str, float]:
        save_changes(model, out, "motion_masked/transformer")
        return held_out_loss(model, encoder, clips)

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model, encoder])
    record = run.run(loss_of, batch, judged)
    merge_changes(model)
    return record


@torch.no_grad()
def held_out_loss(
    model: FrameMaskedTransformer, encoder: CaptionEncoder, clips: ClipDraws, count: int = 48
) -> dict[str, float]:
    """Return the cross entropy of hidden tokens of held-out clips, in nats, by the group of their frame."""
    words, frames = clips.frames(count, 777, NUM_FRAMES, held_out=True)
    hidden = drawn_masks(PlannedTraining(), model.frame_groups, count, 777)
    losses = []
    for ids, tokens, part in zip(words.split(8), frames.flatten(1).split(8), hidden.split(8), strict=True):
        logits = model.predictions(tokens.masked_fill(part.flatten(1), model.mask_id), encoder(ids))
        losses.append(F.cross_entropy(logits.float().mT, tokens, reduction="none"))
    by_frame = torch.cat(losses).view(hidden.shape)
    names = ("first", "key", "between")
    return {
        f"held_out_loss_{name}": round(float(by_frame[:, group][hidden[:, group]].mean()), 4)
        for name, group in zip(names, model.frame_groups, strict=True)
    }


HELP = """Train the embedded model of MMPL's order: `python scripts/train planned --models FOLDER --out FOLDER`.

Afterwards `--out` holds what differs from the transformer of `motion_masked`, matrices in 8 bits, and `training.json`.
To be loaded its parent has to lie beside the folder `motion_masked`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    models: Path = option("folder with the folders motion_masked and shapes")
    key_frames: list[int] = option("drawn together after the first frame", None)
    judged_clips: int = option("drawn for the accuracy; 0: none", 48)


def main() -> None:
    options, settings = read_options(HELP, Options, PlannedTraining)
    torch.manual_seed(settings.seed)
    known = options.models / "motion_masked"
    encoder = CaptionEncoder.from_pretrained(known / "text_encoder", torch_dtype=torch.float32)
    vq_model = VQModel.from_pretrained(options.models / "shapes" / "vq_model", torch_dtype=torch.float32)
    keys = options.key_frames or [1, NUM_FRAMES // 2, NUM_FRAMES - 1]
    model = start_from_frames(known, keys, settings.rank)
    record = train_planned(model, encoder, vq_model.eval(), settings, options.out)
    if options.judged_clips:
        sampler = FrameMaskedSampler(4, 0.3)
        record["drawn"] = judge(
            model, encoder, vq_model, options.judged_clips, guidance_scale=1.0, sampler=sampler
        )
        write_json(options.out / "training.json", record)
    print_record(record)
