"""Train the embedded `shapes_any`: a LlamaGen in RandAR's layout, from the transformer of `shapes`.

Every picture of a step has a random order of its own (RandAR, arXiv 2412.01827, section 3.2). Tokenizer and caption
encoder come from `shapes` and do not change. A tenth of the captions is dropped for guidance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.protocol import ANY_ORDER
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_any_order import LlamaGenAnyOrder
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    read_options,
    round_matrices,
)
from visual_spec.training.tokens import tokenize_dataset


@dataclass(frozen=True)
class AnyOrderTraining:
    """Settings of a run."""

    steps: int = 2000
    batch_size: int = 8
    scenes: int = 12000
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    caption_dropout: float = 0.1
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


@torch.no_grad()
def start_from_raster(raster: LlamaGenTransformer) -> LlamaGenAnyOrder:
    """Return an any-order model with the weights of a raster model, and an instruction of the scale of its tokens."""
    config: dict[str, Any] = {key: value for key, value in raster.config.items() if not key.startswith("_")}
    model: Any = LlamaGenTransformer(**dict(config, order=ANY_ORDER))
    instruction = torch.randn_like(model.pos_instruct_embeddings) * raster.tok_embeddings.weight.std()
    model.load_state_dict(raster.state_dict() | {"pos_instruct_embeddings": instruction})
    return model


def train_any_order(
    model: LlamaGenAnyOrder,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: AnyOrderTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train in place, on the model's device; round to 8 bits, save in `out`, and return the record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it. The tokens of the scenes are kept in
    `out`.
    """
    torch.manual_seed(settings.seed)
    words, tokens = tokenize_dataset(vq_model, encoder, settings.scenes, settings.seed + 1, cache=out)
    encoder.eval().requires_grad_(False)
    optimisers = muon_and_adamw(
        model.layers, model.parameters(), settings.learning_rate, settings.weight_decay
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate)

    def loss_of(word_ids: Tensor, token_ids: Tensor, orders: Tensor, dropped: Tensor) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits = model.teacher_forced_along(token_ids, orders, encoder(word_ids), dropped)
        return F.cross_entropy(logits.mT, token_ids.gather(1, orders))

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(tokens), size=settings.batch_size))
        orders = torch.from_numpy(rng.random((settings.batch_size, tokens.shape[1])).argsort(1))
        dropped = torch.from_numpy(rng.random(settings.batch_size) < settings.caption_dropout)
        return words[chosen], tokens[chosen].long(), orders, dropped

    def judged() -> dict[str, float]:
        round_matrices(model, out)
        return {"held_out_loss": round(held_out_loss(model, encoder, vq_model), 4)}

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model, encoder])
    return run.run(loss_of, batch, judged)


@torch.no_grad()
def held_out_loss(
    model: LlamaGenAnyOrder, encoder: CaptionEncoder, vq_model: VQModel, count: int = 400
) -> float:
    """Return the cross entropy in nats a token on held-out pictures, each along a random order."""
    words, tokens = tokenize_dataset(vq_model, encoder, count, 777, held_out=True, side=model.grid.width)
    orders = torch.from_numpy(np.random.default_rng(777).random(tuple(tokens.shape)).argsort(1))
    losses = []
    for parts in zip(words.split(20), tokens.long().split(20), orders.split(20), strict=True):
        word_ids, token_ids, order = (part.to(model.device) for part in parts)
        logits = model.teacher_forced_along(token_ids, order, encoder(word_ids))
        losses.append(F.cross_entropy(logits.mT, token_ids.gather(1, order)).item())
    return float(np.mean(losses))


HELP = """Train the embedded any-order model: `python scripts/train any_order --shapes FOLDER --out FOLDER`.

Afterwards `--out` holds the weights, matrices in 8 bits, and `training.json`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    shapes: Path = option("folder with transformer/, vq_model/ and text_encoder/")
    start_from: Path | None = option("folder of an earlier run to go on with", None)


def main() -> None:
    options, settings = read_options(HELP, Options, AnyOrderTraining)
    encoder = CaptionEncoder.from_pretrained(options.shapes / "text_encoder", torch_dtype=torch.float32)
    vq_model = VQModel.from_pretrained(options.shapes / "vq_model", torch_dtype=torch.float32).eval()
    torch.manual_seed(settings.seed)
    folder = options.start_from or options.shapes / "transformer"
    model: Any = LlamaGenTransformer.from_pretrained(folder, torch_dtype=torch.float32)
    if options.start_from is None:
        model = start_from_raster(model)
    for part in (model, encoder, vq_model):
        part.to(options.device)
    record = train_any_order(model, encoder, vq_model, settings, options.out)
    print({key: record[key] for key in ("parameters", "seconds", "held_out_loss")})
