"""Train the embedded `shapes_control`: a small ControlAR that draws scenes of `shapes` along their outline.

The loss is the public trainer's (arXiv 2410.02705): cross entropy over whole pictures; a tenth of the pictures loses
caption and control together, and the control that stands for none stays zero. Another tenth loses the control alone,
for guidance along the control (`guides="control"`). New are a tiny DINOv2 and the MLPs after it; the last layer before
the transformer starts at zero, so that training starts from the law of `shapes`. There the whole transformer trains on;
here its matrices get changes of low rank. Tokenizer and caption encoder do not change.

Most tokens follow from their neighbours, so the loss alone teaches little of the control. Three things do:

* Before all else what reads the control learns which pixels lie inside a shape, by a layer that is thrown away.
* Half of the pictures hide input tokens, as in `scripts.train.ar`, to the end of the run: a last part without lost
  what they had taught.
* Tokens on the outline weigh more, and most where an object begins. Weights depend on the control alone, so
  they bias no law.

Half of the outlines are a little off (`moved`), without which lines drawn by hand gave torn objects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from scripts.train.ar import hidden_inputs
from scripts.train.shuffle import add_changes, load_changes, merge_changes, save_changes
from visual_spec.data.shapes import CELL, Scene, covered, outline
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.prototype.controlar import PATCH, ControlARTransformer, ControlledCondition
from visual_spec.training.loop import Descent, RunOptions, Trainer, option, print_record, read_options
from visual_spec.training.tokens import dataset_scenes, tokenize_dataset

UNTRAINED = ("condition_mlp.uncond_embedding",)  # what stands for no control


@dataclass(frozen=True)
class ControlTraining:
    """Settings of a run.

    `control_dropout` is the share of pictures without the control that keep their captions. Of tokens on the
    outline `outline_weight` is the weight, of those where an object begins `start_weight`. A share of `moved_controls`
    of the outlines is not quite where the object is, as one that is drawn by hand (`moved`). `reading_steps`,
    `reading_batch` and `reading_rate` are of the steps before all others, in which the part that reads the control
    learns to.
    """

    steps: int = 6000
    batch_size: int = 8
    scenes: int = 12000
    learning_rate: float = 1.5e-3
    rank: int = 12
    adapter_dim: int = 96
    adapter_layers: int = 2
    dropout: float = 0.1
    hidden_pictures: float = 0.5
    wholly_hidden: float = 0.3
    hidden_until: float = 1.0
    outline_weight: float = 8.0
    start_weight: float = 30.0
    control_dropout: float = 0.1
    moved_controls: float = 0.5
    reading_steps: int = 2500
    reading_batch: int = 32
    reading_rate: float = 1.5e-3
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
    model = ControlARTransformer(config, adapter, "nearest", CELL, guides="control")
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


def moved(controls: Tensor, rng: np.random.Generator, share: float) -> Tensor:
    """Return controls `[B, 3, H, W]`, a share of them up to two pixels away, and half of these two pixels wide."""
    found = controls.clone()
    for row in np.flatnonzero(rng.random(len(controls)) < share):
        if rng.random() < 0.5:
            found[row] = F.max_pool2d(F.pad(found[row], (1, 0, 1, 0), value=-1.0), 2, 1)
        found[row] = found[row].roll(tuple(rng.integers(-2, 3, 2).tolist()), (1, 2))
    return found


def losses_of(
    model: ControlARTransformer, encoder: CaptionEncoder, words: Tensor, controls: Tensor, tokens: Tensor,
    dropped: Tensor | None = None, hidden: Tensor | None = None, uncontrolled: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the cross entropy in nats of each token of whole pictures, `[B, L]`; `hidden` as in `teacher_forced`.

    `dropped` rows lose caption and control together, `uncontrolled` ones the control alone, bool `[B]` each.
    """
    captions = encoder(words)
    condition = ControlledCondition(captions.features, captions.mask, control=controls)
    lost = [rows for rows in (dropped, uncontrolled) if rows is not None]
    side = model.side_embeddings(condition, dropped=torch.stack(lost).any(0) if lost else None)
    logits = model.transformer.teacher_forced(tokens, condition, dropped, hidden, side)
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
    """Train in place, on the model's device; save the changes in `out/transformer`, and return the record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it. The tokens of the scenes are kept in
    `out`.
    """
    torch.manual_seed(settings.seed)
    words, tokens = tokenize_dataset(vq_model, encoder, settings.scenes, settings.seed + 1, cache=out)
    scenes = dataset_scenes(settings.scenes, settings.seed + 1)
    encoder.eval().requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not (out / "resume.pt").exists():
        learn_to_read(model, scenes, settings)
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
        uncontrolled = torch.from_numpy(rng.random(count) < settings.control_dropout)
        weights = weights_of(controls, settings)
        controls = moved(controls, rng, settings.moved_controls)
        return words[chosen], controls, tokens[chosen].long(), dropped, hidden, uncontrolled, weights

    def judged() -> dict[str, float]:
        save_changes(model, out / "transformer", inside="transformer.", also=UNTRAINED)
        merge_changes(model)
        return held_out_losses(model, encoder, vq_model)

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model, encoder])
    return run.run(loss_of, batch, judged)


