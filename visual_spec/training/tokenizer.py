"""Train the embedded VQ tokenizer on `shapes`.

LlamaGen's quantiser (unit-sphere codes of 8 numbers, straight-through gradients, commitment loss) with two changes
that suit a short run without a discriminator. The codebook follows its latents by exponential averages (van den Oord
et al. 2017, appendix A.1), starting from k-means on a briefly trained autoencoder. Unused codes are moved onto badly
coded latents.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from visual_spec.data.shapes import CELL, Scene, sample_dataset
from visual_spec.models.core.kmeans import k_means
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.training.codebook import CodeAverages
from visual_spec.training.loop import Checkpoint, Descent, write_json


@dataclass(frozen=True)
class TokenizerTraining:
    """Settings of a run.

    `crop` is in pixels: small crops give more steps per second, and a local network hardly notices. The last
    `whole_pictures` of the steps use whole pictures, with as many pixels a step.
    """

    steps: int = 9000
    batch_size: int = 16
    crop: int = 64
    whole_pictures: float = 0.2
    continuous_steps: int = 500
    learning_rate: float = 2e-3
    commitment: float = 0.25
    average_decay: float = 0.99
    scenes: int = 6000
    seed: int = 0


def to_signed(pictures: np.ndarray | Tensor) -> Tensor:
    """Return uint8 pictures `[B, H, W, 3]` as floats `[B, 3, H, W]` in [-1, 1]."""
    return rearrange(torch.as_tensor(pictures), "b h w c -> b c h w").float() / 127.5 - 1.0


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the absolute error at three scales, squared error, and absolute error of first differences, each a mean.

    The coarse scales carry the colours of whole tokens, the differences keep edges sharp.
    """
    error = output - target
    loss = error.abs().mean() + error.square().mean()
    for size in (4, 8):
        loss = loss + F.avg_pool2d(error, size).abs().mean()
    for dim in (-1, -2):
        loss = loss + 0.5 * error.diff(dim=dim).abs().mean()
    return loss


