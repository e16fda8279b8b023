"""Train the embedded student: from noise to all tokens of a picture in one call or two (arXiv 2412.17153, section 3).

Distilled Decoding 1. The teacher draws pictures first, each token by the flow that leads its noise there
(`visual_spec.training.distilled_pairs`). The student starts with the teacher's weights. It reads the noise of every
slot, in half of the pictures after a few tokens that are given, and learns the tokens of all others.

The loss is the cross entropy through the teacher's head, and a squared distance between the code that the student
expects and the code of the token. In the paper this second term trains the slots whose tokens are no codes; here all
are, and it tells a near code from a far one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.files.documents import json_text
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.prototype.students.llamagen import LlamaGenStudent
from visual_spec.training.distilled_pairs import PairDrawing, Pairs, drawn_pairs
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


@dataclass(frozen=True)
class DistilledTraining:
    """Settings of a run.

    Attributes:
        checked: pictures, the last of those drawn, that are not learned from; `record["unseen"]` is their loss.
        given_tokens: share of pictures of which the first tokens are given, any number of them.
        vector_weight: of the squared distance between codes.
    """

    steps: int = 2400
    batch_size: int = 16
    checked: int = 128
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.02
    given_tokens: float = 0.5
    vector_weight: float = 1.0
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


@torch.no_grad()
def start_from_teacher(teacher: LlamaGenTransformer, codes: Tensor, restart: int) -> LlamaGenStudent:
    """Return a student of a text-conditional raster model, with its weights where the student has them too.

    The student reads vectors, where the teacher reads ids: its first layer starts as the linear map of codes that comes
    nearest to the teacher's embeddings.

    Args:
        codes: [V, D], of the tokenizer.
        restart: see `LlamaGenStudent`.

    Raises:
        ValueError: the teacher draws classes, or was trained for another order.
    """
    config = teacher.config
    if config["caption_dim"] is None or teacher.trained_order != "raster":
        raise ValueError(
            f"a teacher of order {teacher.trained_order!r} with caption_dim={config['caption_dim']}; pass a raster "
            "model that draws from captions."
        )
    shared = ("vocab_size", "dim", "num_layers", "num_heads", "grid_size", "norm_eps", "caption_dim")
    student = LlamaGenStudent(
        token_dim=codes.shape[1],
        num_classes=None,
        first_continuous=teacher.grid.num_tokens,
        restart=restart,
        prefix_length=config["prefix_length"],
        zero_prefix_keys=config["zero_prefix_keys"],
        **{name: config[name] for name in shared},
    )
    weights = dict(teacher.state_dict())
    embeddings = weights.pop("tok_embeddings.weight")  # [V, dim]
    ones = torch.cat([codes, torch.ones_like(codes[:, :1])], 1).to(embeddings)
    fitted = torch.linalg.lstsq(ones, embeddings).solution  # [D + 1, dim]
    weights |= {"tok_embeddings.weight": fitted[:-1].T, "tok_embeddings.bias": fitted[-1]}
    weights["n_d_embed.weight"] = 0.02 * torch.randn_like(student.n_d_embed.weight)
    student.load_state_dict(weights)
    return student


class Batches:
    """What each step learns from.

    Args:
        pairs: of the teacher.
        codes: [V, D].
    """

    def __init__(self, pairs: Pairs, codes: Tensor, settings: DistilledTraining) -> None:
        self.pairs, self.codes, self.settings = pairs, codes.cpu(), settings

    def __call__(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Words, vectors, tokens and known of a step, the same for the same seed."""
        rng, count = np.random.default_rng((self.settings.seed, step)), self.settings.batch_size
        chosen = torch.from_numpy(rng.integers(len(self.pairs.tokens), size=count))
        length = self.pairs.tokens.shape[1]
        known = rng.integers(1, length, size=count) * (rng.random(count) < self.settings.given_tokens)
        which = rng.integers(self.pairs.noise.shape[1], size=(count, length))
        return self.of(chosen, torch.from_numpy(which), torch.from_numpy(known))

    def of(self, chosen: Tensor, which: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Words [B, T], vectors [B, L, D], tokens [B, L] and known [B] of chosen pictures.

        Args:
            chosen: long [B].
            which: long [B, L], the noise of each slot.
            known: long [B], how many of the first tokens are given; their codes take the place of noise.
        """
        words, tokens = self.pairs.words[chosen], self.pairs.tokens[chosen].long()
        slots = torch.arange(tokens.shape[1])
        noise = self.pairs.noise[chosen[:, None], which, slots].float()  # [B, L, D]
        is_known = slots < known[:, None]
        return words, self.codes[tokens].where(is_known[..., None], noise), tokens, known


def loss_of(
    model: LlamaGenStudent,
    encoder: CaptionEncoder,
    codes: Tensor,
    vector_weight: float,
    words: Tensor,
    vectors: Tensor,
    tokens: Tensor,
    known: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch and its cross entropy, in nats a token, over the slots that are not given."""
    logits = model.teacher_forced(vectors, encoder(words), known)  # [B, L, V]
    asked = (torch.arange(tokens.shape[1], device=tokens.device) >= known[:, None]).to(logits.dtype)
    apart = F.cross_entropy(logits.mT, tokens, reduction="none")
    expected = logits.softmax(-1) @ codes.to(logits.dtype)  # [B, L, D]
    distance = (expected - codes[tokens].to(logits.dtype)).square().sum(-1)
    entropy = (apart * asked).sum() / asked.sum()
    return entropy + vector_weight * (distance * asked).sum() / asked.sum(), entropy


def train_distilled(
    model: LlamaGenStudent,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    pairs: Pairs,
    settings: DistilledTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train in place, on the model's device; round to 8 bits, save in `out`, and return the record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.

    Raises:
        ValueError: so many pictures are kept for the check that none is left.
    """
    learned = len(pairs.tokens) - settings.checked
    if learned < 1:
        raise ValueError(f"{len(pairs.tokens)} pictures, of which {settings.checked} are checked; draw more.")
    torch.manual_seed(settings.seed)
    device = model.device
    codes = vq_model.quantize.codes.detach().to(device)
    batches = Batches(Pairs(*(part[:learned] for part in pairs)), codes, settings)
    encoder.eval().requires_grad_(False)
    optimisers = muon_and_adamw(
        model.layers, model.parameters(), settings.learning_rate, settings.weight_decay
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    run = Trainer(
        model,
        settings,
        out,
        descend,
        every=every,
        reads=[vq_model, encoder],
        facts={"pictures": len(pairs.tokens)},
    )

    def losses(*batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            return loss_of(model, encoder, codes, settings.vector_weight, *batch)

    def judged() -> dict[str, object]:
        round_matrices(model, out)
        checked = Pairs(*(part[learned:] for part in pairs))
        figures = unseen(model, encoder, codes, checked, settings)
        return {"pictures": len(pairs.tokens), "unseen": figures}

    return run.run(losses, batches, judged)


@torch.no_grad()
def unseen(
    model: LlamaGenStudent, encoder: CaptionEncoder, codes: Tensor, pairs: Pairs, settings: DistilledTraining
) -> dict[str, float]:
    """The cross entropy in nats a token, and the share of tokens that are the teacher's, by the tokens given."""
    batches, figures = Batches(pairs, codes, settings), {}
    for start in (0, model.restart):
        sums = np.zeros(2)
        for chosen in torch.arange(len(pairs.tokens)).split(settings.batch_size):
            which = torch.zeros(len(chosen), pairs.tokens.shape[1], dtype=torch.long)
            words, vectors, tokens, known = (
                part.to(model.device) for part in batches.of(chosen, which, torch.full_like(chosen, start))
            )
            logits = model.teacher_forced(vectors, encoder(words), known)[:, start:]
            entropy = F.cross_entropy(logits.mT, tokens[:, start:], reduction="none").mean(-1).sum()
            right = (logits.argmax(-1) == tokens[:, start:]).float().mean(-1).sum()
            sums += [entropy.item(), right.item()]
        entropy, right = sums / max(1, len(pairs.tokens))
        figures |= {f"loss_from_{start}": round(entropy, 4), f"right_from_{start}": round(right, 4)}
    return figures


HELP = """Train the embedded student: `python -m visual_spec.training.distilled --shapes FOLDER --out FOLDER`.

The transformer of `shapes` is its teacher, and draws pictures of training captions first. Tokenizer and caption encoder
come from `shapes`, and do not change. Afterwards `--out` holds the weights, matrices in 8 bits, and `training.json`
with the loss curve and the losses of pictures that were not learned from. An interrupted run resumes, also between two
pictures.
"""


@dataclass(kw_only=True)
class DistilledOptions(RunOptions):
    writes = ("out", "pairs")

    shapes: Path = option("folder with transformer/, vq_model/ and text_encoder/")
    pairs: Path | None = option("folder of the teacher's pictures (default: --out)", None)
    start_from: Path | None = option("folder of an earlier run to go on with, at a new rate", None)
    restart: int = option("the first slot of a second call", 128)
    pictures: int = option("that the teacher draws", PairDrawing.pictures)
    guidance_scale: float = option("of the teacher", PairDrawing.guidance_scale)


def main() -> None:
    options, settings = read_options(HELP, DistilledOptions, DistilledTraining)
    # 32 bits: what is stored in fewer is computed with in these.
    teacher = LlamaGenTransformer.from_pretrained(options.shapes / "transformer", torch_dtype=torch.float32)
    encoder = CaptionEncoder.from_pretrained(options.shapes / "text_encoder", torch_dtype=torch.float32)
    vq_model = VQModel.from_pretrained(options.shapes / "vq_model", torch_dtype=torch.float32)
    for part in (teacher, encoder, vq_model):
        part.eval().to(options.device)
    drawing = PairDrawing(pictures=options.pictures, guidance_scale=options.guidance_scale)
    pairs = drawn_pairs(teacher, encoder, vq_model, drawing, options.pairs or options.out)
    torch.manual_seed(settings.seed)
    if options.start_from is None:
        model = start_from_teacher(teacher, vq_model.quantize.codes.detach(), options.restart)
    else:
        model = LlamaGenStudent.from_pretrained(options.start_from, torch_dtype=torch.float32)
    model.to(options.device)
    record = train_distilled(model, encoder, vq_model, pairs, settings, options.out)
    print(json_text({key: record[key] for key in ("seconds", "unseen")}))


if __name__ == "__main__":
    run_trainer(main)
