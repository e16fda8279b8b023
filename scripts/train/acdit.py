"""Train an ACDiT on the class pictures of `shapes`, or on clips of `motion`: blocks of continuous tokens (Hu et al.
2024, section 3).

One pass reads all clean tokens and all noisy ones; every block has a time of its own. The class dropout and the
weights of slots are as in `mar`, and so are the latents of pictures. Latents of clips are squares of small frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from scripts.train.clips import (
    CLIP_CLASSES,
    SIDE,
    TOKEN_DIM,
    encoded_clips,
    judged_clips,
)
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
from visual_spec.prototype.acdit.model import PREDICTIONS, ACDiTTransformer
from visual_spec.prototype.acdit.sampler import BlockDiffusionSampler
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
class BlockTraining:
    """Settings of a run.

    Attributes:
        object_weight: weight in the loss of slots that show part of the object; the others have 1.
        bfloat16: compute the matrix products in it: faster on a GPU, and on CPUs that can.
    """

    steps: int = 2500
    batch_size: int = 20
    scenes: int = 6000
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.02
    label_dropout: float = 0.1
    object_weight: float = 2.0
    bfloat16: bool = False
    seed: int = 0


def new_model(
    tokenizer: AutoencoderKL | None, block_size: int, prediction: str, frames: int = 1
) -> ACDiTTransformer:
    """A fresh model of 1.3 million weights for a tokenizer's latents; without one, for clips of so many frames."""
    model = ACDiTTransformer(
        grid_size=latent_side(tokenizer) if tokenizer else SIDE,
        token_dim=tokenizer.config["latent_channels"] if tokenizer else TOKEN_DIM,
        block_size=block_size,
        frames=frames,
        dim=128,
        num_layers=4,
        num_heads=4,
        num_classes=len(CLASSES if tokenizer else CLIP_CLASSES),
        prediction=prediction,
    )
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                torch.nn.init.zeros_(layer.bias)
    # At a scale of order one: the official start of .02 is for a long training.
    torch.nn.init.normal_(model.y_embedder.embedding_table.weight)
    for layer in (*model.blocks, model.final_layer):
        torch.nn.init.zeros_(layer.adaLN_modulation[1].weight)  # pyright: ignore
    torch.nn.init.zeros_(model.final_layer.linear.weight)
    return model


def train_blocks(
    model: ACDiTTransformer,
    tokenizer: AutoencoderKL | None,
    settings: BlockTraining,
    out: Path,
    *,
    every: int = 100,
    cache: Path | None = None,
) -> dict:
    """Train in place, save the weights in `out`, and return the record that is also written to `out/training.json`.

    A run that was interrupted goes on from `out/resume.pt`. Latents are kept in `cache`, see `latent_pictures`.

    Args:
        tokenizer: of pictures; None: the model is of clips.

    Raises:
        ValueError: a model of other tokens or classes than the tokenizer and the data have.
    """
    pictures = examples(model, tokenizer, settings.scenes, settings.seed, cache=cache)
    check_fit(model, pictures, len(CLASSES if tokenizer else CLIP_CLASSES))
    # Muon's steps of fixed size would tear modulations apart, which start at 0.
    blocks: Any = model.blocks
    trunk = torch.nn.ModuleList([part for block in blocks for part in (block.attn, block.mlp)])
    optimisers = muon_and_adamw(trunk, model.parameters(), settings.learning_rate, settings.weight_decay)
    descend = Descent(optimisers, settings.steps, settings.learning_rate)

    def loss(step: int) -> Tensor:
        return step_loss(model, pictures, settings, np.random.default_rng((settings.seed, step)))

    run = Trainer(model, settings, out, descend, every=every, reads=[tokenizer] if tokenizer else [])
    return run.run(
        loss,
        lambda step: (step,),
        lambda: {"held_out_loss": held_out_loss(model, tokenizer, settings)},
        lambda: model.save_pretrained(out),
    )


def examples(
    model: ACDiTTransformer, tokenizer: AutoencoderKL | None, count: int, seed: int, **more: Any
) -> EncodedPictures:
    """Pictures, or clips as long as the model's; `more`: as for `latent_pictures`."""
    if tokenizer is not None:
        return latent_pictures(tokenizer, count, seed, **more)
    return encoded_clips(count, seed, model.grid.frames, held_out=more.get("held_out", False))


