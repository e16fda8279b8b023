"""Train the embedded near-to-far model: FlashAR's second head on a trained raster model (arXiv 2605.09430).

The model starts as the raster model, with a copy of its last blocks after them that leads to the lower head, and a
gate that starts at one half. At first only these learn, then all. The loss is the cross entropy of the merged
prediction, and a little of the lower head's own. A picture is one pass under the order's own mask, so that the networks
see in training what they see in decoding.

FlashAR teaches large models at a twentieth of these rates. Here they are the rates of training itself: the trunk must
get used to another mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.data.shapes import TOUCHING
from visual_spec.files.documents import json_text
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.orders.tables import order_of
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    read_options,
    round_matrices,
    run_trainer,
)
from visual_spec.training.tokens import object_tokens, tokenize_dataset, weighted_cross_entropy

ORDER = "flashar"


@dataclass(frozen=True)
class FlashTraining:
    """Settings of a run. In the first `branch_steps` of `steps` the trunk is frozen.

    `touching` is the share of scenes with one object inside or overlapping another. Tokens of objects weigh
    `object_weight` in the loss, the others 1.
    """

    steps: int = 1500
    branch_steps: int = 150
    batch_size: int = 8
    scenes: int = 12000
    touching: float = TOUCHING
    branch_rate: float = 1e-3
    learning_rate: float = 6e-4
    weight_decay: float = 0.02
    caption_dropout: float = 0.1
    object_weight: float = 1.0
    below_weight: float = 0.05
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


@torch.no_grad()
def start_from_raster(raster: LlamaGenTransformer, branch_layers: int = 1) -> LlamaGenTransformer:
    """Return a model of FlashAR's order with the weights of a raster model, its last blocks and its head copied.

    Raises:
        ValueError: the model was trained for another order, or has fewer blocks.
    """
    layers = raster.config["num_layers"]
    if raster.trained_order != "raster" or not 1 <= branch_layers <= layers:
        raise ValueError(
            f"a model of order {raster.trained_order!r} with {layers} blocks, of which {branch_layers} are to be "
            "copied; pass a raster model, and at least one block and at most all."
        )
    config = {key: value for key, value in raster.config.items() if not key.startswith("_")}
    model = LlamaGenTransformer(**config | {"order": ORDER, "branch_layers": branch_layers})
    weights: dict[str, Tensor] = dict(raster.state_dict())
    for index in range(layers, layers + branch_layers):
        copied = f"layers.{index - branch_layers}."
        for key in [key for key in weights if key.startswith(copied)]:
            weights[key.replace(copied, f"layers.{index}.")] = weights[key]
    weights |= {f"medusa_{name}.weight": weights[f"{name}.weight"] for name in ("norm", "output")}
    gate = {key: value for key, value in model.state_dict().items() if key.startswith("hv_gate_mlp.")}
    model.load_state_dict(weights | gate)
    return model


class Pass:
    """All steps of a near-to-far order as one pass over whole pictures or clips.

    Args:
        model: of order "nar" or "flashar".
        grid: of the pictures or clips; None: the model's own. Shorter clips are drawn in another order than the first
            frames of longer ones, so they only serve as a start.

    Attributes:
        targets: long [P], the slot of each prediction; every slot once.
    """

    def __init__(self, model: LlamaGenTransformer, grid: TokenGrid | None = None) -> None:
        device = model.device
        whole = order_of(model.trained_order, grid or model.grid).joined().to(device)
        first = torch.zeros(1, dtype=torch.long, device=device)
        self.sources, self.seen = whole.sources, whole.seen[:, whole.sources]
        self.targets = torch.cat([first, whole.emitted])
        # Position 0 is the prefix, where all heads predict slot 0.
        rest = whole.answers.where(whole.answers < 0, whole.answers + 1)
        # In one frame of a clip nothing is later.
        rest = F.pad(rest, (0, model.num_answers - rest.shape[1]), value=-1)
        self.answers = torch.cat([first.expand(1, model.num_answers), rest])

    def __call__(
        self,
        model: LlamaGenTransformer,
        tokens: Tensor,
        condition: TextCondition | Tensor,
        dropped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the merged logits [B, P, V] of tokens long [B, L], and the lower head's where it answers."""
        heads = model.teacher_forced_heads(
            tokens[:, self.sources],
            condition,
            slots=self.sources,
            seen=self.seen,
            answers=self.answers,
            dropped=dropped,
        )
        return model.merge(heads, self.answers), heads[1][:, self.answers[:, 1] >= 0]

    def losses(
        self,
        model: LlamaGenTransformer,
        tokens: Tensor,
        condition: TextCondition | Tensor,
        weights: Tensor,
        dropped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the cross entropy in nats a token, of weights [B, L], of the merged prediction and the lower head."""
        merged, below = self(model, tokens, condition, dropped)
        alone = self.targets[self.answers[:, 1] >= 0]
        return (
            weighted_cross_entropy(merged, tokens[:, self.targets], weights[:, self.targets]),
            weighted_cross_entropy(below, tokens[:, alone], weights[:, alone]),
        )


def train_flashar(
    model: LlamaGenTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: FlashTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train in place, on the model's device; round to 8 bits, save in `out`, and return the record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it. The tokens of the scenes are kept in
    `out`.

    Raises:
        ValueError: the model has another order.
    """
    if model.trained_order != ORDER:
        raise ValueError(f"the model has order {model.trained_order!r}; pass one of start_from_raster.")
    torch.manual_seed(settings.seed)
    device = model.device
    words, tokens = tokenize_dataset(
        vq_model, encoder, settings.scenes, settings.seed + 1, cache=out, touching=settings.touching
    )
    weights = 1.0 + (settings.object_weight - 1.0) * object_tokens(words, tokens)
    encoder.eval().requires_grad_(False)
    own = _branch_of(model)
    late_steps = settings.steps - settings.branch_steps
    stages = (
        (own["layers"], own.parameters(), settings.branch_rate, settings.branch_steps),
        (model.layers, model.parameters(), settings.learning_rate, late_steps),
    )
    descents = [
        Descent(muon_and_adamw(blocks, parameters, rate, settings.weight_decay), steps, rate)
        for blocks, parameters, rate, steps in stages
    ]
    forced = Pass(model)

    def loss_of(word_ids: Tensor, token_ids: Tensor, weight: Tensor, dropped: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            merged, below = forced.losses(model, token_ids, encoder(word_ids), weight, dropped)
        return merged + settings.below_weight * below

    def batch(step: int) -> tuple[Tensor, ...]:
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(tokens), size=settings.batch_size))
        dropped = torch.from_numpy(rng.random(settings.batch_size) < settings.caption_dropout)
        return words[chosen], tokens[chosen].long(), weights[chosen], dropped

    def descend(loss: Tensor, step: int) -> None:
        # The first stage leaves the trunk as it is, and its gradients lie there until the second clears them: a
        # compiled loss does not notice that `requires_grad` of a weight has changed.
        late = step >= settings.branch_steps
        descents[late](loss, step - late * settings.branch_steps)

    def judged() -> dict[str, float]:
        round_matrices(model, out)
        return held_out_losses(model, encoder, vq_model)

    parts = {"model": model, "branch": descents[0], "whole": descents[1]}
    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model, encoder], parts=parts)
    return run.run(loss_of, batch, judged)


