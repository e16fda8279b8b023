"""Train FlowAR, a next-map model of latents, on the class pictures of `shapes`, with the autoencoder of `shapes_mar`.

The loss is the flow network's at all places of all maps (arXiv 2412.15205, section 3.4): at one share of noise for each
picture and map, the squared error of the velocity, places weighted alike. Latents are drawn anew in each step, and a
tenth of the classes is replaced by the null class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from scripts.train.mar import (
    EncodedPictures,
    check_fit,
    held_out_mean,
    judged_classes,
    latent_pictures,
    latent_side,
)
from visual_spec.data.shapes_classes import CLASSES
from visual_spec.files.documents import write_json
from visual_spec.prototype.flowar.model import FlowARTransformer
from visual_spec.prototype.flowar.sampler import FlowScaleSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    print_record,
    read_options,
)


@dataclass(frozen=True)
class FlowTraining:
    """Settings of a run.

    Attributes:
        object_weight: weight in the loss of places that show part of the object; the others have 1.
    """

    steps: int = 3000
    batch_size: int = 16
    scenes: int = 4000
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.02
    label_dropout: float = 0.1
    object_weight: float = 2.0
    seed: int = 0


def train_maps(
    model: FlowARTransformer,
    tokenizer: AutoencoderKL,
    settings: FlowTraining,
    out: Path,
    *,
    every: int = 250,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Train in place, save the weights in `out`, and return the record that is also written to `out/training.json`.

    A run that was interrupted goes on from `out/resume.pt`; latents are kept in `cache`, see `latent_pictures`.

    Raises:
        ValueError: a model of other tokens or classes than the tokenizer and the data have.
    """
    pictures = latent_pictures(tokenizer, settings.scenes, settings.seed, cache=cache)
    check_fit(model, pictures, len(CLASSES))
    # Not of the modulations: they start at 0, where Muon's steps of fixed size would tear them apart.
    matrices = [
        part
        for name, part in model.named_modules()
        if name.endswith((".attn", ".mlp")) and "flownet" not in name
    ]
    trunk = torch.nn.ModuleList(matrices)
    descend = Descent(
        muon_and_adamw(trunk, model.parameters(), settings.learning_rate, settings.weight_decay),
        settings.steps,
        settings.learning_rate,
    )

    def loss(step: int) -> Tensor:
        # One generator per step, so that a resumed run sees what it would have seen.
        return map_loss(model, pictures, settings, np.random.default_rng((settings.seed, step)))

    return Trainer(model, settings, out, descend, every=every, reads=[tokenizer]).run(
        loss,
        lambda step: (step,),
        lambda: {"held_out_loss": held_out_loss(model, tokenizer)},
        lambda: model.save_pretrained(out),
    )


def map_loss(
    model: FlowARTransformer, pictures: EncodedPictures, settings: FlowTraining, rng: np.random.Generator
) -> Tensor:
    """Loss of one batch, drawn with `rng`."""
    size = settings.batch_size
    chosen = torch.from_numpy(rng.integers(len(pictures.labels), size=size))
    noise = torch.Generator().manual_seed(int(rng.integers(2**63)))
    dropped = torch.from_numpy(rng.random(size) < settings.label_dropout).to(model.device)
    shape = (model.grid.height, model.grid.width)
    latents = pictures.draw(chosen, noise).mT.unflatten(2, shape).to(model.device)
    objects = pictures.objects[chosen].to(latents).unflatten(1, shape)[:, None]
    maps = [model.averaged(latents, side) for side in model.scales]
    z = model.teacher_forced(maps, pictures.labels[chosen].to(model.device), dropped)
    total, weight = z.new_zeros(()), 0.0
    for side, map, conditions in zip(
        model.scales, maps, z.split([n * n for n in model.scales], 1), strict=True
    ):
        tokens = map.flatten(2).mT
        times = torch.rand(len(tokens), generator=noise).to(tokens)
        added = torch.randn(tokens.shape, generator=noise).to(tokens)
        point = torch.lerp(tokens, added, times[:, None, None])
        velocity = model.flownet(point, times, model.flownet.inputs(conditions, side))
        weights = 1.0 + (settings.object_weight - 1.0) * F.adaptive_max_pool2d(objects, side).flatten(1)
        errors = (velocity - (added - tokens)).square().mean(-1)
        total = total + (errors * weights).sum()
        weight = weight + weights.sum()
    return total / weight