def weights_of(controls: Tensor, settings: ControlTraining) -> Tensor:
    """Return the weight of each token, `[B, L]`: 1, more where it is on the outline, most where an object begins."""
    on = (F.max_pool2d(controls[:, :1], CELL)[:, 0] > 0).float()  # [B, H, W]
    around = F.pad(on, (1, 1, 1, 0))
    before = around[:, :-1, :-2] + around[:, :-1, 1:-1] + around[:, :-1, 2:] + around[:, 1:, :-2]
    begins = on * (before == 0)  # in raster order
    more, most = settings.outline_weight - 1, settings.start_weight - settings.outline_weight
    return (1.0 + more * on + most * begins).flatten(1)


def learn_to_read(model: ControlARTransformer, scenes: list[Scene], settings: ControlTraining) -> None:
    """Teach what reads the control which pixels of each cell lie inside a shape, and which on the outline."""
    dim, rate = model.condition_mlp.uncond_embedding.shape[1], settings.reading_rate
    told = torch.nn.Linear(dim, 2 * CELL * CELL, device=model.device)
    parts = [model.adapter, model.adapter_mlp, model.condition_mlp.cap_proj, told]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    descend = Descent([optimiser], settings.reading_steps, rate)
    for step in range(settings.reading_steps):
        rng = np.random.default_rng((settings.seed, settings.steps, step))
        chosen = [scenes[i] for i in rng.integers(len(scenes), size=settings.reading_batch)]
        controls = controls_of(chosen)
        inside = torch.from_numpy(np.stack([covered(scene) for scene in chosen]))
        pixels = torch.stack([inside, controls[:, 0] > 0], 1).float().to(model.device)
        cells = rearrange(pixels, "b c (h y) (w x) -> b (h w) (c y x)", y=CELL, x=CELL)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits = told(model.condition_mlp.cap_proj(model.read(controls.to(model.device))))
        loss = F.binary_cross_entropy_with_logits(logits.float(), cells)
        descend(loss, step)
        if (step + 1) % 500 == 0:
            print(f"reading step {step + 1}/{settings.reading_steps} loss {loss.item():.4f}", flush=True)


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


HELP = """Train the embedded ControlAR on `shapes`: `python scripts/train control --shapes FOLDER --out FOLDER`.

Afterwards `--out/transformer` holds what differs from the transformer of `shapes`, matrices in 8 bits. To be loaded its
parent has to lie beside the folder `shapes`. `--out` holds `training.json`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    shapes: Path = option("folder of the pipeline shapes")
    start_from: Path | None = option("transformer/ of an earlier run to go on with", None)


def main() -> None:
    options, settings = read_options(HELP, Options, ControlTraining)
    pipe: Any = ImagePipeline.from_pretrained(options.shapes, torch_dtype=torch.float32)
    torch.manual_seed(settings.seed)
    model = start_from_raster(pipe.transformer, settings)
    change_little(model, settings.rank)
    if options.start_from is not None:
        load_changes(model, options.start_from)
        settings = replace(settings, reading_steps=0)
    for part in (model, pipe.text_encoder, pipe.vq_model):
        part.to(options.device)
    print_record(train_control(model, pipe.text_encoder, pipe.vq_model, settings, options.out))
