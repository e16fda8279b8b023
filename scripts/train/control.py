"""Train a small ControlAR that draws scenes of `shapes` along their outline, from the pipeline `shapes`.

The loss of the public trainer (arXiv 2410.02705): cross entropy over whole pictures; a tenth of the pictures loses
caption and control together, and the control that stands for none stays zero. New are a tiny DINOv2 and the MLPs after
it; the last layer before the transformer starts at zero, so that training starts from the law of `shapes`. There the
whole transformer trains on; here its matrices get changes of low rank. Tokenizer and caption encoder do not change.

Most tokens follow from their neighbours, and after 200 steps of this loss alone a picture's own outline was worth no
more than another's. So until the last part of a run half of the pictures hide input tokens, as in `scripts.train.ar`,
and tokens that the outline touches weigh more. The weights depend on the control alone, so they bias no law.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train.ar import hidden_inputs
from scripts.train.shuffle import add_changes, merge_changes
from visual_spec.data.shapes import CELL, Scene, outline
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.prototype.controlar import PATCH, ControlARTransformer, ControlledCondition
from visual_spec.training.loop import Descent, RunOptions, Trainer, option, print_record, read_options
from visual_spec.training.tokens import dataset_scenes, tokenize_dataset


@dataclass(frozen=True)
class ControlTraining:
    """Settings of a run."""

    steps: int = 2400
    batch_size: int = 16
    scenes: int = 20000
    learning_rate: float = 1.5e-3
    rank: int = 16
    adapter_dim: int = 96
    adapter_layers: int = 2
    dropout: float = 0.1
    hidden_pictures: float = 0.5
    wholly_hidden: float = 0.6
    hidden_until: float = 0.6
    outline_weight: float = 8.0
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


def start_from_raster(raster: LlamaGenTransformer, settings: ControlTraining) -> ControlARTransformer:
    """Return a model with the weights and the law of `raster`."""
    adapter = {
        "hidden_size": settings.adapter_dim,
        "num_hidden_layers": settings.adapter_layers,
        "num_attention_heads": 3,
        "image_size": PATCH * raster.grid.width,
        "patch_size": PATCH,
    }
    config = {key: value for key, value in raster.config.items() if not key.startswith("_")}
    model = ControlARTransformer(config, adapter, "nearest", CELL)
    model.transformer.load_state_dict(raster.state_dict())
    parts: list[Any] = [model.adapter_mlp, model.condition_mlp.cap_proj, *model.condition_layers]
    for part in parts:
        for layer in (part.fc1, part.fc2):  # at a scale of order one, as in `scripts.train.ar`
            torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    for part in parts[2:]:
        torch.nn.init.zeros_(part.fc2.weight)
    return model


def change_little(model: ControlARTransformer, rank: int) -> None:
    """Let the control train, and of the transformer its norms and changes of low rank."""
    for parameter in model.transformer.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    model.condition_mlp.uncond_embedding.requires_grad_(False)
    add_changes(model.transformer.layers, rank)


def controls_of(scenes: list[Scene]) -> Tensor:
    """Return the control pictures of scenes, `[B, 3, 128, 128]` in [-1, 1]: their outlines, white on black."""
    lines = torch.from_numpy(np.stack([outline(scene) for scene in scenes]))
    return (2.0 * lines - 1.0)[:, None].expand(-1, 3, -1, -1)


def losses_of(
    model: ControlARTransformer, encoder: CaptionEncoder, words: Tensor, controls: Tensor, tokens: Tensor,
    dropped: Tensor | None = None, hidden: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the cross entropy in nats of each token of whole pictures, `[B, L]`; `hidden` as in `teacher_forced`."""
    captions = encoder(words)
    condition = ControlledCondition(captions.features, captions.mask, control=controls)
    logits = model.teacher_forced(tokens, condition, dropped, hidden)
    return F.cross_entropy(logits.mT, tokens, reduction="none")