def held_out_loss(model: FlowARTransformer, tokenizer: AutoencoderKL, count: int = 400) -> float:
    """Mean loss of held-out pictures, in settings of its own so that runs compare."""
    judged = FlowTraining(batch_size=50, label_dropout=0.0, object_weight=1.0)
    pictures = latent_pictures(tokenizer, count, 777, held_out=True)
    return held_out_mean(lambda rng: map_loss(model, pictures, judged, rng))


def judge(
    model: FlowARTransformer, tokenizer: AutoencoderKL, count: int, *, guidance: float, levels: int = 25
) -> dict[str, Any]:
    """Class accuracy of pictures that a model draws, about as many of each class."""
    request: Any = {"law": TokenLaw(guidance_scale=guidance)}

    def drawn(labels: Tensor, seed: int) -> Tensor:
        request.update(generator=torch.Generator().manual_seed(seed), batch_size=len(labels))
        return FlowScaleSampler(levels)(model, labels.to(model.device), **request).tokens

    return {"guidance_scale": guidance, "levels": levels, **judged_classes(tokenizer, count, drawn)}


HELP = """Train FlowAR on the latents of an autoencoder.

`python scripts/train flowar --tokenizer FOLDER --out FOLDER`

Afterwards `--out` holds the weights and `training.json`, with the loss curve, the held-out loss and the class accuracy
of pictures drawn with them. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    writes = ("out", "cache")

    tokenizer: Path = option("folder that python scripts/train kl_tokenizer wrote")
    cache: Path | None = option("folder for the latents; without: the tokenizer's", None)
    dim: int = option("width of the transformer", 96)
    num_layers: int = option("layers of its encoder, and of its decoder", 2)
    flow_depth: int = option("layers of the flow network, of width 128", 2)
    judged_pictures: int = option("drawn for the accuracy; 0: none", 240)
    guidance_scale: float = option("of these pictures", 3.0)


@torch.no_grad()
def initialise(model: FlowARTransformer) -> None:
    """Start all layers as the identity, the flow network's output as nothing, and embeddings at order one.

    The released start, matrices of order one and embeddings of .02, is for a long training.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        if "ada_lin" in name or "adaLN" in name or name == "flownet.final_layer.linear.weight":
            nn.init.zeros_(parameter)
        elif "pos_embed" in name:
            nn.init.normal_(parameter, std=0.5)
    nn.init.normal_(model.class_emb.weight)
    for layer in (model.flownet.time_embed.mlp[0], model.flownet.time_embed.mlp[2]):
        nn.init.normal_(layer.weight, std=0.02)  # pyright: ignore[reportArgumentType]


def main() -> None:
    options, settings = read_options(HELP, Options, FlowTraining)
    torch.manual_seed(settings.seed)
    tokenizer: Any = AutoencoderKL.from_pretrained(options.tokenizer, torch_dtype=torch.float32)
    tokenizer = tokenizer.eval().to(options.device)
    model = FlowARTransformer(
        grid_size=latent_side(tokenizer),
        token_dim=tokenizer.config["latent_channels"],
        dim=options.dim,
        num_layers=options.num_layers,
        num_heads=options.dim // 32,
        flow_width=128,
        flow_depth=options.flow_depth,
        num_classes=len(CLASSES),
    )
    initialise(model)
    model = model.to(options.device)
    record = train_maps(model, tokenizer, settings, options.out, cache=options.cache or options.tokenizer)
    if options.judged_pictures:
        record["drawn"] = judge(model, tokenizer, options.judged_pictures, guidance=options.guidance_scale)
        write_json(options.out / "training.json", record)
    print_record(record)
