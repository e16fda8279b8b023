"""The methods of this package, each as one plain function: the paper as code, for one sample, without its speed.

Read them before the samplers. A function takes what a sampler takes, on the same contracts: a model with its `prefill`
and its call (`visual_spec.models.core.protocol`), the probability distribution of a token (`TokenLaw`, "law"), and the
noise of one sample (`CounterNoise`). The samplers add batches, static shapes, caches that are not fed twice, kernels
and the trace. For the same noise they return the same tokens: these functions are the references of their tests. Call
them under `torch.no_grad()`. Their parts stand beside them: `next_token`, `masked`, `continuous`.

Two words. A *target* law is the model's own law of a slot. A *draft* is a token that was proposed for a slot, and its
law is the one that it was truly drawn from. Laws are log-probabilities; tokens are long [1, N], laws [1, N, V].
"""

from visual_spec.samplers.naive.continuous import continuous_speculative
from visual_spec.samplers.naive.masked import collaborative, magnet, maskgit
from visual_spec.samplers.naive.next_token import (
    any_order,
    autoregressive,
    column_jacobi,
    grouped_speculative,
    identical_jacobi,
    lantern,
    speculative_chain,
    speculative_jacobi,
    speculative_tree,
)

__all__ = [
    "any_order",
    "autoregressive",
    "collaborative",
    "column_jacobi",
    "continuous_speculative",
    "grouped_speculative",
    "identical_jacobi",
    "lantern",
    "magnet",
    "maskgit",
    "speculative_chain",
    "speculative_jacobi",
    "speculative_tree",
]
