"""Train the embedded models of continuous tokens: MAR and its causal sibling, on the class pictures of `shapes`.

The loss is the head's at hidden slots (Li et al. 2024, section 3.3), or at all slots of the causal model. Each step
draws the latents anew from what the tokenizer's encoder says of a picture. A tenth of the classes is replaced by the
null class, so that guidance works (Ho and Salimans 2022).

`draw` is the published sampling loop written out, for judging a model where it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from scripts.train.classes import class_accuracy, object_slots, sample_one_object_scenes
from scripts.train.kl_tokenizer import moments_of
from scripts.train.tokenizer import to_pixels
from visual_spec.data.shapes import render
from visual_spec.data.shapes_classes import CLASSES, class_of
from visual_spec.files.documents import write_json
from visual_spec.models.continuous.causal import CausalContinuousTransformer
from visual_spec.models.continuous.mar import HEADS, MARTransformer
from visual_spec.models.core.checkpoints import read_written, write_content
from visual_spec.models.core.continuous import guided
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.core.orders import check_order, guidance_scales, hidden_after
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

ContinuousModel = MARTransformer | CausalContinuousTransformer


@dataclass(frozen=True)
class ContinuousTraining:
    """Settings of a run.

    Attributes:
        hidden_share, hidden_spread: a step hides a share of MAR's slots that is at least the first, drawn from a normal
            law around 1 of the second, cut off at 1.
        head_repeats: noisy points that each token's loss is a mean over.
        object_weight: weight in the loss of slots that show part of the object; the others have 1.
        bfloat16: compute the matrix products in it: faster on a GPU, and on CPUs that can.
    """

    steps: int = 6000
    batch_size: int = 20
    scenes: int = 4000
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.02
    label_dropout: float = 0.1
    hidden_share: float = 0.2
    hidden_spread: float = 0.5
    head_repeats: int = 1
    object_weight: float = 2.0
    bfloat16: bool = False
    seed: int = 0


@dataclass
class EncodedPictures:
    """Pictures as latents: labels long [N]; means and stds [N, L, d], in raster order; objects bool [N, L]."""

    labels: Tensor
    means: Tensor
    stds: Tensor
    objects: Tensor

    def draw(self, chosen: Tensor, noise: torch.Generator) -> Tensor:
        """Latents [B, L, d] of some pictures."""
        means = self.means[chosen]
        return means + self.stds[chosen] * torch.randn(means.shape, generator=noise)


def latent_pictures(
    tokenizer: AutoencoderKL, count: int, seed: int, *, held_out: bool = False, cache: Path | None = None
) -> EncodedPictures:
    """Latents of scenes of one large object, kept in `cache`, a folder, if given, under the tokenizer's fingerprint."""
    path = cache / f"latents_{fingerprint([tokenizer])}_{count}_{seed}_{int(held_out)}.pt" if cache else None
    if path and path.exists():
        return EncodedPictures(**read_written(path))
    size, side = tokenizer.config["sample_size"], latent_side(tokenizer)
    scenes = sample_one_object_scenes(count, seed, held_out=held_out)
    means, stds = [], []
    for start in range(0, count, 200):
        pixels = np.stack([render(scene, size) for scene in scenes[start : start + 200]])
        for pictures, parts in zip(moments_of(tokenizer, pixels), (means, stds), strict=True):
            parts.append(pictures.flatten(2).mT.contiguous())
    pictures = EncodedPictures(
        labels=torch.tensor([class_of(scene) for scene in scenes]),
        means=torch.cat(means),
        stds=torch.cat(stds),
        objects=torch.from_numpy(object_slots(scenes, [side])),
    )
    if path:
        write_content(path, vars(pictures))
    return pictures


# -- training ---------------------------------------------------------------------------------------------------------


def initialise(model: ContinuousModel) -> None:
    """Start embeddings and positions at a scale of order one, and the head as published.

    The official start of .02 is for a long training; a short one never hears a class that small (docs/LOG.md).
    """
    torch.nn.init.normal_(model.class_emb.weight)
    torch.nn.init.normal_(model.fake_latent)
    model.head.initialise()
    for name, parameter in model.named_parameters():
        if "pos_embed" in name or "place_embed" in name or name in ("mask_token", "prefix_embed"):
            torch.nn.init.normal_(parameter, std=0.5)


