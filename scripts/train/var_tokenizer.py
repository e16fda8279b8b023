"""Train the embedded multi-scale tokenizer on `shapes`.

The objective is VAR's (Tian et al. 2024, section 3.2): reconstruction through a straight-through canvas, and at every
scale the distance between the canvas and the latents, which moves the smoothing convolutions and, with less weight, the
encoder. Its adversarial and perceptual terms need other networks and are left out. Two changes suit a short run, as in
`scripts.train.tokenizer`: codes follow their vectors by exponential averages (van den Oord et al. 2017, appendix
A.1), from k-means on a briefly trained autoencoder, and unused codes are moved onto badly coded vectors. One term is
added: it holds the spread of the latents at 1. The distances alone shrink the spread faster than codes can follow.

A short run from scratch does not work: nothing makes the first latents differ from each other (docs/LOG.md). Training
starts from the networks of a `VQModel`, whose latents a unit sphere kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from scripts.train.codebook import CodeAverages
from scripts.train.tokenizer import reconstruction_loss, to_pixels
from visual_spec.data.shapes import caption, sample_dataset
from visual_spec.data.shapes_parser import all_correct, score
from visual_spec.models.core.kmeans import k_means
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.training.loop import Descent, RunOptions, Trainer, option, print_record, read_options
from visual_spec.training.tokens import to_signed


@dataclass(frozen=True)
class VarTokenizerTraining:
    """Settings of a run.

    The first `continuous_steps` train an autoencoder without codes. From then until `revive_until` of the steps, a code
    that was not used for `idle_steps` is moved. `bfloat16` computes the two networks in bfloat16, but never the codes.
    """

    steps: int = 9000
    batch_size: int = 4
    continuous_steps: int = 500
    learning_rate: float = 2e-3
    commitment: float = 0.25
    spread_weight: float = 1.0
    average_decay: float = 0.99
    idle_steps: int = 150
    revive_until: float = 0.7
    scenes: int = 6000
    bfloat16: bool = False
    seed: int = 0


def initialise(model: MultiscaleVQModel) -> None:
    """Initialise the smoothing convolutions as the identity, so that a coarse map is drawn unchanged."""
    _as_identity(*model.quantize.quant_resi.qresi_ls)


@torch.no_grad()
def start_from(model: MultiscaleVQModel, trained: VQModel) -> None:
    """Give the model the two networks of a trained LlamaGen tokenizer.

    The projections around its codes are folded into the adjacent convolutions, with a shift and a scale that give the
    latents mean 0 and spread 1. The normalisation of each of those latents cannot be folded; training makes up for it.

    Raises:
        ValueError: the tokenizers have different widths or norms.
    """
    names = ("base_channels", "channel_multipliers", "blocks_per_level", "norm_groups")
    config = {name: trained.config[name] for name in names} | {"code_dim": trained.config["codebook_dim"]}
    config["channel_multipliers"] = tuple(
        config["channel_multipliers"]
    )  # a list, where it was read from a file
    wanted = {name: model.config[name] for name in config}
    wanted["channel_multipliers"] = tuple(wanted["channel_multipliers"])
    if config != wanted:
        raise ValueError(f"the trained tokenizer has {config}, the new one {wanted}; make the new one alike.")
    old: Any = trained
    new: Any = model
    for coder, levels in ((new.encoder, new.encoder.down), (new.decoder, reversed(new.decoder.up))):
        source = old.encoder if coder is new.encoder else old.decoder
        for level, known in zip(levels, source.conv_blocks, strict=True):
            level.block.load_state_dict(known.res.state_dict())
            for name in ("downsample", "upsample"):
                if hasattr(known, name):
                    getattr(level, name).load_state_dict(getattr(known, name).state_dict())
        coder.mid.block_1.load_state_dict(source.mid[0].state_dict())
        coder.mid.block_2.load_state_dict(source.mid[-1].state_dict())
        coder.norm_out.load_state_dict(source.norm_out.state_dict())
    new.encoder.conv_in.load_state_dict(old.encoder.conv_in.state_dict())
    new.decoder.conv_out.load_state_dict(old.decoder.conv_out.state_dict())

    pictures = to_signed(torch.from_numpy(sample_dataset(100, 7)[1])).to(old.device)
    latents = torch.cat([old.encode_latents(part) for part in pictures.split(20)])  # [N, D, h, w]
    mean, spread = latents.mean((0, 2, 3)), latents.var((0, 2, 3)).mean().sqrt()
    length = latents.norm(dim=1).mean()
    inward, outward = (
        old.quant_conv.weight[..., 0, 0],
        old.post_quant_conv.weight[..., 0, 0],
    )  # [D, C], [C, D]
    known = old.encoder.conv_out
    new.encoder.conv_out.weight.copy_(torch.einsum("dc,cihw->dihw", inward, known.weight) / spread)
    new.encoder.conv_out.bias.copy_((inward @ known.bias + old.quant_conv.bias - mean) / spread)
    known = old.decoder.conv_in
    new.decoder.conv_in.weight.copy_(torch.einsum("ochw,cd->odhw", known.weight, outward) * (spread / length))
    centre = outward @ (mean / length) + old.post_quant_conv.bias
    new.decoder.conv_in.bias.copy_(known.bias + known.weight.sum((2, 3)) @ centre)
    _as_identity(new.quant_conv, new.post_quant_conv)


def _as_identity(*layers: Any) -> None:
    for layer in layers:
        torch.nn.init.dirac_(layer.weight)
        torch.nn.init.zeros_(layer.bias)


def train_var_tokenizer(
    model: MultiscaleVQModel, settings: VarTokenizerTraining, out: Path, *, every: int = 250
) -> dict:
    """Train in place, save the weights in `out`, and return the record, which is also written to `out/training.json`.

    Runs on the model's device. An interrupted run resumes from `out/resume.pt` with the same result; the finished run
    removes it.

    Raises:
        ValueError: the model is for pictures of another size than `shapes` has.
    """
    scenes, pictures = sample_dataset(settings.scenes, settings.seed)
    if model.image_size != pictures.shape[1]:
        raise ValueError(
            f"this tokenizer is for pictures of {model.image_size} pixels (last scale {model.scales[-1]} x "
            f"{model.patch_size} pixels), the data set has {pictures.shape[1]}."
        )
    device = model.device
    initialise(model)
    codebook = model.quantize.embedding.weight.requires_grad_(False)  # it follows averages, not gradients
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

    def batch(step: int) -> tuple[int, np.random.Generator, Tensor]:
        # One generator per step, so that a resumed run sees the same data.
        rng = np.random.default_rng((settings.seed, step))
        some = pictures[rng.integers(len(pictures), size=settings.batch_size)]
        target = to_signed(torch.from_numpy(some).to(device))
        return step, rng, target.contiguous(memory_format=torch.channels_last)

    def loss(step: int, rng: np.random.Generator, target: Tensor) -> tuple[Any, ...]:
        if step == settings.continuous_steps:
            codebook.copy_(_first_codes(model, pictures, len(codebook), rng))
            averages.restart(codebook)
        terms, distance, *coded = _losses(model, target, settings, step >= settings.continuous_steps)
        return terms + distance, terms, rng, *coded

    def follow(step: int, rng: np.random.Generator, vectors: Tensor, ids: Tensor) -> None:
        if step >= settings.continuous_steps:
            averages.follow(codebook, vectors, ids, settings.average_decay)
            if step < settings.revive_until * settings.steps and step % 20 == 0:
                noise = torch.from_numpy(rng.random(len(ids), dtype=np.float32)).to(device)
                averages.revive(codebook, vectors, ids, settings.idle_steps, noise)

    def judged() -> dict[str, Any]:
        model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
        return judge(model)

    return run.run(loss, batch, judged, lambda: model.save_pretrained(out), after=follow)


def _losses(
    model: MultiscaleVQModel, target: Tensor, settings: VarTokenizerTraining, quantised: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reconstruction loss, the terms on latents and canvases, all vectors `[N, D]` and their codes `[N]`."""
    half = torch.autocast(target.device.type, torch.bfloat16, enabled=settings.bfloat16)
    with half:
        latents = model.encode_latents(target)
    latents = latents.to(target.dtype)  # [B, D, h, w]
    spread = latents.var((0, 2, 3)).mean().sqrt()
    held = settings.spread_weight * (spread - 1.0).square()
    if quantised:
        wanted, tokens, canvases = model.quantise(latents)
        frozen = latents.detach()
        distance = (
            torch.stack(
                [
                    F.mse_loss(canvas, frozen) + settings.commitment * F.mse_loss(latents, canvas.detach())
                    for canvas in canvases
                ]
            ).mean()
            + held
        )
        codes = latents + (canvases[-1] - latents).detach()
        vectors, ids = (
            torch.cat([rearrange(part, "b d h w -> (b h w) d") for part in wanted]),
            torch.cat([part.flatten() for part in tokens]),
        )
    else:
        codes, distance = latents, held
        vectors, ids = latents.new_zeros(0, model.code_dim), torch.zeros(0, dtype=torch.long)
    with half:
        output = model.decode_latents(codes)
    return reconstruction_loss(output.to(target.dtype), target), distance, vectors, ids


