"""Train the embedded `shapes_shuffle`: a LlamaGen with Token-Shuffle, from the transformer of `shapes`.

Token-Shuffle (arXiv 2504.17789) merges 2 x 2 tokens to a position. Its MLPs are new. The transformer itself has the
weights of `shapes` plus changes of low rank, so that the folder holds little (`visual_spec.models.core.low_rank`).
Tokenizer and caption encoder come from `shapes` and do not change. A tenth of the captions is dropped for guidance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from visual_spec.files.documents import write_json
from visual_spec.models.core.low_rank import ADAPTER, DOWN, UP
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_shuffle import LlamaGenShuffle, MLPBlock
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    option,
    read_options,
)
from visual_spec.training.tokens import tokenize_dataset

SHARED = ("cls_embedding", "tok_embeddings", "output")  # parts that stay as they are in `shapes`
_LINEAR = 0.1  # of the first layer of an MLP that starts linear: gelu(0.1 x) is nearly 0.05 x


@dataclass(frozen=True)
class ShuffleTraining:
    """Settings of a run."""

    steps: int = 4000
    batch_size: int = 16
    scenes: int = 20000
    learning_rate: float = 2e-3
    rank: int = 28
    caption_dropout: float = 0.1
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


@torch.no_grad()
def start_from_raster(raster: LlamaGenTransformer, rank: int, order: str = "blocks2") -> LlamaGenShuffle:
    """Return a model with the weights of a raster model, which do not train, and changes of low rank, which do.

    The MLPs start linear. The transformer reads the mean of the tokens of a block, in their main channels, and their
    differences in the other channels. All tokens of the next block start from the raster model's next token.
    """
    config: dict[str, Any] = {key: value for key, value in raster.config.items() if not key.startswith("_")}
    model: Any = LlamaGenTransformer(**dict(config, order=order))
    model.load_state_dict(raster.state_dict(), strict=False)
    count, dim = model.block_size, config["dim"]
    channels = torch.linalg.svd(raster.tok_embeddings.weight, full_matrices=False).Vh  # [dim, dim]
    signs = torch.linalg.qr(torch.cat([torch.ones(count, 1), torch.eye(count)[:, 1:]], 1)).Q.T  # [K, K], rows
    signs = signs * signs[:, :1].sign() * count**-0.5  # the first row takes the mean
    model.compress.weight.copy_(channels[: dim // count])
    parts = channels.unflatten(0, (count, -1))  # [K, dim / K, dim]
    _start_linear(model.shuffle, torch.einsum("kr,kci->irc", signs, parts).flatten(1))
    heads = torch.linalg.svd(raster.output.weight, full_matrices=False).Vh[: dim // count]
    model.expand.weight.copy_(heads.T)
    _start_linear(model.unshuffle, heads.repeat(count, 1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(SHARED))
    add_changes(model.layers, rank)
    return model


class LowRank(nn.Module):
    """The parametrization of a matrix that stays as it is, plus `up [out, rank] @ down [rank, in]`, zero at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.up = nn.Parameter(weight.new_zeros(len(weight), rank))
        self.down = nn.Parameter(
            torch.randn(rank, weight.shape[1], dtype=weight.dtype) * weight.shape[1] ** -0.5
        )

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_changes(blocks: nn.Module, rank: int) -> None:
    """Give the matrices of `blocks` changes of low rank, which train in their place."""
    for layer in [part for part in blocks.modules() if isinstance(part, nn.Linear)]:
        layer.weight.requires_grad_(False)
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))


def merge_changes(model: nn.Module) -> None:
    """Make the changed matrices plain ones."""
    for layer in [part for part in model.modules() if parametrize.is_parametrized(part)]:
        parametrize.remove_parametrizations(layer, "weight")


def _start_linear(blocks: nn.Sequential, matrix: Tensor) -> None:
    """Start MLPs so that together they multiply by about `matrix [dim, dim]`."""
    first, *others = blocks
    assert isinstance(first, MLPBlock)
    unit = torch.eye(len(matrix))
    first.fc1.weight.copy_(_LINEAR * unit)
    first.fc2.weight.copy_((matrix - unit) * 2 / _LINEAR)
    for block in others:
        assert isinstance(block, MLPBlock)
        block.fc2.weight.zero_()
        nn.init.normal_(block.fc1.weight, std=len(matrix) ** -0.5)