def train_latents(
    model: ContinuousModel,
    tokenizer: AutoencoderKL,
    settings: ContinuousTraining,
    out: Path,
    *,
    every: int = 250,
    cache: Path | None = None,
) -> dict:
    """Train in place, save the weights in `out`, and return the record that is also written to `out/training.json`.

    It runs where the model is. A run that was interrupted goes on from `out/resume.pt` as if it had not been; the
    finished run removes it. Latents are kept in `cache`, see `latent_pictures`.

    Raises:
        ValueError: a model of other tokens or classes than the tokenizer and the data have.
    """
    pictures = latent_pictures(tokenizer, settings.scenes, settings.seed, cache=cache)
    check_fit(model, pictures, len(CLASSES))
    # Of the trunk only: the head's modulations start at 0, where Muon's steps of fixed size would tear them apart.
    trunk = torch.nn.ModuleList(
        [module for name, module in model.named_children() if name.endswith("blocks")]
    )
    optimisers = muon_and_adamw(trunk, model.parameters(), settings.learning_rate, settings.weight_decay)
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    schedule: Any = model.schedule(1000)

    def loss(step: int) -> Tensor:
        # One generator per step, so that a resumed run sees what it would have seen.
        return _step_loss(model, schedule, pictures, settings, np.random.default_rng((settings.seed, step)))

    run = Trainer(model, settings, out, descend, every=every, reads=[tokenizer])
    return run.run(
        loss,
        lambda step: (step,),
        lambda: {"held_out_loss": held_out_loss(model, tokenizer, settings)},
        lambda: model.save_pretrained(out),
    )


def _step_loss(
    model: ContinuousModel,
    schedule: Any,
    pictures: EncodedPictures,
    settings: ContinuousTraining,
    rng: np.random.Generator,
) -> Tensor:
    """Loss of one batch, drawn with `rng`."""
    device, size = model.device, settings.batch_size
    chosen = torch.from_numpy(rng.integers(len(pictures.labels), size=size))
    noise = torch.Generator().manual_seed(int(rng.integers(2**63)))
    dropped = torch.from_numpy(rng.random(size) < settings.label_dropout).to(device)
    tokens = pictures.draw(chosen, noise).to(device)  # [B, L, d]
    labels = pictures.labels[chosen].to(device)
    weights = 1.0 + (settings.object_weight - 1.0) * pictures.objects[chosen].to(device).float()  # [B, L]
    length = tokens.shape[1]
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
        if isinstance(model, MARTransformer):
            count = hidden_count(length, settings, rng)
            order = torch.from_numpy(rng.permuted(np.tile(np.arange(length), (size, 1)), axis=1)).to(device)
            known = torch.zeros(size, length, dtype=torch.bool, device=device)
            known.scatter_(1, order[:, count:], True)
            classes = torch.where(dropped[:, None], model.fake_latent, model.class_emb(labels))
            z = model.conditions(classes, tokens, known, length - count)
            rows, slots = torch.arange(size, device=device)[:, None], order[:, :count]
            z, target, weights = z[rows, slots], tokens[rows, slots], weights[rows, slots]
        else:
            target, weights = tokens[:, model.places[:-1]], weights[:, model.places[:-1]]
            z = model.teacher_forced(target, labels, dropped)
        z, target = (part.flatten(0, 1).repeat(settings.head_repeats, 1) for part in (z, target))  # [N, .]
        index = torch.randint(schedule.num_steps, (len(target),), generator=noise).to(device)
        added = torch.randn(target.shape, generator=noise).to(device)
        output = model.head(schedule.noised(target, index, added), schedule.times[index], z)
    losses = schedule.losses(target, index, added, output.float())
    weights = weights.flatten().repeat(settings.head_repeats)
    return (losses * weights).sum() / weights.sum()


def hidden_count(length: int, settings: ContinuousTraining, rng: np.random.Generator) -> int:
    """Return how many slots of each picture of a batch are hidden."""
    share = 0.0
    while not settings.hidden_share <= share <= 1.0:
        share = 1.0 - abs(rng.normal()) * settings.hidden_spread
    return max(1, math.ceil(length * share))


@torch.no_grad()
def held_out_loss(
    model: ContinuousModel, tokenizer: AutoencoderKL, settings: ContinuousTraining, count: int = 400
) -> float:
    """Mean loss of held-out pictures, in settings of its own so that runs compare."""
    judged = ContinuousTraining(
        batch_size=50, label_dropout=0.0, object_weight=1.0, bfloat16=settings.bfloat16
    )
    schedule: Any = model.schedule(1000)
    pictures = latent_pictures(tokenizer, count, 777, held_out=True)
    return held_out_mean(lambda rng: _step_loss(model, schedule, pictures, judged, rng))


def check_fit(model: Any, pictures: EncodedPictures, classes: int) -> None:
    """Refuse a model of other tokens or classes than the pictures have."""
    length, numbers = pictures.means.shape[1:]
    if (model.grid.num_tokens, model.token_dim) != (length, numbers):
        raise ValueError(
            f"the tokenizer makes {length} tokens of {numbers} numbers, the model has {model.grid.num_tokens} of "
            f"{model.token_dim}; make the model for this tokenizer."
        )
    if model.config["num_classes"] != classes:
        raise ValueError(f"the model has {model.config['num_classes']} classes; the data has {classes}.")


