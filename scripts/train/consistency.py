"""Train a LlamaGen for Jacobi decoding, in the manner of CLLM (arXiv 2403.00835), on its own Jacobi trajectories.

The law of the model changes: what comes out is another model, whose own law Jacobi decoding keeps.

First the model decodes captions by `SpeculativeJacobiSampler` under its own law, guidance included. The noise of a slot
is fixed by the seed, so sampled decoding has a fixed point as greedy decoding has: the picture that plain decoding
draws. A state of the trajectory is what one call reads: committed tokens and, after them, a window of drafts.

Every step takes some states of some pictures. With p the law of a slot (guided, at the temperature of decoding), q the
same of the model before training, x the fixed point and y a state, the loss is

    ar_weight * mean cross entropy of p(. | x) to q(. | x)  +  mean cross entropy of p(. | y) to p(. | x), held fixed.

The first mean is over all slots of the pictures. The second is over slots of windows after the first wrong draft: at
earlier ones both laws are equal. Both come from one pass: the picture, and windows that see the picture before them.

As in the public code (hao-ai-lab/Consistency_LLM) the first term weighs 10, the law at the fixed point in the second is
the trained model's own, and a state is any but the last. There decoding is greedy, so the loss takes plain laws, and
labels of the first term are the model's tokens, smoothed. Here they are the law that a token is drawn from: the same on
average, without the noise of draws; smoothing would flatten what is sampled. There a window is a block, redrawn until
none of its tokens changes; here it slides, as in decoding.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visual_spec.data.shapes import caption, held_out_prompts, is_held_out, sample_scene
from visual_spec.models.core.checkpoints import read_written, write_content
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.training.loop import Descent, RunOptions, Trainer, muon_and_adamw, option, read_options

_SHARD = 32  # pictures in a file of trajectories


@dataclass(frozen=True)
class ConsistencyTraining:
    """Settings of a run.

    Attributes:
        batch_size: pictures in a step, each with so many `states`.
        pictures: that are decoded beforehand, with so many slots in the `window`.
        consistency_weight: 0 leaves the first term only.
    """

    steps: int = 400
    batch_size: int = 8
    states: int = 8
    pictures: int = 1024
    window: int = 32
    ar_weight: float = 10.0
    consistency_weight: float = 1.0
    learning_rate: float = 5e-4
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


@dataclass
class Trajectories:
    """Decodes of N pictures, of J calls at most.

    Attributes:
        words: long [N, T], of the captions.
        tokens: int16 [N, L], the fixed points.
        calls: long [N], calls that read drafts.
        starts: int16 [N, J], the slot of the first draft.
        drafts: int16 [N, J, W - 1].
    """

    words: Tensor
    tokens: Tensor
    calls: Tensor
    starts: Tensor
    drafts: Tensor


@torch.no_grad()
def record(
    model: LlamaGenTransformer,
    encoder: CaptionEncoder,
    captions: list[str],
    law: TokenLaw,
    window: int,
    seed: int,
) -> Trajectories:
    """Decode captions one by one, with seeds from `seed` on, and return what each call read."""
    sampler, words, decodes = (
        SpeculativeJacobiSampler(window, drafts="carried"),
        encoder.word_ids(captions),
        [],
    )
    for number, ids in enumerate(words.split(1)):
        calls: list[tuple[Tensor, Tensor]] = []
        hook = model.register_forward_hook(lambda _, read, made: calls.append((read[1][0], read[2][0])))  # noqa: B023
        generator = torch.Generator().manual_seed(seed + number)
        try:
            result = sampler(model, encoder(ids), law=law, generator=generator, batch_size=1)
        finally:
            hook.remove()
        tokens, slots = (torch.stack(part).to("cpu", torch.int16) for part in zip(*calls, strict=True))
        decodes.append((result.tokens[0].to("cpu", torch.int16), slots[:, 1], tokens[:, 1:]))
    fixed, starts, drafts = zip(*decodes, strict=True)
    padded = [torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in (starts, drafts)]
    return Trajectories(
        words.cpu(), torch.stack(fixed), torch.tensor([len(part) for part in starts]), *padded
    )


def collected(
    model: LlamaGenTransformer,
    encoder: CaptionEncoder,
    law: TokenLaw,
    settings: ConsistencyTraining,
    out: Path,
) -> list[Trajectories]:
    """Trajectories of a run, kept in `out` in files of 32 pictures: a later call makes only missing files."""
    rng, shards = np.random.default_rng(settings.seed + 1), []
    owner = f"{fingerprint([model, encoder])} {law} {settings.window} {settings.seed}"
    for first in range(0, settings.pictures, _SHARD):
        captions: list[str] = []
        while len(captions) < _SHARD:
            text = caption(sample_scene(rng))
            captions += [] if is_held_out(text) else [text]
        path = out / f"trajectories_{first}.pt"
        saved = read_written(path) if path.exists() else {}
        if saved.get("owner") != owner:
            seed = (settings.seed << 32) + first
            shard = record(model, encoder, captions, law, settings.window, seed)
            out.mkdir(parents=True, exist_ok=True)
            saved = {"owner": owner, **vars(shard)}
            write_content(path, saved)
            print(
                f"{first + _SHARD} pictures, {shard.tokens.numel() / int(shard.calls.sum()):.2f} tokens a call",
                flush=True,
            )
        shards.append(Trajectories(**{name: part for name, part in saved.items() if name != "owner"}))
    return shards


def laws_of(
    model: LlamaGenTransformer,
    condition: TextCondition,
    law: TokenLaw,
    tokens: Tensor,
    slots: Tensor,
    seen: Tensor,
) -> Tensor:
    """Return log-probabilities [B, 1 + N, V]: of slot 0, and of the slots after `tokens`; see `forced`."""
    rows = 2 if law.guided else 1
    many = TextCondition(condition.features.repeat(rows, 1, 1), condition.mask.repeat(rows, 1))
    dropped = torch.arange(rows, device=tokens.device).repeat_interleave(len(tokens)) == 1
    parts = tokens.repeat(rows, 1), slots.repeat(rows, 1), seen.repeat(rows, 1, 1)
    hidden = model.forced(*parts, many, dropped)
    return law(model.logits(model.norm(hidden), hidden, None), law.guided)


def consistency_losses(
    model: LlamaGenTransformer,
    target: LlamaGenTransformer,
    condition: TextCondition,
    law: TokenLaw,
    tokens: Tensor,
    starts: Tensor,
    drafts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the loss at the fixed points and the consistency loss, in nats a token. Gradients reach `model` only.

    Args:
        target: the model before training.
        condition: of B captions.
        tokens: long [B, L], fixed points.
        starts: long [B, S], the slots of the first drafts of states.
        drafts: long [B, S, N]; those past the grid do not count.
    """
    (batch, length), (_, states, width) = tokens.shape, drafts.shape
    places = starts[..., None] + torch.arange(width, device=tokens.device)  # [B, S, N]
    fixed = torch.arange(length - 1, device=tokens.device).expand(batch, -1)
    slots = torch.cat([fixed, places.flatten(1)], 1)  # [B, P]
    first = torch.cat([fixed, starts.repeat_interleave(width, 1)], 1)  # fixed tokens before it are seen
    window = torch.arange(1, states + 1, device=tokens.device).repeat_interleave(width)
    part = torch.cat([torch.zeros_like(fixed[0]), window])  # [P], 0: the fixed point
    within = (part[:, None] == part) & (slots[:, :, None] >= slots[:, None])
    seen = within | ((part == 0) & (slots[:, None] < first[:, :, None]))
    fed = torch.cat([tokens[:, :-1], drafts.flatten(1)], 1)
    laws = laws_of(model, condition, law, fed, slots.clamp(max=length - 1), seen)  # [B, 1 + P, V]
    final, reached = laws[:, :length], laws[:, length:].unflatten(1, (states, width))
    with torch.no_grad():
        before = laws_of(target, condition, law, tokens[:, :-1], fixed, within[:, : length - 1, : length - 1])
    rows = torch.arange(batch, device=tokens.device)[:, None, None]
    wrong = drafts != tokens[rows, places.clamp(max=length - 1)]
    counted = wrong.cummax(-1).values & (places + 1 < length)
    aim = final.detach()[rows, (places + 1).clamp(max=length - 1)]  # [B, S, N, V]
    consistency = (cross_entropy(aim, reached) * counted).sum() / counted.sum().clamp(min=1)
    return cross_entropy(before, final).mean(), consistency


