"""What the tests of chain and tree sampler share: models that draft for each other, and ways to watch a decode."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.llamagen import make, text_condition
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw

MODEL = TabularModel(TokenGrid(6, 6), 12, order=2, conditions=3, dependence=0.3)
NEAR = TabularModel(TokenGrid(6, 6), 12, order=2, conditions=3, dependence=0.3)
NEAR.logits = MODEL.logits + 0.7 * TabularModel(TokenGrid(6, 6), 12, order=2, conditions=3, seed=1).logits
CONDITION = torch.tensor([2, 0, 1, 2])
CODEBOOK = torch.nn.functional.normalize(
    torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), dim=-1
)
GUIDED = TokenLaw(guidance_scale=1.8, top_k=8)


def decode(sampler, model: Any = MODEL, drafter: Any = NEAR, condition: Any = CONDITION, **options: Any):
    options = {"law": TokenLaw(), "batch_size": 4, **options}
    if "generator" not in options:
        options["generator"] = seeded(range(options["batch_size"]))
    return sampler(model, condition, drafter=drafter, **options)


def seeded(seeds) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def eagle_pair() -> tuple[LlamaGenTransformer, EagleDrafter]:
    """A tiny float64 target, and a drafter that has learnt nothing: it drafts, and is refused most of the time."""
    target = make(grid_size=5, vocab_size=8)
    torch.manual_seed(1)
    drafter = EagleDrafter.for_target(target).double().eval()
    for parameter in drafter.parameters():
        parameter.data = torch.randn_like(parameter) * (0.2 if parameter.ndim == 2 else 1.0)
    return target, drafter


def draft_model() -> LlamaGenTransformer:
    """A smaller LlamaGen over the tokens of `eagle_pair`, with captions of its own width."""
    return make(grid_size=5, vocab_size=8, dim=16, num_layers=1)


def captions(batch_size: int) -> Any:
    torch.manual_seed(batch_size)
    return text_condition(batch_size, [3, 5, 1, 4, 2][:batch_size])


class Counting(TabularModel):
    """Counts its calls and keeps what it was asked."""

    def prefill(self, *args, **kwargs):
        self.asked = kwargs
        self.calls: list[Tensor] = []
        return super().prefill(*args, **kwargs)

    def forward(self, state, tokens, slots, *more, **named):
        self.calls.append(slots.clone())
        return super().forward(state, tokens, slots, *more, **named)


def counting(source: TabularModel) -> Counting:
    model = Counting(source.grid, source.vocab_size, order=source.order, conditions=source.conditions)
    model.logits = source.logits
    return model


def law_after(
    model: Any, drafter: Any, condition: Any, law: TokenLaw, text: list[int], known: int, row: int, rows: int
) -> Tensor:
    """The drafter's law [V] after a text, computed anew: `known` tokens that the target has seen, then drafts.

    The target's features are those of a plain call over the known tokens.
    """
    cache = model.prefill(condition, batch_size=rows, guided=law.guided, window=40)
    if hasattr(drafter, "follow"):
        state = drafter.follow(model, cache, window=40)
    else:
        state = drafter.prefill(condition, batch_size=rows, guided=law.guided, window=40)
    tokens = torch.tensor([text]).expand(rows, -1)
    slots = torch.arange(len(text)).expand(rows, -1)
    if hasattr(drafter, "observe") and known > 1:
        model(cache, tokens[:, : known - 1], slots[:, : known - 1])
        drafter.observe(state, cache.features, slots[:, : known - 1])
    logits = drafter(state, tokens[:, :known], slots[:, :known])[:, -1:]
    for place in range(known, len(text)):
        logits = drafter(state, tokens[:, place, None], slots[:, place, None])
    return law(logits, law.guided, slots[:, -1:] + 1)[row, 0]


Seen = list[tuple[Tensor, Tensor, Tensor]]


def watch_features(monkeypatch: Any, kind: Any) -> Seen:
    """What each step of a sampler leaves to a feature drafter: fed [B], lengths [B], features [B, S, dim]."""
    seen: Seen = []
    real_step = kind.step

    def step(sampler, run, state):
        real_step(sampler, run, state)
        seen.append((state.fed.clone(), state.lengths.clone(), state.drafter_cache.features.clone()))

    monkeypatch.setattr(kind, "step", step)
    return seen


def check_features(seen: Seen, model: Any, condition: Any, tokens: Tensor) -> None:
    """The features that the next call of the drafter reads are those of a plain call of the target."""
    batch_size, length = tokens.shape
    cache = model.prefill(condition, batch_size=batch_size, guided=False, window=length)
    first = cache.features
    model(cache, tokens, torch.arange(length).expand(batch_size, -1))
    features = torch.cat([first, cache.features], 1)  # [B, L + 1, dim]
    checked = 0
    for fed, lengths, found in seen:
        for row in range(batch_size):
            new = slice(int(fed[row]), int(lengths[row]))
            assert ((found[row, new] - features[row, new]).abs() < 1e-12).all()
            checked += new.stop - new.start
    assert checked == batch_size * (length - 1)