# -- judging ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def draw(
    model: ContinuousModel,
    labels: Tensor,
    *,
    guidance: float = 1.0,
    linear: bool = True,
    steps: int | None = None,
    head_steps: int = 100,
    temperature: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Latents [B, L, d] in raster order, drawn as published.

    Args:
        labels: long [B].
        guidance, linear: the scale, and whether it grows with the share of the slots that are filled.
        steps: calls of MAR; None: one a token. The causal model has no choice.
        head_steps: levels of each token's chain.
        temperature: of the noise in the chain.
    """
    batch_size, length = len(labels), model.grid.num_tokens
    noise = torch.Generator().manual_seed(seed)
    schedule: Any = model.schedule(head_steps)
    tokens = torch.zeros(batch_size, length, model.token_dim, device=model.device, dtype=model.dtype)
    rows = torch.arange(batch_size)[:, None]
    with_null = guidance != 1.0
    if isinstance(model, CausalContinuousTransformer):
        state: Any = model.prefill(labels, batch_size=batch_size, guided=with_null, window=1)
        z = state.conditions[:, None]  # [R, 1, dim]
        for slot in range(length):
            scale = 1.0 + (guidance - 1.0) * (slot + 1) / length if linear else guidance
            drawn = _chain(model, schedule, z, scale if with_null else None, temperature, noise)
            tokens[:, model.places[slot]] = drawn[:, 0]
            at = torch.full((batch_size, 1), slot, device=model.device)
            z = model(state, drawn, at)
        return tokens
    steps = length if steps is None else steps
    order = random_orders(length, [noise] * batch_size).to(model.device)
    state = model.prepare(labels, batch_size=batch_size, guided=with_null)
    known = torch.zeros(batch_size, length, dtype=torch.bool, device=model.device)
    scales = guidance_scales(guidance, length, steps, linear=linear)
    for slots, scale in zip(step_slots(order, steps), scales, strict=True):
        z = model(state, tokens, known)
        both = slots.repeat(2, 1) if with_null else slots
        z = z[torch.arange(len(z))[:, None], both]  # [R, n, dim]
        tokens[rows, slots] = _chain(model, schedule, z, scale if with_null else None, temperature, noise)
        known[rows, slots] = True
    return tokens


def random_orders(num_tokens: int, generators: Sequence[torch.Generator]) -> Tensor:
    """A random order of the slots for each generator, long [B, L] on the CPU."""
    return torch.stack([torch.randperm(num_tokens, generator=generator) for generator in generators])


def step_slots(order: Tensor, num_steps: int) -> list[Tensor]:
    """The slots that each step fills, each long [B, n].

    Args:
        order: long [B, L], for each sample all its slots. As published it is read from its end: a step leaves hidden
            what stands first.

    Raises:
        ValueError: as `hidden_after` and `check_order`.
    """
    check_order(order)
    length = order.shape[1]
    edges = [length, *hidden_after(length, num_steps)[:-1], 0]
    return [order[:, low:high] for high, low in zip(edges[:-1], edges[1:], strict=True)]


def _chain(
    model: ContinuousModel,
    schedule: Any,
    z: Tensor,
    scale: float | None,
    temperature: float,
    noise: torch.Generator,
) -> Tensor:
    """Tokens [B, n, d] of conditions `z [R, n, dim]`; `scale` None: the rows are not doubled."""
    shape, d = (len(z) if scale is None else len(z) // 2, z.shape[1]), model.token_dim
    modulations = model.head.modulations(z.flatten(0, 1), schedule.times)  # [T, R n, M]

    def normal() -> Tensor:
        return torch.randn(*shape, d, generator=noise).flatten(0, 1).to(z)

    x = normal()
    for index in reversed(range(schedule.num_steps)):
        output = model.head.denoise(x if scale is None else x.repeat(2, 1), modulations[index])
        if scale is not None:
            output = guided(output, scale, d)
        mean, sigma = schedule.kernel(x, index, output)
        x = mean + sigma * temperature * normal() if index else mean
    return x.unflatten(0, shape)


def judge(
    model: ContinuousModel, tokenizer: AutoencoderKL, count: int, *, guidance: float, **settings: Any
) -> dict:
    """Class accuracy of pictures that a model draws, about as many of each class.

    Args:
        settings: of `draw`.
    """

    def drawn(labels: Tensor, seed: int) -> Tensor:
        return draw(model, labels.to(model.device), guidance=guidance, seed=seed, **settings)

    return {"guidance_scale": guidance, **settings, **judged_classes(tokenizer, count, drawn)}


def judged_classes(
    tokenizer: AutoencoderKL, count: int, drawn: Callable[[Tensor, int], Tensor]
) -> dict[str, Any]:
    """Class accuracy of pictures of all classes in turn; `drawn(labels, seed)` returns latents [B, L, d] of a batch."""
    labels, rows = torch.arange(count) % len(CLASSES), []
    for start in range(0, count, 48):
        rows.append(decode(tokenizer, drawn(labels[start : start + 48], 1000 + start)))
    return {"pictures": count, **class_accuracy(to_pixels(torch.cat(rows)), labels.tolist())}


def latent_side(tokenizer: AutoencoderKL) -> int:
    """Tokens a side of a picture of the tokenizer's own size."""
    return tokenizer.config["sample_size"] // 2 ** (len(tokenizer.config["block_out_channels"]) - 1)


