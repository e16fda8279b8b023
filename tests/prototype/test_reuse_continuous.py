"""Local calls of MAR: what they compute, against explicit keys and values by place, and the whole loop around them."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.continuous import LABELS, LAW, noise_of, token
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.models.continuous import straight
from tests.models.continuous.straight import linear, norm
from tests.models.continuous.tiny import calm, tiny_causal, tiny_mar
from visual_spec.prototype.reuse.continuous import ReusingContinuousSampler
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.core.noise import ORDER


class ByHand:
    """MAR for one picture and class, with the keys and values of each layer in a dictionary by place."""

    def __init__(self, model: Any, label: int | None) -> None:
        self.w, self.label = model.state_dict(), label
        self.places = self.w["encoder_pos_embed_learned"][0]
        self.buffer = len(self.places) - 16

    def layer(self, name: str, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        """Run a layer on rows by place; they see all that the layer holds, themselves included."""
        held = self.held.setdefault(name, {})
        queries = {}
        for place, x in rows.items():
            q, k, v = linear(self.w, f"{name}.attn.qkv", norm(x, self.w, f"{name}.norm1")).chunk(3)
            queries[place], held[place] = q, (k, v)
        out = {}
        for place, x in rows.items():
            parts = []
            for head in range(2):
                q, ks, vs = (
                    part.chunk(2, -1)[head]
                    for part in (
                        queries[place],
                        torch.stack([held[other][0] for other in sorted(held)]),
                        torch.stack([held[other][1] for other in sorted(held)]),
                    )
                )
                parts.append((ks @ q / math.sqrt(len(q))).softmax(0) @ vs)
            x = x + linear(self.w, f"{name}.attn.proj", torch.cat(parts))
            inner = F.gelu(linear(self.w, f"{name}.mlp.fc1", norm(x, self.w, f"{name}.norm2")))
            out[place] = x + linear(self.w, f"{name}.mlp.fc2", inner)
        return out

    def encode(self, tokens: Tensor, places: list[int]) -> None:
        """Read the tokens of some places, and those of the class if they are not read yet."""
        rows = {}
        if not self.inputs:
            label = self.w["fake_latent"][0] if self.label is None else self.w["class_emb.weight"][self.label]
            rows = {
                place: norm(label + self.places[place], self.w, "z_proj_ln") for place in range(self.buffer)
            }
        for place in places:
            at = self.buffer + place
            rows[at] = norm(linear(self.w, "z_proj", tokens[place]) + self.places[at], self.w, "z_proj_ln")
        for i in range(straight.layers(self.w, "encoder_blocks")):
            rows = self.layer(f"encoder_blocks.{i}", rows)
        for place, x in rows.items():
            self.inputs[place] = linear(self.w, "decoder_embed", norm(x, self.w, "encoder_norm"))

    def decode(self, places: list[int]) -> dict[int, Tensor]:
        hidden = self.w["mask_token"][0, 0]
        positions = self.w["decoder_pos_embed_learned"][0]
        rows = {place: self.inputs.get(place, hidden) + positions[place] for place in places}
        for i in range(straight.layers(self.w, "decoder_blocks")):
            rows = self.layer(f"decoder_blocks.{i}", rows)
        told = self.w["diffusion_pos_embed_learned"][0]
        return {
            place - self.buffer: norm(x, self.w, "decoder_norm") + told[place - self.buffer]
            for place, x in rows.items()
            if place >= self.buffer
        }

    def full(self, tokens: Tensor, known: list[int]) -> dict[int, Tensor]:
        self.held: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        self.inputs: dict[int, Tensor] = {}
        self.encode(tokens, known)
        return self.decode(list(range(self.buffer + 16)))

    def local(self, tokens: Tensor, fresh: list[int], group: list[int]) -> dict[int, Tensor]:
        self.encode(tokens, fresh)
        return self.decode([self.buffer + place for place in group])


def test_the_hand_computation_is_the_model_without_reuse():
    model, tokens = calm(tiny_mar(), 0.1), torch.randn(16, 3, generator=seeded(1)[0]).double()
    for known in ([], [3], [0, 5, 11]):
        mask = torch.zeros(16, dtype=torch.bool)
        mask[known] = True
        want = straight.mar(model.state_dict(), 2, 4, tokens, mask)
        found = ByHand(model, 4).full(tokens, known)
        for place in range(16):
            assert (found[place] - want[place]).abs().max() < 1e-12


@pytest.mark.parametrize(
    "calls",
    [
        # After six calls of 1, 2, 2, 3, 4 and 4 tokens: which are local, and the slots of their groups.
        {"reuse": 1, "local": {1: (0, 3), 3: (3, 8), 5: (8, 16)}},
        {"reuse": 2, "local": {1: (0, 5), 2: (0, 5), 4: (5, 16), 5: (5, 16)}},
        {"reuse": 2, "reuse_from": 0.3, "local": {3: (3, 12), 4: (3, 12)}},
        # ReCAP's scripts: full calls for the first half, and 0.4 of the levels, rounded down, in local calls.
        {"reuse": 1, "reuse_from": 0.5, "local_levels": 0.7, "local": {4: (5, 12)}},
    ],
    ids=str,
)
def test_the_loop_is_the_one_by_hand(calls):
    model = calm(tiny_mar(), 0.1)
    local = calls.pop("local")
    sampler = ReusingContinuousSampler(steps=6, head_steps=4, guidance="constant", **calls)
    edges = [0, 1, 3, 5, 8, 12, 16]
    assert [shape.count for shape in sampler.shapes(model)] == [
        b - a for a, b in zip(edges, edges[1:], strict=False)
    ]
    generators = seeded(7, 8)
    found = sampler(model, LABELS, law=LAW, generator=generators, batch_size=2)
    for row in range(2):
        noise = noise_of(7 + row)
        every = torch.arange(16)[None]
        places = noise.uniform(every, ORDER, dtype=torch.float64).argsort(-1)[0].tolist()
        hands = [ByHand(model, label) for label in (int(LABELS[row]), None)]
        tokens = torch.zeros(16, 3, dtype=torch.float64)
        for call, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
            if call in local:
                first, last = local[call]
                before = places[edges[call - 1] : start]
                conditions = [hand.local(tokens, before, places[first:last]) for hand in hands]
            else:
                conditions = [hand.full(tokens, places[:start]) for hand in hands]
            levels = int(4 * calls.get("local_levels", 1.0)) if call in local else 4
            for place in places[start:end]:
                z, other = (one[place] for one in conditions)
                tokens[place] = token(model, "diffloss.net", z, other, 3.0, place, noise, head_steps=levels)
        torch.testing.assert_close(
            found.tokens[row], tokens, rtol=1e-6, atol=1e-5 * float(tokens.abs().max())
        )
    assert found.trace.target_calls.tolist() == [6, 6]


def test_no_reuse_is_the_plain_sampler_bit_by_bit():
    model = calm(tiny_mar(), 0.1)

    def draw(**settings: Any) -> Tensor:
        sampler = ReusingContinuousSampler(steps=6, head_steps=4, **settings)
        return sampler(model, LABELS, law=LAW, generator=seeded(1, 2), batch_size=2).tokens

    plain = ContinuousSampler(steps=6, head_steps=4)(
        model, LABELS, law=LAW, generator=seeded(1, 2), batch_size=2
    ).tokens
    assert torch.equal(draw(reuse=0, reuse_from=0.5), plain) and torch.equal(
        draw(reuse=3, reuse_from=1.0), plain
    )
    changed = draw(reuse=1)
    assert not torch.equal(changed, plain)
    alone = ReusingContinuousSampler(steps=6, head_steps=4, reuse=1)(
        model, LABELS[1:], law=LAW, generator=seeded(2), batch_size=1
    )
    assert (alone.tokens[0] - changed[1]).abs().max() < 1e-9  # of no batch


def test_what_cannot_be_reused_is_refused():
    refuses(ValueError, "reuse=-1", ReusingContinuousSampler, reuse=-1)
    refuses(ValueError, "reuse_from=1.5", ReusingContinuousSampler, reuse=1, reuse_from=1.5)
    refuses(ValueError, "graph=True", ReusingContinuousSampler, reuse=1, graph=True)
    with pytest.raises(ValueError, match="reuse=1.*CausalContinuousTransformer"):
        ReusingContinuousSampler(reuse=1)(
            tiny_causal(), LABELS, law=LAW, generator=seeded(1, 2), batch_size=2
        )
