"""Train an any-order LlamaGen, in RandAR's layout or in LPD's (the embedded `shapes_any`), from a model of `shapes`.

Every picture of a step has an order of its own. With instructions (RandAR, arXiv 2412.01827, section 3.2) that is a
random one, and every token is predicted from those before it. With queries (LPD, 2507.01957, section 3.1) the pictures
of a step are cut into the groups of a number of calls, drawn for the step from `CALLS`, and the tokens of a group are
predicted together; a share `locality` of the steps has the order of decoding (section 3.2), the others a random one.
Tokenizer and caption encoder come from `shapes` and do not change. A tenth of the captions is dropped for guidance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.data.shapes import TOUCHING
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_any_order import LlamaGenAnyOrder
from visual_spec.models.next_token.llamagen_blocks import TextCondition
from visual_spec.models.next_token.llamagen_queries import LlamaGenQueries
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.orders.locality import group_sizes, locality_order
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    read_options,
    round_matrices,
)
from visual_spec.training.tokens import object_tokens, tokenize_dataset, weighted_cross_entropy

CALLS = (256, 128, 64, 32, 24, 20, 16, 12, 8)  # of LPD's training, for 256 tokens
REPULSION = 2


@dataclass(frozen=True)
class AnyOrderTraining:
    """Settings of a run.

    `touching` is as in `ar`. Tokens of objects weigh `object_weight` in the loss, the others 1. The last three are of
    queries: the share of steps along locality-aware orders, and the least and most of `CALLS`.
    """

    steps: int = 2000
    batch_size: int = 8
    scenes: int = 12000
    touching: float = TOUCHING
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    caption_dropout: float = 0.1
    object_weight: float = 1.0
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0
    locality: float = 0.0
    least_calls: int = CALLS[-1]
    most_calls: int = CALLS[0]


@torch.no_grad()
def start_from(start: LlamaGenTransformer, order: str) -> LlamaGenAnyOrder:
    """Return a model of an order, "any" or "queries", with the weights of a raster model or of another any-order one.

    A raster model has no instruction; a new one has the scale of its tokens.
    """
    config: dict[str, Any] = {key: value for key, value in start.config.items() if not key.startswith("_")}
    model: Any = LlamaGenTransformer(**dict(config, order=order))
    instruction = torch.randn_like(model.pos_instruct_embeddings) * start.tok_embeddings.weight.std()
    model.load_state_dict({"pos_instruct_embeddings": instruction} | start.state_dict())
    return model


def draw_orders(
    settings: AnyOrderTraining, rng: np.random.Generator, count: int, side: int, queries: bool
) -> tuple[Tensor, Tensor]:
    """Return orders, long `[count, L]`, and the call that draws each of their places, long `[L]`."""
    calls = [number for number in CALLS if settings.least_calls <= number <= settings.most_calls]
    length = side * side
    sizes = group_sizes(length, min(int(rng.choice(calls)), length)) if queries else (1,) * length
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    if rng.random() < settings.locality:
        ties = rng.random((count, len(sizes), length))
        return torch.tensor([locality_order(sizes, side, side, tie, REPULSION) for tie in ties]), groups
    return torch.from_numpy(rng.random((count, length)).argsort(1)), groups


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
    words, tokens = tokenize_dataset(
        vq_model, encoder, settings.scenes, settings.seed + 1, cache=out, touching=settings.touching
    )
    encoder.eval().requires_grad_(False)
    optimisers = muon_and_adamw(
        model.layers, model.parameters(), settings.learning_rate, settings.weight_decay
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    weights = 1.0 + (settings.object_weight - 1.0) * object_tokens(words, tokens)

    def loss_of(
        word_ids: Tensor, token_ids: Tensor, orders: Tensor, groups: Tensor, dropped: Tensor, weight: Tensor
    ) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits = predicted(model, token_ids, orders, groups, encoder(word_ids), dropped)
        return weighted_cross_entropy(logits, token_ids.gather(1, orders), weight.gather(1, orders))

    def batch(step: int) -> tuple[Tensor, ...]:
        rng, count = np.random.default_rng((settings.seed, step)), settings.batch_size
        chosen = torch.from_numpy(rng.integers(len(tokens), size=count))
        orders = draw_orders(settings, rng, count, model.grid.width, isinstance(model, LlamaGenQueries))
        dropped = torch.from_numpy(rng.random(count) < settings.caption_dropout)
        return words[chosen], tokens[chosen].long(), *orders, dropped, weights[chosen]

    def judged() -> dict[str, float]:
        round_matrices(model, out)
        return {"held_out_loss": round(held_out_loss(model, encoder, vq_model, settings), 4)}

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model, encoder])
    return run.run(loss_of, batch, judged)


def predicted(
    model: LlamaGenAnyOrder,
    tokens: Tensor,
    orders: Tensor,
    groups: Tensor,
    condition: TextCondition,
    dropped: Tensor | None = None,
) -> Tensor:
    """Return logits `[B, L, V]` of `tokens [B, L]` along `orders [B, L]`, of queries in `groups [L]`."""
    if isinstance(model, LlamaGenQueries):
        return model.teacher_forced_in_groups(tokens, orders, groups, condition, dropped)
    return model.teacher_forced_along(tokens, orders, condition, dropped)


@torch.no_grad()
def held_out_loss(
    model: LlamaGenAnyOrder,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: AnyOrderTraining,
    count: int = 400,
) -> float:
    """Return the cross entropy in nats a token on held-out pictures, along orders of the settings."""
    side, rng = model.grid.width, np.random.default_rng(777)
    words, tokens = tokenize_dataset(vq_model, encoder, count, 777, held_out=True, side=side)
    losses = []
    for parts in zip(words.split(20), tokens.long().split(20), strict=True):
        word_ids, token_ids = (part.to(model.device) for part in parts)
        drawn = draw_orders(settings, rng, len(word_ids), side, isinstance(model, LlamaGenQueries))
        order, groups = (part.to(model.device) for part in drawn)
        logits = predicted(model, token_ids, order, groups, encoder(word_ids))
        losses.append(F.cross_entropy(logits.mT, token_ids.gather(1, order)).item())
    return float(np.mean(losses))


HELP = """Train an any-order model: `python scripts/train any_order --shapes FOLDER --out FOLDER`.

With `--order queries` it has LPD's position queries, else RandAR's instructions.

Afterwards `--out` holds the weights, matrices in 8 bits, and `training.json`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    shapes: Path = option("folder with transformer/, vq_model/ and text_encoder/")
    order: Literal["any", "queries"] = option("RandAR's instructions, or LPD's queries", "any")
    start_from: Path | None = option("folder of an earlier run to go on with", None)


def main() -> None:
    options, settings = read_options(HELP, Options, AnyOrderTraining)
    encoder = CaptionEncoder.from_pretrained(options.shapes / "text_encoder", torch_dtype=torch.float32)
    vq_model = VQModel.from_pretrained(options.shapes / "vq_model", torch_dtype=torch.float32).eval()
    torch.manual_seed(settings.seed)
    folder = options.start_from or options.shapes / "transformer"
    model = start_from(LlamaGenTransformer.from_pretrained(folder, torch_dtype=torch.float32), options.order)
    for part in (model, encoder, vq_model):
        part.to(options.device)
    record = train_any_order(model, encoder, vq_model, settings, options.out)
    print({key: record[key] for key in ("parameters", "seconds", "held_out_loss")})
