"""Train the shortcut of a masked model of pictures, on features that the model has while it decodes.

At first some captions are decoded by the model's own sampler with all calls full, and tokens and features of each call
are noted. Then every step takes some pairs of neighbouring calls, and the shortcut learns to make the features of a
call from the features of the call before (mean squared error, one call ahead, as in MIGM-Shortcut, 2602.23996). Its
figure of merit is the error that is left, as a share of the error of the last features as they are. Matrices are stored
in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visual_spec.data.shapes import caption, held_out_prompts, is_held_out, sample_scene
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.reuse.shortcut import FeatureShortcut
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.training.loop import Descent, RunOptions, Trainer, option, read_options, round_matrices

_DECODED = 8  # pictures that are decoded together


@dataclass(frozen=True)
class ShortcutTraining:
    """Settings of a run.

    Attributes:
        pictures: that are decoded, each in so many `calls`.
        batch_size: pairs of calls in a step.
    """

    steps: int = 600
    batch_size: int = 32
    pictures: int = 96
    calls: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    guidance_scale: float = 2.0
    seed: int = 0


@dataclass
class Transitions:
    """What stands before and after each pair of neighbouring calls, rows of all pairs one after the other.

    Attributes:
        before, after: features [N, L, C].
        tokens, newest, share: what `FeatureShortcut` reads, [N, L], [N, L] and [N].
    """

    before: Tensor
    after: Tensor
    tokens: Tensor
    newest: Tensor
    share: Tensor

    def rows(self, index: Tensor) -> Transitions:
        """Some of the pairs, long [n]."""
        return Transitions(*(getattr(self, field.name)[index] for field in fields(self)))


class Recorder(nn.Module):
    """A masked model that notes tokens and features of its calls, for both rows of a guided batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.grid = model, model.grid
        self.vocab_size, self.mask_id, self.prepare = model.vocab_size, model.mask_id, model.prepare
        self.calls: list[tuple[Tensor, Tensor]] = []

    def forward(self, state: Any, tokens: Tensor, stage: int = 0) -> Tensor:
        logits = self.model(state, tokens, stage, keep=0)
        repeats = len(state.features) // len(tokens)
        self.calls.append((tokens[..., 0].repeat(repeats, 1), state.features.clone()))
        return logits

    def transitions(self) -> Transitions:
        """All pairs of neighbouring calls that were noted."""
        pairs = list(zip(self.calls, self.calls[1:], strict=False))
        hidden = [(earlier == self.mask_id, later == self.mask_id) for (earlier, _), (later, _) in pairs]
        return Transitions(
            before=torch.cat([features for (_, features), _ in pairs]),
            after=torch.cat([features for _, (_, features) in pairs]),
            tokens=torch.cat([later for _, (later, _) in pairs]),
            newest=torch.cat([was & ~still for was, still in hidden]),
            share=torch.cat([still.float().mean(1) for _, still in hidden]),
        )


def new_shortcut(model: Any, dim: int | None = None, num_heads: int = 4) -> FeatureShortcut:
    """A fresh shortcut for a model."""
    return FeatureShortcut(model.feature_dim, model.vocab_size, model.grid.num_tokens, dim, num_heads)


@torch.no_grad()
def record(
    model: Any, condition: Any, batch_size: int, sampler: MaskedSampler, guidance_scale: float, seed: int
) -> Transitions:
    """Decode a batch, and return what the shortcut is to learn of it."""
    recorder = Recorder(model)
    law, generator = TokenLaw(guidance_scale=guidance_scale), torch.Generator().manual_seed(seed)
    sampler(recorder, condition, law=law, generator=generator, batch_size=batch_size)
    return recorder.transitions()


