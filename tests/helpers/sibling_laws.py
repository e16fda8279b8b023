"""The exact law of drafting siblings in one slot."""

import torch
from torch import Tensor

from visual_spec.samplers.core.noise import ACCEPT, CounterNoise
from visual_spec.samplers.raster.siblings import k_seq, recursive_rejection, sibling_stream


class Given(CounterNoise):
    """Stands in for the noise: a kept sibling is given for each row, and the probability of it is multiplied up."""

    def __init__(self, keep: Tensor) -> None:
        self.keep, self.weight = keep, torch.ones(len(keep), dtype=torch.float64)
        self.streams: list[int] = []

    def bernoulli(self, probability: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        assert round == 5 and (slots == 7).all()
        assert probability.shape == slots.shape and not probability.isnan().any()
        number = len(self.streams)
        self.streams.append(stream)
        accept = self.keep == number
        # Behind a kept sibling the tests do not matter: summed over.
        share = torch.where(accept, probability[:, 0], 1 - probability[:, 0])
        self.weight = self.weight * torch.where(self.keep >= number, share, torch.ones_like(share))
        return accept[:, None]


def tuples(draft: Tensor, count: int, replace: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All ways to draw K siblings: tokens [T, K], their laws [N, T, K, V] given the earlier ones, probability [N, T].

    By the definition: what is left of the law is divided by its mass. A law that has run out is zero, and its tokens
    count as drawn, whatever they are (only number 0 is followed).
    """
    rows, vocab_size = draft.shape
    tokens = torch.cartesian_prod(*[torch.arange(vocab_size)] * count).view(-1, count)
    left = draft.exp()[:, None].expand(-1, len(tokens), -1).clone()
    probability = torch.ones(rows, len(tokens), dtype=torch.float64)
    conditional = []
    for sibling in range(count):
        token = tokens[None, :, sibling, None].expand(rows, -1, -1)
        mass = left.sum(-1, keepdim=True)
        law = torch.where(mass > 0, left / mass, torch.zeros_like(left))
        conditional.append(law)
        gone = (mass[..., 0] <= 0) & (tokens[:, sibling] == 0)
        probability = probability * (law.gather(-1, token)[..., 0] + gone)
        if not replace:
            left = left.scatter(-1, token, 0.0)
    return tokens, torch.stack(conditional, 2), probability


def one_slot_law(rule, target: Tensor, draft: Tensor, count: int, replace: bool, wrong_label: bool = False):
    """Law of the committed token [N, V], and the probability that a sibling is kept [N], summed over all draws."""
    rows, vocab_size = target.shape
    tokens, conditional, drawn = tuples(draft, count, replace)
    index = torch.arange(rows * len(tokens) * (count + 1))
    row, rest = index // (len(tokens) * (count + 1)), index % (len(tokens) * (count + 1))
    which, keep = rest // (count + 1), rest % (count + 1)
    alive = drawn[row, which] > 0
    row, which, keep = row[alive], which[alive], keep[alive]
    noise = Given(keep)
    slots = torch.full((len(row), 1), 7)
    label = conditional[row, which].log()
    if wrong_label:
        label = draft[row][:, None].expand(-1, count, -1)
    if rule is recursive_rejection:
        accepted, left = rule(target[row], tokens[which], label, noise, slots, 5)
    else:
        accepted, left = rule(target[row], tokens[which], draft[row], noise, slots, 5)
    assert torch.equal(accepted, keep)
    assert noise.streams == [sibling_stream(ACCEPT, sibling) for sibling in range(count)]
    weight = drawn[row, which] * noise.weight
    kept = keep < count
    law = torch.zeros(rows * vocab_size, dtype=torch.float64)
    chosen = tokens[which].gather(1, keep[:, None].clamp(max=count - 1))[:, 0]
    law.index_add_(0, (row * vocab_size + chosen)[kept], weight[kept])
    law = law.view(rows, vocab_size)
    assert (left.exp().sum(-1) - 1).abs()[~kept & (weight > 0)].max() < 1e-12
    law.index_add_(0, row[~kept], weight[~kept, None] * left[~kept].exp())
    acceptance = torch.zeros(rows, dtype=torch.float64).index_add_(0, row[kept], weight[kept])
    return law, acceptance


RULES = {
    "recursive rejection, with replacement": (recursive_rejection, True),
    "recursive rejection, without replacement": (recursive_rejection, False),
    "K-SEQ": (k_seq, True),
}