@torch.no_grad()
def _first_codes(
    model: MultiscaleVQModel, pictures: np.ndarray, count: int, rng: np.random.Generator
) -> Tensor:
    """Run k-means on the residuals of all scales if each coded its map exactly: codes `[count, D]`."""
    parts = []
    for part in np.array_split(pictures[:500], -(-len(pictures[:500]) // 50)):
        latents = model.encode_latents(to_signed(torch.from_numpy(part).to(model.device)))
        canvas = torch.zeros_like(latents)
        for scale, side in enumerate(model.scales):
            wanted = F.interpolate(latents - canvas, size=(side, side), mode="area")
            canvas = model.accumulate_codes(canvas, scale, wanted)
            parts.append(rearrange(wanted, "b d h w -> (b h w) d"))
    vectors = torch.cat(parts)  # [N, D]
    # Long vectors first: the residuals of fine scales are mostly close to zero, and would fill the codebook.
    weight = vectors.square().sum(-1).clamp_min(1e-8)
    noise = torch.from_numpy(rng.random(len(vectors), dtype=np.float32)).to(vectors.device)
    codes = vectors[(-noise.clamp_min(1e-20).log() / weight).argsort()[:count]]
    if len(codes) < count:
        raise ValueError(f"{len(vectors)} latent vectors cannot start {count} codes; pass more scenes.")
    return k_means(vectors, codes, 8)[0]


@torch.no_grad()
def judge(model: MultiscaleVQModel, count: int = 200) -> dict:
    """Evaluate held-out scenes after reconstruction.

    Returns:
        psnr_db: mean peak signal-to-noise ratio in dB. all_attributes_right: share of pictures whose caption the parser
        confirms completely. codes_used: in all scales together. held_out_pictures: number of evaluated pictures.
    """
    scenes, pictures = sample_dataset(count, 12345, held_out=True)
    errors, right, used = [], [], set()
    for start in range(0, count, 20):
        target = to_signed(torch.from_numpy(pictures[start : start + 20]).to(model.device))
        tokens = model.encode_tokens(target)
        used.update(tokens.unique().tolist())
        output = model.decode_tokens(tokens)
        errors += (output - target).square().mean((1, 2, 3)).tolist()
        for scene, picture in zip(scenes[start : start + 20], to_pixels(output), strict=True):
            right.append(all_correct(score(caption(scene), picture)))
    return {
        "psnr_db": round(float(np.mean(10 * np.log10(4.0 / np.array(errors)))), 2),
        "all_attributes_right": round(float(np.mean(right)), 4),
        "codes_used": len(used),
        "held_out_pictures": count,
    }


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded multi-scale tokenizer on procedural shapes.

`python scripts/train var_tokenizer --out FOLDER`

Afterwards `--out` holds the weights and `training.json`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    start_from: Path | None = option("folder of a trained VQModel of the same widths", None)
    scales: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6, 8, 12, 16])
    codebook_size: int = 1024
    code_dim: int = 8
    base_channels: int = 8


def main() -> None:
    options, settings = read_options(HELP, Options, VarTokenizerTraining)
    torch.manual_seed(settings.seed)
    model = MultiscaleVQModel(
        base_channels=options.base_channels,
        channel_multipliers=(1, 2, 4, 8),
        blocks_per_level=1,
        codebook_size=options.codebook_size,
        code_dim=options.code_dim,
        scales=tuple(options.scales),
        norm_groups=None,
    ).to(options.device)
    if options.start_from is not None:
        known = VQModel.from_pretrained(options.start_from, torch_dtype=torch.float32)
        start_from(model, known.eval().to(options.device))
    record = train_var_tokenizer(model, settings, options.out)
    print_record(record)