@torch.no_grad()
def held_out_mean(loss_of: Callable[[np.random.Generator], Tensor]) -> float:
    """Mean of `loss_of(rng)` over 16 batches, the same in every run."""
    losses = [loss_of(np.random.default_rng((777, part))).item() for part in range(16)]
    return round(float(np.mean(losses)), 4)


@torch.no_grad()
def decode(tokenizer: AutoencoderKL, latents: Tensor) -> Tensor:
    """Pictures [B, 3, H, W] in -1 to 1, on the CPU, of latents [B, L, d] of a square grid."""
    side = round(latents.shape[1] ** 0.5)
    maps = latents.mT.unflatten(2, (side, side)).to(tokenizer.device) / tokenizer.config["scaling_factor"]
    decoded: Any = tokenizer.decode(maps.to(tokenizer.dtype))
    return decoded.sample.float().cpu()


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train an embedded model of continuous tokens.

`python scripts/train mar --tokenizer FOLDER --out FOLDER`

`--kind mar` hides tokens and predicts them in any order, `--kind causal` predicts one after the other. `--size small`
is the drafter of `--size large`. Afterwards `--out` holds the weights and `training.json`, with the loss curve, the
held-out loss and the class accuracy of pictures drawn with them. An interrupted run resumes.
"""


SIZES: dict[str, dict[str, int]] = {
    "large": {"dim": 128, "num_layers": 4, "num_heads": 4, "head_width": 192, "head_depth": 3},
    "small": {"dim": 64, "num_layers": 2, "num_heads": 2, "head_width": 96, "head_depth": 2},
}


def new_model(kind: str, size: str, tokenizer: AutoencoderKL, head_kind: str) -> Any:
    """A fresh model for a tokenizer's latents. A causal one has as many layers as MAR's two networks together."""
    side = latent_side(tokenizer)
    shared: dict[str, Any] = dict(
        SIZES[size],
        grid_size=side,
        token_dim=tokenizer.config["latent_channels"],
        num_classes=len(CLASSES),
        head_kind=head_kind,
    )
    if kind == "mar":
        model: Any = MARTransformer(buffer_size=4, **shared)
    else:
        shared["num_layers"] *= 2
        model = CausalContinuousTransformer(prefix_length=1, **shared)
    initialise(model)
    return model


@dataclass(kw_only=True)
class Options(RunOptions):
    tokenizer: Path = option("folder that python scripts/train kl_tokenizer wrote")
    kind: str = option("mar or causal", "mar", choices=["mar", "causal"])
    size: str = option("large or small", "large", choices=list(SIZES))
    head_kind: str = option("what the head predicts", "velocity", choices=list(HEADS))
    start_from: Path | None = option("folder of a trained model of this kind to go on with", None)
    judged_pictures: int = option("drawn for the accuracy; 0: none", 240)
    guidance_scale: float = option("of these pictures", 2.0)
    judged_steps: int | None = option("calls of MAR for a picture; without: one a token", None)
    judged_head_steps: int = option("levels of a token's chain", 100)
    eight_bits: bool = option("store matrices in 8 bits, and judge the model so", False)


def main() -> None:
    options, settings = read_options(HELP, Options, ContinuousTraining)
    torch.manual_seed(settings.seed)
    tokenizer: Any = AutoencoderKL.from_pretrained(options.tokenizer, torch_dtype=torch.float32)
    tokenizer = tokenizer.eval().to(options.device)
    if options.start_from is None:
        model = new_model(options.kind, options.size, tokenizer, options.head_kind)
    else:
        trained: Any = MARTransformer if options.kind == "mar" else CausalContinuousTransformer
        model = trained.from_pretrained(options.start_from, torch_dtype=torch.float32)
    model = model.to(options.device)
    record = train_latents(model, tokenizer, settings, options.out, cache=options.tokenizer)
    if options.eight_bits:
        round_matrices(model, options.out)
    if options.judged_pictures:
        record["drawn"] = judge(
            model,
            tokenizer,
            options.judged_pictures,
            guidance=options.guidance_scale,
            steps=options.judged_steps,
            head_steps=options.judged_head_steps,
        )
        write_json(options.out / "training.json", record)
    print_record(record)
