"""The heads of models that others made, split: what a latent needs once, and what every step of it needs.

A head turns a noisy latent, a condition and a time into an output. Condition and time modulate the norms, through
products that hold a quarter of VibeVoice's head, and three fifths of PocketTTS's and NextStep's. Neither changes with
the latent, so these products run once for all steps of a latent, and the embedding of the times once for all latents.

The modules are the model's own, and are called as modules: adapters, quantised layers and hooks stay in effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Modulations:
    """Of the condition's rows N, for T steps.

    Attributes:
        layers: shift, 1 + scale and gate of each layer, [T, N, H].
        final: shift and 1 + scale of the last one, [T, N, H].
    """

    layers: list[tuple[Tensor, ...]]
    final: tuple[Tensor, ...]


class SpeechHead(Protocol):
    """A head that is evaluated in two parts."""

    def embed(self, times: Tensor) -> Tensor:
        """Return what the head makes of the times, [T, H]."""
        ...

    def modulations(self, condition: Tensor, embedded: Tensor) -> Modulations:
        """The modulations for conditions [N, C] at embedded times [T, H]."""
        ...

    def output(self, latents: Tensor, modulations: Modulations, step: int) -> Tensor:
        """The head's output [N, D] at a step. Latents [N / n, D] stand for n groups of rows."""
        ...


class VibeVoiceHead:
    """`VibeVoiceDiffusionHead` of transformers; times are floats [T] in the dtype of the latents."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def embed(self, times: Tensor) -> Tensor:
        return self.head.timestep_proj(self.head.timestep_embedding(times).to(times.dtype))

    def modulations(self, condition: Tensor, embedded: Tensor) -> Modulations:
        mixed = self.head.cond_proj(condition) + embedded[:, None]  # [T, N, H]
        layers = [_scaled(layer.linear(layer.act_fn(mixed)), layer.num_chunks) for layer in self.head.layers]
        final = self.head.final_layer
        return Modulations(layers, _scaled(final.linear_1(final.act_fn(mixed)), final.num_chunks))

    def output(self, latents: Tensor, modulations: Modulations, step: int) -> Tensor:
        hidden = _in_groups(self.head.noisy_images_proj(latents), modulations)
        for layer, parts in zip(self.head.layers, modulations.layers, strict=True):
            shift, scale, gate = (part[step] for part in parts)
            hidden = hidden + gate * layer.ffn(layer.norm(hidden) * scale + shift)
        final, (shift, scale) = self.head.final_layer, (part[step] for part in modulations.final)
        return final.linear_2(F.rms_norm(hidden, hidden.shape[-1:], eps=final.rms_norm_eps) * scale + shift)


class PocketTTSHead:
    """`PocketTTSFlowHead` of transformers; times are the start and the end of each step, [T, 2], or [1, 0] for none."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def embed(self, times: Tensor) -> Tensor:
        parts = [
            embedding(times[:, index, None]) for index, embedding in enumerate(self.head.timestep_embeddings)
        ]
        if not parts:
            return times.new_zeros(len(times), self.head.cond_proj.out_features)
        return torch.stack(parts).sum(0) / len(parts)

    def modulations(self, condition: Tensor, embedded: Tensor) -> Modulations:
        mixed = self.head.cond_proj(condition) + embedded[:, None]  # [T, N, H]
        layers = [
            _scaled(layer.adaln_proj(layer.act_fn(mixed)), layer.num_chunks) for layer in self.head.layers
        ]
        final = self.head.final_layer
        return Modulations(layers, _scaled(final.adaln_proj(final.act_fn(mixed)), final.num_chunks))

    def output(self, latents: Tensor, modulations: Modulations, step: int) -> Tensor:
        hidden = _in_groups(self.head.input_proj(latents), modulations)
        for layer, parts in zip(self.head.layers, modulations.layers, strict=True):
            shift, scale, gate = (part[step] for part in parts)
            inner = layer.fc1(layer.norm(hidden) * scale + shift)
            hidden = hidden + gate * layer.fc2(layer.act_fn(inner))
        final, (shift, scale) = self.head.final_layer, (part[step] for part in modulations.final)
        return final.proj(final.norm(hidden) * scale + shift)


class NextStepHead:
    """`SimpleMLPAdaLN` of NextStep's public code; times are floats [T] in the dtype of the conditions."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def embed(self, times: Tensor) -> Tensor:
        return self.head.time_embed(times)

    def modulations(self, condition: Tensor, embedded: Tensor) -> Modulations:
        mixed = self.head.cond_embed(condition) + embedded[:, None]  # [T, N, H]
        layers = [_scaled(block.adaLN_modulation(mixed), 3) for block in self.head.res_blocks]
        return Modulations(layers, _scaled(self.head.final_layer.adaLN_modulation(mixed), 2))

    def output(self, latents: Tensor, modulations: Modulations, step: int) -> Tensor:
        hidden = _in_groups(self.head.input_proj(latents), modulations)
        for block, parts in zip(self.head.res_blocks, modulations.layers, strict=True):
            shift, scale, gate = (part[step] for part in parts)
            hidden = hidden + gate * block.mlp(block.in_ln(hidden) * scale + shift)
        final, (shift, scale) = self.head.final_layer, (part[step] for part in modulations.final)
        return final.linear(final.norm_final(hidden) * scale + shift)


def guided(output: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance of outputs [2 N, D], conditional rows first: [N, D]. Scale 1: of outputs [N, D]."""
    if scale == 1:
        return output
    conditional, unconditional = output.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def _scaled(product: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Split [T, N, parts * H] into shift, 1 + scale and the rest."""
    shift, scale, *rest = product.chunk(parts, -1)
    return shift, 1 + scale, *rest


def _in_groups(hidden: Tensor, modulations: Modulations) -> Tensor:
    """Repeat [N / n, H] for n groups of rows: guidance rows start from the same latents."""
    groups = modulations.final[0].shape[1] // len(hidden)
    return hidden if groups == 1 else torch.cat([hidden] * groups)
