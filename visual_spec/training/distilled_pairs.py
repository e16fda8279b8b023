"""Pairs of noise and tokens for students of Distilled Decoding (Liu et al. 2024, arXiv 2412.17153, section 3).

The teacher draws pictures token by token. Each token is where a flow takes the noise of its slot: flow matching between
normal noise at time 1 and the codes at time 0, each code with the mass that the teacher's law gives it. The velocity of
such a flow is known in closed form. So one noise gives one token, and normal noise gives tokens of that law.

The flow runs backward as well. A token, and a little noise around its code, lead back to a noise which the flow takes
to that token; noise found so has the law of noise given the token. Tokens of a picture being given, the noise of its
slots is independent. So a picture serves with several noises of each slot, in any combination.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from visual_spec.data.shapes import training_prompts
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.training.tokens import stored

_LAST_TIME = 0.008  # the noise that is left there is below the distance of neighbouring codes
_CERTAIN = 0.999  # above it a slot's noise is as good as independent of its token


@dataclass(frozen=True)
class PairDrawing:
    """Settings of the teacher's pictures.

    Attributes:
        pictures, batch_size: how many in all, and in a shard.
        guidance_scale: of the teacher's law.
        noises: of each slot of a picture.
        candidates: the likeliest codes of a law that its flow knows.
        flow_steps: Heun steps of a flow.
    """

    pictures: int = 4096
    batch_size: int = 64
    guidance_scale: float = 1.5
    noises: int = 4
    candidates: int = 64
    flow_steps: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.pictures, self.batch_size, self.noises, self.candidates, self.flow_steps)
        if least < 1 or self.pictures % self.batch_size:
            raise ValueError(
                f"{self} given; pass counts of at least 1, and whole batches of pictures: {self.batch_size} divides "
                "their number."
            )


class Pairs(NamedTuple):
    """What a student learns from.

    Attributes:
        words: long [N, T], of the captions.
        tokens: int16 [N, L].
        noise: half [N, M, L, D]; the flow takes any of the M noises of a slot to its token.
    """

    words: Tensor
    tokens: Tensor
    noise: Tensor


# -- the flow of a law ------------------------------------------------------------------------------------------------


class Flow:
    """The flows of many laws over one codebook, each law cut to its likeliest codes.

    Args:
        log_law: [N, V], log-probabilities.
        codes: [V, D].
        candidates: how many codes of each law the flow knows, at most V.
        steps: Heun steps, at times in geometric progression.
    """

    def __init__(self, log_law: Tensor, codes: Tensor, candidates: int, steps: int) -> None:
        self.log_mass, self.ids = log_law.topk(min(candidates, log_law.shape[-1]))  # [N, K]
        self.codes = codes[self.ids]  # [N, K, D]
        self.times = [_LAST_TIME ** (step / steps) for step in range(steps + 1)]

    def velocity(self, places: Tensor, time: float) -> Tensor:
        """dx/dt = (x - E[code | x]) / t of places [N, D] at a time in (0, 1]."""
        return (places - self.expected(places, time)) / time

    def expected(self, places: Tensor, time: float) -> Tensor:
        """The mean code [N, D], given that a code plus noise, (1 - t) code + t noise, is at these places."""
        apart = (places[:, None] - (1 - time) * self.codes).square().sum(-1)  # [N, K]
        shares = (self.log_mass - apart / (2 * time * time)).softmax(-1)
        return torch.einsum("nk,nkd->nd", shares, self.codes)

    def tokens(self, noise: Tensor) -> Tensor:
        """Token ids [N] to which the flow takes noise [N, D]: the codes nearest to where it ends."""
        end = self.expected(self._run(noise, self.times), self.times[-1])
        nearest = (
            (end[:, None] - self.codes).square().sum(-1).masked_fill(self.log_mass.isneginf(), torch.inf)
        )
        return self.ids.gather(1, nearest.argmin(-1, keepdim=True))[:, 0]

    def noise(self, codes: Tensor, around: Tensor) -> Tensor:
        """Noise [N, D] that the flow takes to codes [N, D]; `around`, normal noise [N, D], chooses which."""
        time = self.times[-1]
        return self._run((1 - time) * codes + time * around, self.times[::-1])

    def _run(self, places: Tensor, times: Sequence[float]) -> Tensor:
        for time, following in zip(times[:-1], times[1:], strict=True):
            step, slope = following - time, self.velocity(places, time)
            there = self.velocity(places + step * slope, following)
            places = places + step * (slope + there) / 2
        return places


# -- the teacher's pictures -------------------------------------------------------------------------------------------


@torch.no_grad()
def draw_pairs(
    teacher: LlamaGenTransformer,
    encoder: CaptionEncoder,
    codes: Tensor,
    captions: list[str],
    settings: PairDrawing,
    generator: torch.Generator,
) -> Pairs:
    """Draw a picture of each caption, one call of the teacher a token, and noise that leads to its tokens.

    Args:
        codes: [V, D], of the tokenizer.
    """
    law, device = TokenLaw(guidance_scale=settings.guidance_scale), teacher.device
    size, length, dim = len(captions), teacher.grid.num_tokens, codes.shape[1]
    shape = (size, settings.noises, length, dim)
    # As it is stored: the student sees the very noise that the flow starts from.
    noise = torch.randn(shape, generator=generator).half()
    around = torch.randn(size, settings.noises - 1, length, dim, generator=generator).to(device)
    tokens = torch.zeros(size, length, dtype=torch.long, device=device)
    words = encoder.word_ids(captions)
    state = teacher.prefill(encoder(words), batch_size=size, guided=law.guided, window=1)
    logits = state.logits[:, None]
    for slot in range(length):
        at = torch.full((size, 1), slot, device=device)
        log_law = law(logits, law.guided, at)[:, 0]  # [B, V]
        flow = Flow(log_law, codes, settings.candidates, settings.flow_steps)
        tokens[:, slot] = flow.tokens(noise[:, 0, slot].float().to(device))
        open_slots = log_law.gather(1, tokens[:, slot : slot + 1])[:, 0] < math.log(_CERTAIN)
        if settings.noises > 1 and open_slots.any():
            more = _noises(
                log_law[open_slots], codes, tokens[open_slots, slot], around[open_slots, :, slot], settings
            )
            noise[open_slots.cpu(), 1:, slot] = more.half().cpu()
        if slot + 1 < length:
            logits = teacher(state, tokens[:, slot : slot + 1], at)
    return Pairs(words.cpu(), tokens.to(torch.int16).cpu(), noise)


def _noises(log_law: Tensor, codes: Tensor, tokens: Tensor, around: Tensor, settings: PairDrawing) -> Tensor:
    """Noise [N, M, D] that the flows of laws [N, V] take to tokens [N], chosen by noise [N, M, D]."""
    each = around.shape[1]
    flow = Flow(log_law.repeat_interleave(each, 0), codes, settings.candidates, settings.flow_steps)
    noises = flow.noise(codes[tokens].repeat_interleave(each, 0), around.flatten(0, 1))
    return noises.unflatten(0, (-1, each))


def drawn_pairs(
    teacher: LlamaGenTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: PairDrawing,
    folder: Path,
) -> Pairs:
    """The pairs of a run, one file a shard; shards that are there already are not drawn again.

    Raises:
        ValueError: the folder holds shards of another teacher or other settings.
    """
    codes = vq_model.quantize.codes.detach()
    # The number of pictures is left out: more can be drawn later.
    drawing = {name: value for name, value in asdict(settings).items() if name != "pictures"}
    owner = f"{fingerprint([teacher, encoder, vq_model])} {drawing}"
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for shard in range(settings.pictures // settings.batch_size):
        path = folder / f"pairs_{shard:04d}.pt"

        def draw(shard: int = shard) -> dict[str, Tensor]:
            captions = training_prompts(settings.batch_size, (settings.seed, shard))
            generator = torch.Generator().manual_seed(settings.seed * 100_003 + shard)
            pairs = draw_pairs(teacher, encoder, codes, captions, settings, generator)
            print(f"pictures {(shard + 1) * settings.batch_size}/{settings.pictures}", flush=True)
            return pairs._asdict()

        saved = stored(path, owner, "pictures of another teacher, or drawn with other settings", draw)
        shards.append([saved[name] for name in Pairs._fields])
    return Pairs(*(torch.cat(parts) for parts in zip(*shards, strict=True)))