def _branch_of(model: LlamaGenTransformer) -> torch.nn.ModuleDict:
    """Return what FlashAR adds to a raster model."""
    return torch.nn.ModuleDict(
        {
            "layers": torch.nn.ModuleList(list(model.layers)[model.config["num_layers"] :]),
            "norm": model.medusa_norm,
            "output": model.medusa_output,
            "gate": model.hv_gate_mlp,
        }
    )


@torch.no_grad()
def held_out_losses(
    model: LlamaGenTransformer, encoder: CaptionEncoder, vq_model: VQModel, count: int = 400
) -> dict[str, float]:
    """Return the cross entropy in nats a token on held-out pictures, merged and of the lower head alone."""
    words, tokens = tokenize_dataset(vq_model, encoder, count, 777, held_out=True, side=model.grid.width)
    forced, losses = Pass(model), []
    for word_ids, token_ids in zip(words.split(20), tokens.split(20), strict=True):
        shown = token_ids.long().to(model.device)
        condition = encoder(word_ids.to(model.device))
        losses.append(torch.stack(forced.losses(model, shown, condition, torch.ones_like(shown))))
    merged, below = torch.stack(losses).mean(0).tolist()
    return {"held_out_loss": round(merged, 4), "held_out_loss_below": round(below, 4)}


HELP = """Train the embedded near-to-far model: `python -m visual_spec.training.flashar --shapes FOLDER --out FOLDER`.

It starts from the transformer of `shapes`; tokenizer and caption encoder come from `shapes`, and do not change.
Afterwards `--out` holds the weights, matrices in 8 bits, and `training.json` with the loss curve and held-out losses.
An interrupted run resumes.
"""


@dataclass(kw_only=True)
class FlashAROptions(RunOptions):
    shapes: Path = option("folder with transformer/, vq_model/ and text_encoder/")
    start_from: Path | None = option("folder of an earlier run to go on with, at a new rate", None)
    branch_layers: int = option("blocks that only the lower head reads", 1)


def main() -> None:
    options, settings = read_options(HELP, FlashAROptions, FlashTraining)
    # 32 bits: what is stored in fewer is computed with in these.
    raster = LlamaGenTransformer.from_pretrained(options.shapes / "transformer", torch_dtype=torch.float32)
    encoder = CaptionEncoder.from_pretrained(options.shapes / "text_encoder", torch_dtype=torch.float32)
    vq_model = VQModel.from_pretrained(options.shapes / "vq_model", torch_dtype=torch.float32).eval()
    torch.manual_seed(settings.seed)
    if options.start_from is None:
        model = start_from_raster(raster, options.branch_layers)
    else:
        model = LlamaGenTransformer.from_pretrained(options.start_from, torch_dtype=torch.float32)
    for part in (model, encoder, vq_model):
        part.to(options.device)
    record = train_flashar(model, encoder, vq_model, settings, options.out)
    print(json_text({key: record[key] for key in ("seconds", "held_out_loss", "held_out_loss_below")}))


if __name__ == "__main__":
    run_trainer(main)
