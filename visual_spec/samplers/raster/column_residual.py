"""Verification of a whole column: K independent draft tokens are tested and replaced as one token.

With target law P(x) = p_1(x_1) ... p_K(x_K) and draft law Q likewise, a drafted column x is kept with probability
min(1, P(x) / Q(x)), and a refused one is replaced from (P - Q)+, normalised. This is the rule of `acceptance` for the
vocabulary of all V ** K columns. It keeps a column as often as any rule can, 1 - TVD(P, Q). Testing the codebooks one
by one, and stopping at the first refusal, keeps it with probability (1 - TVD(p_1, q_1)) ... (1 - TVD(p_K, q_K)).

The residual is not a product, and a table of it would have V ** K entries. It is drawn by rejection sampling from a
cover. There are two covers. One is P itself: (P - Q)+ <= P. A draw from it is kept with probability TVD(P, Q), which
may be close to 0. The other cover splits the difference,

    P - Q = sum over k of q_1 ... q_(k-1) (p_k - q_k) p_(k+1) ... p_K ,      so      (P - Q)+ <= D,

where D is the same sum with (p_k - q_k)+ in the middle. D is a mixture of K products and is easy to draw from: choose
the leading codebook k with a probability proportional to TVD(p_k, q_k); draw the codebooks before it from q, codebook k
from its own residual, and the codebooks after it from p. The mass of D is the sum of TVD(p_k, q_k), at most K times the
largest of them, and TVD(P, Q) is at least the largest of them. So a draw from D is kept with probability at least 1 /
K, whatever the laws. The cover with less mass is used, which preserves this bound. D is ours.

A call makes a fixed number of attempts at once. In the rare case that none is kept, the caller must remember that the
draft was refused, and continue in its next round. Rejection sampling then goes on where it stopped, so the result is
exact and only time is lost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.samplers.core.drafts import rows_of
from visual_spec.samplers.core.noise import MIXTURE, PROPOSAL, CounterNoise


def product_acceptance(target: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
    """Return the probability of keeping each drafted column, min(1, P(x) / Q(x)).

    Args:
        target, draft_law: [B, N, K, V] log-probabilities.
        drafts: long [B, N, K].

    Returns:
        [B, N], of the laws' dtype.
    """
    at = drafts[..., None]
    ratio = (target.gather(-1, at) - draft_law.gather(-1, at)).squeeze(-1)  # [B, N, K], logarithms
    return ratio.sum(-1).exp_().clamp_(max=1)


def draw_product_residual(
    target: Tensor,
    draft_law: Tensor,
    noise: CounterNoise,
    entries: Tensor,
    round: int | Tensor,
    *,
    tries: int,
) -> tuple[Tensor, Tensor]:
    """Draw a column from (P - Q)+, normalised, by a fixed number of attempts.

    Args:
        target, draft_law: [B, K, V] log-probabilities. A draft law of -inf everywhere (no draft) makes the residual P
            itself, and the first attempt is kept.
        noise: uses the streams `PROPOSAL` and `MIXTURE` of these entries, in rounds of their own.
        entries: long [B, K], the counter slots of the column's tokens.
        round: round of the decode.
        tries: number of attempts, at least 1.

    Returns:
        tokens: long [B, K].
        found: bool [B]. Where it is false, all attempts failed and the tokens do not follow this law.
    """
    batch_size, codebooks, _ = target.shape
    device = target.device
    target_mass, draft_mass = _masses(target), _masses(draft_law)
    excess = (target_mass - draft_mass).clamp_(min=0)  # [B, K, V]
    apart = excess.sum(-1)  # [B, K], the TVD of each codebook
    total = apart.sum(-1, keepdim=True)  # [B, 1]
    # Equal laws leave no residual and refuse no draft: the request comes from rounding, so draw from P.
    equal, split = total == 0, (total > 0) & (total < 1)

    attempts = round * tries + torch.arange(tries, device=device)  # a round for each attempt
    first = entries[:, :1].expand(-1, tries)  # [B, T]
    mixture = torch.where(equal, 1, apart).log()[:, None].expand(-1, tries, -1)  # [B, T, K]
    lead = noise.categorical(mixture, first, MIXTURE, attempts.expand(batch_size, -1))
    lead = torch.where(split, lead, -1)[..., None]  # [B, T, 1]; all codebooks come after -1, so from P
    codebook = torch.arange(codebooks, device=device)
    source = torch.where(codebook < lead, 1, torch.where(codebook == lead, 2, 0))  # [B, T, K]
    laws = torch.stack([target, draft_law, excess.log().to(target.dtype)], 1).flatten(1, 2)  # [B, 3 K, V]
    tokens = noise.categorical(
        rows_of(laws, (source * codebooks + codebook).flatten(1)),
        entries.repeat(1, tries),
        PROPOSAL,
        attempts.repeat_interleave(codebooks).expand(batch_size, -1),
    ).view(batch_size, tries, codebooks)

    by_codebook = tokens.transpose(1, 2)  # [B, K, T]
    ratio = (draft_mass.gather(-1, by_codebook) / target_mass.gather(-1, by_codebook)).mT  # [B, T, K]
    before = F.pad(ratio.cumprod(-1), (1, 0), value=1.0)  # [B, T, K + 1]; the last is Q / P
    residual = (1 - before[..., -1]).clamp(min=0)  # (P - Q)+ / P
    cover = (before[..., :-1] * (1 - ratio)).clamp(min=0).sum(-1)  # D / P
    keep = torch.where(split, residual / cover, residual)
    # A column that the target law forbids has an infinite ratio; no residual contains it.
    keep = torch.where(equal, 1, keep.nan_to_num(nan=0.0))
    kept = noise.bernoulli(keep, first, PROPOSAL, attempts.expand(batch_size, -1))  # [B, T]
    chosen = accepted_prefix(~kept).clamp(max=tries - 1)[:, None]  # the first that is kept
    return rows_of(tokens, chosen)[:, 0], kept.any(1)


def _masses(log_probs: Tensor) -> Tensor:
    """Return probabilities in float64, of sum 1: float32 cannot resolve differences of products of many small ones."""
    masses = log_probs.double().exp()
    return masses / masses.sum(-1, keepdim=True).clamp(min=torch.finfo(masses.dtype).tiny)
