"""Train the embedded KL tokenizer on class pictures of `shapes`: a small `AutoencoderKL` of diffusers.

The objective of a latent diffusion autoencoder (Rombach et al. 2022, section 3.1) without its adversarial and
perceptual terms, which need other networks. Its Kullback-Leibler term weighs more than there: a head of a few layers
has to draw these latents, and latents with noise of some width are easier to draw, and forgive more (Sun et al. 2024,
LatentLM, section 3.2).

Afterwards the channels are shifted and scaled to a mean of 0 and a spread of 1, folded into the two 1 x 1 convolutions
beside them, so that `scaling_factor` is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from scripts.train.classes import class_accuracy, sample_one_object_scenes
from scripts.train.tokenizer import reconstruction_loss, to_pixels
from visual_spec.data.shapes import render
from visual_spec.data.shapes_classes import class_of
from visual_spec.training.loop import Descent, RunOptions, Trainer, option, print_record, read_options
from visual_spec.training.tokens import to_signed


@dataclass(frozen=True)
class KLTokenizerTraining:
    """Settings of a run.

    Attributes:
        crop: side in pixels of the windows, from places that tokens begin at, that the first steps see. Four times as
            many steps take the time of whole pictures, and a local network hardly notices.
        whole_pictures: the share of the steps, the last ones, that see whole pictures, as many pixels a step.
        kl_weight: of the divergence from a standard normal, in nats a number of the latents, beside the
            reconstruction loss, a mean over pixels. It grows from 0 over the first `kl_warmup` steps: from the start it
            keeps the latents from ever saying anything.
        bfloat16: compute the two networks in it.
    """

    steps: int = 3000
    batch_size: int = 8
    crop: int = 64
    whole_pictures: float = 0.2
    learning_rate: float = 1e-3
    kl_weight: float = 1e-3
    kl_warmup: int = 1000
    scenes: int = 6000
    bfloat16: bool = False
    seed: int = 0


def new_tokenizer(
    *, channels: tuple[int, ...] = (16, 16, 32, 64, 64), latent_channels: int = 8, image_size: int = 128
) -> AutoencoderKL:
    """A tokenizer without attention, whose side is `image_size / 2 ** (len(channels) - 1)` tokens.

    Args:
        channels: of each level, from full resolution down.
        latent_channels: numbers of a token.
        image_size: side of the pictures in pixels.
    """
    levels: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * len(channels),
        "up_block_types": ("UpDecoderBlock2D",) * len(channels),
        "block_out_channels": channels,
    }
    return AutoencoderKL(
        **levels,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=1,  # with four, 140 steps led to a loss of .78 in place of .64
        sample_size=image_size,
        scaling_factor=1.0,
        mid_block_add_attention=False,
    )


@torch.no_grad()
def initialise(model: AutoencoderKL) -> None:
    """Start as a network that is nearly linear: layers keep the size of what they read, and blocks add nothing yet.

    The latents start with little noise: with as much as signal, the decoder learns to do without them.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            torch.nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]
            if name.endswith("conv2"):
                torch.nn.init.zeros_(layer.weight)
    bias: Any = model.quant_conv.bias  # pyright: ignore[reportOptionalMemberAccess]
    bias[len(bias) // 2 :] = -4.0


def class_pictures(
    count: int, seed: int, *, held_out: bool = False, size: int = 128
) -> tuple[Tensor, np.ndarray]:
    """Classes, long `[N]`, and pictures, uint8 `[N, size, size, 3]`, of scenes of one large object."""
    scenes = sample_one_object_scenes(count, seed, held_out=held_out)
    labels = torch.tensor([class_of(scene) for scene in scenes])
    return labels, np.stack([render(scene, size) for scene in scenes])


def train_kl_tokenizer(
    model: AutoencoderKL, settings: KLTokenizerTraining, out: Path, *, every: int = 250
) -> dict:
    """Train in place, save the weights in `out`, and return the record that is also written to `out/training.json`.

    A run that was interrupted goes on from `out/resume.pt` as if it had not been; the finished run removes it.
    """
    torch.manual_seed(settings.seed)
    size, patch = model.config["sample_size"], 2 ** (len(model.config["block_out_channels"]) - 1)
    _, pictures = class_pictures(settings.scenes, settings.seed, size=size)
    initialise(model)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=1e-4
    )
    descend = Descent([optimiser], settings.steps, settings.learning_rate)
    run = Trainer(model, settings, out, descend, every=every, curve_every=50, digits=5)

    def batch(step: int) -> tuple[int, Tensor, torch.Generator]:
        # One generator per step, so that a resumed run sees what it would have seen.
        rng = np.random.default_rng((settings.seed, step))
        some = pictures[rng.integers(len(pictures), size=settings.batch_size)]
        if step < (1 - settings.whole_pictures) * settings.steps:
            top, left = rng.integers((size - settings.crop) // patch + 1, size=2) * patch
            some = some[:, top : top + settings.crop, left : left + settings.crop]
        else:
            some = some[: max(1, settings.batch_size * settings.crop**2 // size**2)]
        noise = torch.Generator().manual_seed(int(rng.integers(2**63)))
        return step, to_signed(torch.from_numpy(some)), noise

    def loss(step: int, target: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        half = torch.autocast(target.device.type, torch.bfloat16, enabled=settings.bfloat16)
        with half:
            moments: Any = model.encode(target).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
        mean, std = moments.mean.float(), moments.logvar.float().mul(0.5).exp()  # [B, d, h, w]
        latents = mean + std * torch.randn(mean.shape, generator=noise).to(mean)
        with half:
            output: Any = model.decode(latents).sample  # pyright: ignore[reportAttributeAccessIssue]
        divergence = 0.5 * (mean.square() + std.square() - 1.0 - 2.0 * std.log()).mean()
        terms = reconstruction_loss(output.float(), target)
        strength = min(1.0, step / max(1, settings.kl_warmup))
        return terms + strength * settings.kl_weight * divergence, terms

    def judged() -> dict[str, Any]:
        normalise(model, pictures[:500])
        return judge(model)

    return run.run(loss, batch, judged, lambda: model.save_pretrained(out))


@torch.no_grad()
def moments_of(model: AutoencoderKL, pictures: np.ndarray) -> tuple[Tensor, Tensor]:
    """Means and standard deviations, each `[N, d, h, w]` on the CPU, of pictures, uint8 `[N, H, W, 3]`."""
    means, stds = [], []
    for start in range(0, len(pictures), 50):
        batch = to_signed(torch.from_numpy(pictures[start : start + 50]).to(model.device))
        law: Any = model.encode(batch).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
        means.append(law.mean.float().cpu())
        stds.append(law.std.float().cpu())
    return torch.cat(means), torch.cat(stds)


@torch.no_grad()
def normalise(model: AutoencoderKL, pictures: np.ndarray) -> None:
    """Shift and scale each channel of the latents, so that samples over `pictures` have mean 0 and spread 1.

    What pictures look like after reconstruction stays.
    """
    means, stds = moments_of(model, pictures)
    centre = means.mean((0, 2, 3)).to(model.device)
    spread = (means.var((0, 2, 3)) + stds.square().mean((0, 2, 3))).sqrt().to(model.device)
    inward: Any = model.quant_conv
    outward: Any = model.post_quant_conv
    size = len(centre)
    outward.bias += outward.weight[..., 0, 0] @ centre
    outward.weight *= spread[None, :, None, None]
    inward.bias[:size] = (inward.bias[:size] - centre) / spread
    inward.weight[:size] /= spread[:, None, None, None]
    inward.bias[size:] -= 2.0 * spread.log()  # of the logarithms of the variances


@torch.no_grad()
def judge(model: AutoencoderKL, count: int = 240) -> dict:
    """Return what held-out pictures look like after reconstruction from samples of their latents.

    Returns:
        psnr_db: mean peak signal-to-noise ratio in dB. class_after: share of pictures of which the parser still reads
        the class. noise: mean over the channels of the latents of the noise's standard deviation, beside a spread of 1.
        held_out_pictures: how many were judged.
    """
    labels, pictures = class_pictures(count, 12345, held_out=True, size=model.config["sample_size"])
    means, stds = moments_of(model, pictures)
    latents = means + stds * torch.randn(means.shape, generator=torch.Generator().manual_seed(0))
    outputs = []
    for part in latents.split(50):
        decoded: Any = model.decode(part.to(model.device))  # pyright: ignore[reportArgumentType]
        outputs.append(decoded.sample.float().cpu())
    output = torch.cat(outputs)
    errors = (output.clamp(-1, 1) - to_signed(pictures)).square().mean((1, 2, 3))
    return {
        "psnr_db": round((10 * torch.log10(4.0 / errors)).mean().item(), 2),
        "class_after": class_accuracy(to_pixels(output), labels.tolist())["class"],
        "noise": [round(value, 3) for value in stds.mean((0, 2, 3)).tolist()],
        "held_out_pictures": count,
    }


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded KL tokenizer on class pictures.

`python scripts/train kl_tokenizer --out FOLDER`

Afterwards `--out` holds the weights and `training.json`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    image_size: int = option("side of the pictures in pixels", 128)
    channels: list[int] = field(default_factory=lambda: [16, 16, 32, 64, 64])
    latent_channels: int = option("numbers of a token", 8)


def main() -> None:
    options, settings = read_options(HELP, Options, KLTokenizerTraining)
    torch.manual_seed(settings.seed)
    model = new_tokenizer(
        channels=tuple(options.channels),
        latent_channels=options.latent_channels,
        image_size=options.image_size,
    )
    record = train_kl_tokenizer(model.to(options.device), settings, options.out)
    print_record(record)