def train_tokenizer(model: VQModel, settings: TokenizerTraining, out: Path, *, every: int = 250) -> dict:
    """Train in place, save the weights in `out`, and return the record, which is also written to `out/training.json`.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.
    """
    torch.manual_seed(settings.seed)
    scenes, pictures = sample_dataset(settings.scenes, settings.seed)
    codebook = model.quantize.embedding.weight.requires_grad_(False)
    averages = CodeAverages(codebook)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=1e-4)
    descend = Descent([optimiser], settings.steps, settings.learning_rate)
    checkpoint = Checkpoint(
        out / "resume.pt", every, asdict(settings), model=model, descend=descend, averages=averages
    )
    model.train().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    for step in range(checkpoint.resume(), settings.steps):
        # One generator per step, so that a resumed run sees the same data.
        rng = np.random.default_rng((settings.seed, step))
        chosen = rng.integers(len(pictures), size=settings.batch_size)
        if step < (1 - settings.whole_pictures) * settings.steps:
            batch = np.stack([_crop(pictures[i], scenes[i], settings.crop, rng) for i in chosen])
        else:
            batch = pictures[
                chosen[: max(1, settings.batch_size * settings.crop**2 // pictures[0, ..., 0].size)]
            ]
        target = to_signed(batch).contiguous(memory_format=torch.channels_last)

        unit = F.normalize(model.encode_latents(target), dim=1)  # [B, D, h, w]
        flat = rearrange(unit.detach(), "b d h w -> (b h w) d")
        if step < settings.continuous_steps:
            codes, commitment = unit, torch.zeros(())
        else:
            if step == settings.continuous_steps:
                _initialise_codebook(model, pictures, averages, settings)
            ids = model.quantize.nearest(unit)
            quantised = model.quantize.lookup(ids)
            commitment = (unit - quantised).square().sum(1).mean()
            codes = unit + (quantised - unit).detach()
        loss = reconstruction_loss(model.decode_latents(codes), target)
        descend(loss + settings.commitment * commitment, step)
        if step >= settings.continuous_steps:
            revive = step < 0.7 * settings.steps and step % 20 == 0
            _follow_latents(codebook, flat, ids.flatten(), averages, settings.average_decay, revive)  # pyright: ignore
        checkpoint.after(step, settings.steps, loss, curve_every=50, digits=5)
    codebook.copy_(F.normalize(codebook, dim=-1))
    model.eval().to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    record = {
        "settings": asdict(settings),
        "seconds": round(checkpoint.seconds),
        "loss": checkpoint.curve,
        **judge(model),
    }
    model.save_pretrained(out)
    write_json(out / "training.json", record)
    checkpoint.remove()
    return record


def _crop(picture: np.ndarray, scene: Scene, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a crop `[size, size, 3]` aligned to tokens; three in four hold an object, the rest may be anywhere."""
    last = len(picture) - size
    corner = rng.integers(last // CELL + 1, size=2) * CELL
    if rng.random() < 0.75:
        item = scene.objects[rng.integers(len(scene.objects))]
        centre = np.array([item.y, item.x]) + rng.integers(-2, 3, size=2) * CELL
        corner = np.clip(centre - size // 2, 0, last) // CELL * CELL
    top, left = corner
    return picture[top : top + size, left : left + size]


@torch.no_grad()
def _initialise_codebook(
    model: VQModel, pictures: np.ndarray, averages: CodeAverages, settings: TokenizerTraining
) -> None:
    """Run k-means on the unit sphere over latents of a few hundred pictures."""
    codebook = model.quantize.embedding.weight
    batches = [to_signed(pictures[i : i + 50]) for i in range(0, min(500, len(pictures)), 50)]
    latents = torch.cat(
        [rearrange(F.normalize(model.encode_latents(b), dim=1), "b d h w -> (b h w) d") for b in batches]
    )
    # Distinct starting points: latents of plain background outnumber all others, so distant ones are preferred.
    centre = F.normalize(latents.mean(0), dim=-1)
    weight = (1.0 - latents @ centre).clamp_min(1e-4)
    start = latents[torch.multinomial(weight, len(codebook))]
    codebook.copy_(k_means(latents, start, 8, unit=True)[0])
    averages.restart(codebook)


@torch.no_grad()
def _follow_latents(
    codebook: Tensor, latents: Tensor, ids: Tensor, averages: CodeAverages, decay: float, revive: bool
) -> None:
    """Move each code towards its latents; move idle codes onto the worst-coded latents of this batch."""
    count = torch.zeros(len(codebook)).index_add_(0, ids, torch.ones(len(ids)))
    total = torch.zeros_like(codebook).index_add_(0, ids, latents)
    averages.count.mul_(decay).add_(count, alpha=1 - decay)
    averages.total.mul_(decay).add_(total, alpha=1 - decay)
    codebook.copy_(F.normalize(averages.total, dim=-1))
    averages.idle.add_(1).mul_((count == 0).float())
    if not revive:
        return
    idle = (averages.idle > 150).nonzero()[:, 0]
    if len(idle):
        error = 1.0 - (latents * codebook[ids]).sum(-1)
        chosen = torch.multinomial(error.clamp_min(1e-8), min(len(idle), 64))
        idle = idle[: len(chosen)]
        codebook[idle] = latents[chosen]
        averages.total[idle] = latents[chosen]
        averages.count[idle] = 1.0
        averages.idle[idle] = 0.0


@torch.no_grad()
def judge(model: VQModel, count: int = 200) -> dict:
    """Return peak signal-to-noise ratio in dB and the number of used codes on held-out scenes."""
    _, pictures = sample_dataset(count, 12345, held_out=True)
    errors, used = [], set()
    for part in to_signed(pictures).split(20):
        tokens = model.encode_tokens(part)
        used.update(tokens.unique().tolist())
        errors.append((model.decode_tokens(tokens) - part).square().mean((1, 2, 3)))
    psnr = (10 * torch.log10(4.0 / torch.cat(errors))).mean().item()
    return {"psnr_db": round(psnr, 2), "codes_used": len(used), "held_out_pictures": count}


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded VQ tokenizer on procedural shapes.

`python -m visual_spec.training.tokenizer --out FOLDER`
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=HELP)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=TokenizerTraining.steps)
    parser.add_argument("--batch-size", type=int, default=TokenizerTraining.batch_size)
    parser.add_argument("--codebook-size", type=int, default=1024)
    parser.add_argument("--base-channels", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = VQModel(
        base_channels=arguments.base_channels,
        channel_multipliers=(1, 2, 4, 8),
        blocks_per_level=1,
        latent_channels=64,
        codebook_size=arguments.codebook_size,
        codebook_dim=8,
        norm_groups=None,
        image_size=128,
    )
    settings = TokenizerTraining(steps=arguments.steps, batch_size=arguments.batch_size, seed=arguments.seed)
    record = train_tokenizer(model, settings, arguments.out)
    print(f"PSNR {record['psnr_db']} dB, {record['codes_used']} codes in use, {record['seconds']} s")


if __name__ == "__main__":
    main()