@torch.no_grad()
def save_changes(
    model: Any, out: Path, adapts: str = "shapes/transformer", *, inside: str = "", also: Sequence[str] = ()
) -> None:
    """Round what has been trained, vectors to 16 bits and all else to 8 (e4m3), in place, and store it in `out`.

    Args:
        adapts, inside: the folder of the model that is changed, and how the names of its weights begin in `model`.
        also: weights to store that were not trained.
    """
    parts = {}
    for name, value in model.named_parameters():
        if value.requires_grad or name in also:
            rounded = value.to(torch.float8_e4m3fn if value.ndim > 1 else torch.float16).contiguous()
            value.copy_(rounded)
            parts[_stored_name(name)] = rounded
    out.mkdir(parents=True, exist_ok=True)
    model.save_config(out)
    config = json.loads((out / "config.json").read_text())
    config.pop("_name_or_path", None)
    write_json(out / "config.json", config)
    write_json(out / ADAPTER, {"adapts": adapts, **({"inside": inside} if inside else {})})
    save_file(parts, out / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


@torch.no_grad()
def load_changes(model: Any, folder: Path) -> None:
    """Start from what `save_changes` stored in `folder`, be it of a run from other weights of `shapes`."""
    stored = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(stored[_stored_name(name)])


def _stored_name(name: str) -> str:
    return name.replace("parametrizations.weight.0.up", f"weight{UP}").replace(
        "parametrizations.weight.0.down", f"weight{DOWN}"
    )


def train_shuffle(
    model: LlamaGenShuffle,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: ShuffleTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train in place, on the model's device; save the changes in `out`, and return the record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it. The tokens of the scenes are kept in
    `out`.
    """
    torch.manual_seed(settings.seed)
    words, tokens = tokenize_dataset(vq_model, encoder, settings.scenes, settings.seed + 1, cache=out)
    encoder.eval().requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    descend = Descent([optimiser], settings.steps, settings.learning_rate)
    order = model.block_slots().flatten()

    def loss_of(word_ids: Tensor, token_ids: Tensor, dropped: Tensor) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits = model.teacher_forced(token_ids, encoder(word_ids), dropped)
        return F.cross_entropy(logits.flatten(0, 1), token_ids[:, order].flatten())

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(tokens), size=settings.batch_size))
        dropped = torch.from_numpy(rng.random(settings.batch_size) < settings.caption_dropout)
        return words[chosen], tokens[chosen].long(), dropped

    def judged() -> dict[str, float]:
        save_changes(model, out)
        return {"held_out_loss": round(held_out_loss(model, encoder, vq_model), 4)}

    run = Trainer(
        model, settings, out, descend, every=every, reads=[vq_model, encoder], curve_every=50, digits=3
    )
    record = run.run(loss_of, batch, judged)
    merge_changes(model)
    return record


@torch.no_grad()
def held_out_loss(
    model: LlamaGenShuffle, encoder: CaptionEncoder, vq_model: VQModel, count: int = 400
) -> float:
    """Return the cross entropy in nats a token on held-out pictures."""
    words, tokens = tokenize_dataset(vq_model, encoder, count, 777, held_out=True, side=model.grid.width)
    order, losses = model.block_slots().flatten(), []
    for parts in zip(words.split(20), tokens.long().split(20), strict=True):
        word_ids, token_ids = (part.to(model.device) for part in parts)
        logits = model.teacher_forced(token_ids, encoder(word_ids))
        losses.append(F.cross_entropy(logits.flatten(0, 1), token_ids[:, order].flatten()).item())
    return float(np.mean(losses))


HELP = """Train the embedded model of Token-Shuffle: `python scripts/train shuffle --shapes FOLDER --out FOLDER`.

Afterwards `--out` holds what differs from the transformer of `shapes`, matrices in 8 bits, and `training.json`. To be
loaded its parent has to lie beside the folder `shapes`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    shapes: Path = option("folder with transformer/, vq_model/ and text_encoder/")
    start_from: Path | None = option("folder that an earlier run wrote, to start from its changes", None)


def main() -> None:
    options, settings = read_options(HELP, Options, ShuffleTraining)
    encoder = CaptionEncoder.from_pretrained(options.shapes / "text_encoder", torch_dtype=torch.float32)
    vq_model = VQModel.from_pretrained(options.shapes / "vq_model", torch_dtype=torch.float32).eval()
    torch.manual_seed(settings.seed)
    raster: Any = LlamaGenTransformer.from_pretrained(
        options.shapes / "transformer", torch_dtype=torch.float32
    )
    model = start_from_raster(raster, settings.rank)
    if options.start_from is not None:
        load_changes(model, options.start_from)
    for part in (model, encoder, vq_model):
        part.to(options.device)
    record = train_shuffle(model, encoder, vq_model, settings, options.out)
    print({key: record[key] for key in ("parameters", "seconds", "held_out_loss")})