def joined(parts: list[Transitions]) -> Transitions:
    """The pairs of several decodes."""
    names = [field.name for field in fields(Transitions)]
    return Transitions(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def relative_error(shortcut: FeatureShortcut, transitions: Transitions) -> Tensor:
    """The squared error of the shortcut as a share of the error of the features before; below 1 if it helps."""
    made = shortcut(transitions.before, transitions.tokens, transitions.newest, transitions.share)
    return (made - transitions.after).square().mean() / (
        transitions.before - transitions.after
    ).square().mean()


def train_shortcut(
    shortcut: FeatureShortcut,
    model: Any,
    encode: Any,
    prompts: list[str],
    held_out: list[str],
    sampler: MaskedSampler,
    settings: ShortcutTraining,
    out: Path,
    *,
    every: int = 50,
) -> dict[str, Any]:
    """Train in place, save the weights in `out`, and return the record that is also written to `out/training.json`.

    A run that was interrupted goes on from `out/resume.pt` as if it had not been; the finished run removes it.

    Args:
        encode: makes the model's condition of a list of captions.
        prompts: captions to decode, as many as the settings say; `held_out`'s measure the error that is left.
        sampler: decodes, with all calls full.

    Raises:
        ValueError: a shortcut for another model, or fewer prompts than pictures.
    """
    shortcut.check_fits(model)
    if len(prompts) < settings.pictures:
        raise ValueError(f"{len(prompts)} prompts for {settings.pictures} pictures; pass one for each.")
    rate = settings.learning_rate
    optimiser = torch.optim.AdamW(shortcut.parameters(), lr=rate, weight_decay=settings.weight_decay)
    descend = Descent([optimiser], settings.steps, rate, warmup=min(20, settings.steps))
    run = Trainer(shortcut, settings, out, descend, every=every, reads=[model], parts={"shortcut": shortcut})

    def decoded(some: list[str], seed: int) -> Transitions:
        return record(model, encode(some), len(some), sampler, settings.guidance_scale, seed)

    @cache
    def known() -> Transitions:
        starts = range(0, settings.pictures, _DECODED)
        stops = (min(start + _DECODED, settings.pictures) for start in starts)
        shards = zip(starts, stops, strict=True)
        return joined([decoded(prompts[one:end], (settings.seed << 32) + one) for one, end in shards])

    def batch(step: int) -> tuple[Transitions]:
        dice = torch.Generator().manual_seed((settings.seed << 32) + step)
        chosen = torch.randint(len(known().share), (settings.batch_size,), generator=dice)
        return (known().rows(chosen.to(known().share.device)),)

    @torch.no_grad()
    def judge() -> dict[str, float]:
        round_matrices(shortcut, out)
        left = relative_error(shortcut, decoded(held_out, 777)).item()
        return {"held_out_relative_error": round(left, 4)}

    return run.run(lambda pairs: relative_error(shortcut, pairs), batch, judge)


@dataclass(kw_only=True)
class Options(RunOptions):
    model: str = option("embedded name or folder of a masked pipeline", "shapes_masked")
    dim: int | None = option("width; without: half of the model's", None)
    num_heads: int = 4


HELP = "Train the shortcut of a masked model: `python scripts/train shortcut --out FOLDER`."


def main() -> None:
    options, settings = read_options(HELP, Options, ShortcutTraining)
    pipe = load_pipeline(options.model)
    pipe.to(options.device)
    pipe.transformer.eval().requires_grad_(False)
    settings = replace(settings, guidance_scale=pipe.default_settings()["guidance_scale"])
    sampler = MaskedSampler.from_config(pipe.sampler.config, steps=settings.calls, reuse=0, measure=False)
    assert isinstance(sampler, MaskedSampler)  # not also what was left of the configuration
    torch.manual_seed(settings.seed)
    shortcut = new_shortcut(pipe.transformer, options.dim, options.num_heads).to(options.device)
    rng = np.random.default_rng(settings.seed + 1)
    texts = (caption(sample_scene(rng)) for _ in range(2 * settings.pictures + 64))
    prompts = [text for text in texts if not is_held_out(text)][: settings.pictures]
    readers = (pipe.transformer, pipe.make_condition, prompts, held_out_prompts(16), sampler)
    figures = train_shortcut(shortcut, *readers, settings, options.out)
    print(f"{figures['parameters'] / 1e6:.2f} M parameters, error left {figures['held_out_relative_error']}")