def train_control(
    model: ControlARTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: ControlTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train in place, on the model's device; save the model in `out/transformer`, and return the record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it. The tokens of the scenes are kept in
    `out`.
    """
    torch.manual_seed(settings.seed)
    change_little(model, settings.rank)
    words, tokens = tokenize_dataset(vq_model, encoder, settings.scenes, settings.seed + 1, cache=out)
    scenes = dataset_scenes(settings.scenes, settings.seed + 1)
    encoder.eval().requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    descend = Descent([optimiser], settings.steps, settings.learning_rate)

    def loss_of(*parts: Tensor) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            losses = losses_of(model, encoder, *parts[:-1])
        return (losses * parts[-1]).mean() / parts[-1].mean()

    def batch(step: int) -> tuple[Tensor, ...]:
        rng, count = np.random.default_rng((settings.seed, step)), settings.batch_size
        chosen = rng.integers(len(tokens), size=count)
        dropped = torch.from_numpy(rng.random(count) < settings.dropout)
        share = settings.hidden_pictures * (step < settings.hidden_until * settings.steps)
        _, hidden = hidden_inputs(rng, share, settings.wholly_hidden, (count, tokens.shape[1] - 1))
        controls = controls_of([scenes[i] for i in chosen])
        touched = F.max_pool2d(controls[:, 0], CELL).flatten(1) > 0
        weight = 1.0 + (settings.outline_weight - 1.0) * touched
        return words[chosen], controls, tokens[chosen].long(), dropped, hidden, weight

    def judged() -> dict[str, float]:
        merge_changes(model)
        return held_out_losses(model, encoder, vq_model)

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model, encoder])
    return run.run(loss_of, batch, judged, lambda: model.save_pretrained(out / "transformer"))


@torch.no_grad()
def held_out_losses(
    model: ControlARTransformer, encoder: CaptionEncoder, vq_model: VQModel, count: int = 200
) -> dict[str, float]:
    """Return the cross entropy in nats a token on held-out pictures, along their own outlines and other pictures'."""
    words, tokens = tokenize_dataset(vq_model, encoder, count, 777, held_out=True, side=model.grid.width)
    controls = controls_of(dataset_scenes(count, 777, held_out=True))
    losses = {}
    for name, given in (
        ("held_out_loss", controls),
        ("held_out_loss_of_other_outlines", controls.roll(1, 0)),
    ):
        parts = zip(words.split(20), given.split(20), tokens.long().split(20), strict=True)
        each = [
            losses_of(model, encoder, *(part.to(model.device) for part in batch)).mean() for batch in parts
        ]
        losses[name] = round(torch.stack(each).mean().item(), 4)
    return losses


HELP = """Train a small ControlAR on scenes of `shapes`: `python scripts/train control --shapes FOLDER --out FOLDER`.

Afterwards `--out` holds a pipeline that draws along outlines (`visual_spec.data.shapes.outline`), and `training.json`.
An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    shapes: Path = option("folder of the pipeline shapes")
    start_from: Path | None = option("folder of an earlier run to go on with", None)


def main() -> None:
    options, settings = read_options(HELP, Options, ControlTraining)
    pipe: Any = ImagePipeline.from_pretrained(options.shapes, torch_dtype=torch.float32)
    torch.manual_seed(settings.seed)
    if options.start_from is None:
        model: Any = start_from_raster(pipe.transformer, settings)
    else:
        model = ControlARTransformer.from_pretrained(options.start_from / "transformer")
    for part in (model, pipe.text_encoder, pipe.vq_model):
        part.to(options.device)
    record = train_control(model, pipe.text_encoder, pipe.vq_model, settings, options.out)
    law = {f"default_{name}": value for name, value in pipe.default_settings().items()}
    ImagePipeline(model, pipe.vq_model, pipe.text_encoder, pipe.sampler, **law).save_pretrained(options.out)
    print_record(record)