def step_loss(
    model: ACDiTTransformer, pictures: EncodedPictures, settings: BlockTraining, rng: np.random.Generator
) -> Tensor:
    """Squared error of the noise, or of the velocity, of one batch that is drawn with `rng`."""
    size, device = settings.batch_size, model.device
    chosen = torch.from_numpy(rng.integers(len(pictures.labels), size=size))
    noise = torch.Generator().manual_seed(int(rng.integers(2**63)))
    dropped = torch.from_numpy(rng.random(size) < settings.label_dropout)
    labels = pictures.labels[chosen].masked_fill(dropped, model.config["num_classes"]).to(device)
    places = model.places.cpu()
    tokens = pictures.draw(chosen, noise)[:, places]  # [B, L, d]
    weights = 1.0 + (settings.object_weight - 1.0) * pictures.objects[chosen][:, places].float()
    times = torch.randint(1000, (size, model.num_blocks), generator=noise)
    each = times.repeat_interleave(model.block_size, 1)  # [B, L]
    added = torch.randn(tokens.shape, generator=noise)
    scheduler = DDIMScheduler()
    flat: Any = tokens.flatten(0, 1), added.flatten(0, 1), each.flatten()
    noisy = scheduler.add_noise(*flat).view_as(tokens)
    target = added
    if model.config["prediction"] == "v_prediction":
        target = scheduler.get_velocity(*flat).view_as(tokens)
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
        output = model.predictions(tokens.to(device), noisy.to(device), times.to(device), labels)
    losses = (output.float() - target.to(device)).square().mean(-1)
    return (losses * weights.to(device)).sum() / weights.sum()


def held_out_loss(
    model: ACDiTTransformer, tokenizer: AutoencoderKL | None, settings: BlockTraining, count: int = 400
) -> float:
    """Mean loss of held-out pictures or clips, in settings of its own so that runs compare."""
    judged = BlockTraining(batch_size=50, label_dropout=0.0, object_weight=1.0, bfloat16=settings.bfloat16)
    pictures = examples(model, tokenizer, count, 777, held_out=True)
    return held_out_mean(lambda rng: step_loss(model, pictures, judged, rng))


# -- judging ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def judge(
    model: ACDiTTransformer, tokenizer: AutoencoderKL | None, count: int, *, guidance: float, levels: int
) -> dict:
    """Class accuracy of pictures or clips that a model draws, about as many of each class."""
    request: Any = {"law": TokenLaw(guidance_scale=guidance)}

    def drawn(labels: Tensor, seed: int) -> Tensor:
        request.update(generator=torch.Generator().manual_seed(seed), batch_size=len(labels))
        return BlockDiffusionSampler(levels)(model, labels.to(model.device), **request).tokens

    read = judged_classes(tokenizer, count, drawn) if tokenizer else judged_clips(count, drawn)
    return {"guidance_scale": guidance, "levels": levels, **read}


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train an ACDiT, which denoises pictures or clips block by block.

`python scripts/train acdit --tokenizer FOLDER --out FOLDER --block-size 16`
`python scripts/train acdit --frames 8 --out FOLDER --block-size 16`

Afterwards `--out` holds the weights and `training.json`, with the loss curve, the held-out loss and the class accuracy
of pictures or clips drawn with them. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    tokenizer: Path | None = option("of pictures: folder that python scripts/train kl_tokenizer wrote", None)
    frames: int = option("of clips, which have 16 tokens a frame and need no tokenizer", 1)
    block_size: int = option("tokens of a block; of pictures the square of a side that divides theirs", 16)
    prediction: str = option("what the network predicts", "v_prediction", choices=list(PREDICTIONS))
    judged_pictures: int = option("drawn for the accuracy; 0: none", 240)
    guidance_scale: float = option("of these pictures", 2.0)
    judged_levels: int = option("levels of a block", 25)


def main() -> None:
    options, settings = read_options(HELP, Options, BlockTraining)
    if (options.tokenizer is None) == (options.frames == 1):
        raise SystemExit(
            f"tokenizer={options.tokenizer}, frames={options.frames} given; pass --tokenizer FOLDER for pictures, or "
            "--frames with 2 or more for clips."
        )
    torch.manual_seed(settings.seed)
    tokenizer: Any = None
    if options.tokenizer is not None:
        tokenizer = AutoencoderKL.from_pretrained(options.tokenizer, torch_dtype=torch.float32)
        tokenizer = tokenizer.eval().to(options.device)
    model = new_model(tokenizer, options.block_size, options.prediction, options.frames).to(options.device)
    record = train_blocks(model, tokenizer, settings, options.out, cache=options.out.parent)
    if options.judged_pictures:
        record["drawn"] = judge(
            model,
            tokenizer,
            options.judged_pictures,
            guidance=options.guidance_scale,
            levels=options.judged_levels,
        )
        write_json(options.out / "training.json", record)
    print_record(record)
