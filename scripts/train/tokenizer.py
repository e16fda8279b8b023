"""Train the embedded VQ tokenizer on `shapes` or `things`.

LlamaGen's quantiser (unit-sphere codes of 8 numbers, straight-through gradients, commitment loss) with two changes
that suit a short run without a discriminator. The codebook follows its latents by exponential averages (van den Oord
et al. 2017, appendix A.1), starting from k-means on a briefly trained autoencoder. Unused codes are moved onto badly
coded latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from scripts.train.codebook import CodeAverages
from visual_spec.data.captions import PICTURES
from visual_spec.data.shapes import CELL
from visual_spec.models.core.kmeans import k_means
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.training.loop import Descent, OutOptions, Trainer, option, read_options
from visual_spec.training.tokens import to_signed


@dataclass(frozen=True)
class TokenizerTraining:
    """Settings of a run.

    `data` is one of `PICTURES`. `crop` is in pixels: small crops give more steps per second, and a local network hardly
    notices. The last `whole_pictures` of the steps use whole pictures, with as many pixels a step.
    """

    data: str = "shapes"
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


def to_pixels(pictures: Tensor) -> np.ndarray:
    """Return pictures `[B, 3, H, W]` in [-1, 1] as uint8 `[B, H, W, 3]`: the inverse of `to_signed`."""
    pixels = ((pictures.float() + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return rearrange(pixels, "b c h w -> b h w c").cpu().numpy()


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
    scenes, pictures = PICTURES[settings.data].sample_dataset(settings.scenes, settings.seed)
    codebook = model.quantize.embedding.weight.requires_grad_(False)
    averages = CodeAverages(codebook)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=1e-4)
    descend = Descent([optimiser], settings.steps, settings.learning_rate)
    run = Trainer(
        model,
        settings,
        out,
        descend,
        every=every,
        parts={"model": model, "averages": averages},
        curve_every=50,
        digits=5,
    )
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def batch(step: int) -> tuple[int, Tensor]:
        # One generator per step, so that a resumed run sees the same data.
        rng = np.random.default_rng((settings.seed, step))
        chosen = rng.integers(len(pictures), size=settings.batch_size)
        if step < (1 - settings.whole_pictures) * settings.steps:
            some = np.stack([_crop(pictures[i], scenes[i], settings.crop, rng) for i in chosen])
        else:
            some = pictures[
                chosen[: max(1, settings.batch_size * settings.crop**2 // pictures[0, ..., 0].size)]
            ]
        return step, to_signed(some).contiguous(memory_format=torch.channels_last)

    def loss(step: int, target: Tensor) -> tuple[Any, ...]:
        unit = F.normalize(model.encode_latents(target), dim=1)  # [B, D, h, w]
        flat = rearrange(unit.detach(), "b d h w -> (b h w) d")
        if step < settings.continuous_steps:
            terms = reconstruction_loss(model.decode_latents(unit), target)
            return terms, terms, flat, None
        if step == settings.continuous_steps:
            _initialise_codebook(model, pictures, averages, settings)
        ids = model.quantize.nearest(unit)
        quantised = model.quantize.lookup(ids)
        commitment = (unit - quantised).square().sum(1).mean()
        codes = unit + (quantised - unit).detach()
        terms = reconstruction_loss(model.decode_latents(codes), target)
        return terms + settings.commitment * commitment, terms, flat, ids.flatten()

    def follow(step: int, flat: Tensor, ids: Tensor | None) -> None:
        if ids is not None:
            revive = step < 0.7 * settings.steps and step % 20 == 0
            _follow_latents(codebook, flat, ids, averages, settings.average_decay, revive)

    def judged() -> dict[str, Any]:
        codebook.copy_(F.normalize(codebook, dim=-1))
        model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
        return judge(model, settings.data)

    return run.run(loss, batch, judged, lambda: model.save_pretrained(out), after=follow)


def _crop(picture: np.ndarray, scene: Any, size: int, rng: np.random.Generator) -> np.ndarray:
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
def judge(model: VQModel, data: str = "shapes", count: int = 200) -> dict:
    """Return peak signal-to-noise ratio in dB and the number of used codes on held-out scenes."""
    _, pictures = PICTURES[data].sample_dataset(count, 12345, held_out=True)
    errors, used = [], set()
    for part in to_signed(pictures).split(20):
        tokens = model.encode_tokens(part)
        used.update(tokens.unique().tolist())
        errors.append((model.decode_tokens(tokens) - part).square().mean((1, 2, 3)))
    psnr = (10 * torch.log10(4.0 / torch.cat(errors))).mean().item()
    return {"psnr_db": round(psnr, 2), "codes_used": len(used), "held_out_pictures": count}


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded VQ tokenizer on procedural pictures.

`python scripts/train tokenizer --out FOLDER`
"""


@dataclass(kw_only=True)
class Options(OutOptions):
    codebook_size: int = 1024
    base_channels: int = 8
    start_from: Path | None = option("folder of a tokenizer of these sizes to start from", None)


def main() -> None:
    options, settings = read_options(HELP, Options, TokenizerTraining)
    model = VQModel(
        base_channels=options.base_channels,
        channel_multipliers=(1, 2, 4, 8),
        blocks_per_level=1,
        latent_channels=64,
        codebook_size=options.codebook_size,
        codebook_dim=8,
        norm_groups=None,
        image_size=128,
    )
    if options.start_from is not None:
        model.load_state_dict(VQModel.from_pretrained(options.start_from).state_dict())
    record = train_tokenizer(model, settings, options.out)
    print(f"PSNR {record['psnr_db']} dB, {record['codes_used']} codes in use, {record['seconds']} s")