def cross_entropy(law: Tensor, other: Tensor) -> Tensor:
    """Of log-probabilities `[..., V]`: nats that `other` needs for tokens of `law`."""
    return -(law.exp() * other).sum(-1)


def train_consistency(
    model: LlamaGenTransformer,
    encoder: CaptionEncoder,
    law: TokenLaw,
    settings: ConsistencyTraining,
    out: Path,
    *,
    every: int = 20,
) -> dict[str, Any]:
    """Train in place, save the model in `out/transformer`, and return the record.

    An interrupted run resumes from `out/resume.pt`, and keeps the trajectories that it has.

    Raises:
        ValueError: the law takes all mass from tokens.
    """
    check_law(law)
    encoder.eval().requires_grad_(False)
    shards = collected(model.eval(), encoder, law, settings, out)
    target = deepcopy(model).requires_grad_(False)
    optimisers = muon_and_adamw(model.layers, model.parameters(), settings.learning_rate, 0.0)
    warmup = min(20, settings.steps)
    descend = Descent(optimisers, settings.steps, settings.learning_rate, warmup=warmup)

    def loss_of(words: Tensor, tokens: Tensor, starts: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            parts = law, tokens, starts, drafts
            ar_loss, consistency = consistency_losses(model, target, encoder(words), *parts)
        return settings.ar_weight * ar_loss + settings.consistency_weight * consistency, consistency

    def batch(step: int) -> tuple[Tensor, ...]:
        rng, parts = np.random.default_rng((settings.seed, step)), []
        for _ in range(settings.batch_size):
            shard, row = shards[rng.integers(len(shards))], int(rng.integers(_SHARD))
            states = torch.from_numpy(rng.integers(int(shard.calls[row]), size=settings.states))
            parts.append(
                (shard.words[row], shard.tokens[row], shard.starts[row, states], shard.drafts[row, states])
            )
        return tuple(torch.stack(part).long() for part in zip(*parts, strict=True))

    def judged() -> dict[str, float]:
        decodes = record(model, encoder, held_out_prompts(16), law, settings.window, 777)
        return {"tokens_a_call": round(decodes.tokens.numel() / int(decodes.calls.sum() + 16), 3)}

    run = Trainer(model, settings, out, descend, every=every, reads=[encoder, target])
    return run.run(loss_of, batch, judged, lambda: model.save_pretrained(out / "transformer"))


def check_law(law: TokenLaw) -> None:
    """Refuse a law that takes all mass from some tokens: the cross entropy would be infinite.

    Raises:
        ValueError: as above.
    """
    if law.temperature == 0 or law.top_k or law.top_p < 1 or law.allowed or law.reads_text:
        raise ValueError(f"{law} takes all mass from some tokens; train with temperature and guidance only.")


HELP = """Train a LlamaGen of `shapes` for Jacobi decoding, in the manner of CLLM.

`python scripts/train consistency --out FOLDER`

The model first decodes its own trajectories, under the default law of its pipeline. Afterwards `--out` holds
`transformer/`, which takes the place of the one in the pipeline's folder, and `training.json`.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    model: str = option("embedded name or folder of an image pipeline", "shapes")


def main() -> None:
    options, settings = read_options(HELP, Options, ConsistencyTraining)
    pipe = load_pipeline(options.model)
    pipe.to(options.device)
    figures = train_consistency(pipe.transformer, pipe.text_encoder, pipe.make_law(), settings, options.out)
    print({name: figures[name] for name in ("parameters", "tokens_a_call", "seconds")})
