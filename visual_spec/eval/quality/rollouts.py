"""What a trainer needs of drawn samples: tokens and their log-probabilities, one safetensors file a batch.

    rollouts/000000.safetensors    tokens           int32 [N, L]
                                   logprobs         float32 [N, L], under the law that they were drawn from
                                   model_logprobs   float32 [N, L], under the model without guidance, at temperature 1
                                   index, seed      int64 [N]

`logprobs` is missing where a lossy rule tests drafts: the law of its tokens is not known. The metadata hold one entry,
`facts`, which is JSON: `prompts`, in order, and `run`, all that fixes the samples (run.json), the fingerprint of the
weights among it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from safetensors.numpy import save

from visual_spec.files.documents import json_text

FOLDER = "rollouts"


def shard_name(first: int) -> str:
    """The file of the batch from sample `first` on, below the folder of the set."""
    return f"{FOLDER}/{first:06d}.safetensors"


def shard_bytes(
    arrays: Mapping[str, np.ndarray],
    indices: Sequence[int],
    seeds: Sequence[int],
    prompts: Sequence[str],
    facts: Mapping[str, object],
) -> bytes:
    """The file of a batch, of which the first samples are kept, as many as there are prompts.

    Args:
        arrays: tokens, model_logprobs and, of a sampler whose law is known, logprobs.
        facts: what fixes the samples, of run.json.
    """
    count = len(prompts)
    tensors = {
        "tokens": arrays["tokens"][:count].astype(np.int32),
        "index": np.array(indices, np.int64),
        "seed": np.array(seeds, np.int64),
        **{
            name: arrays[name][:count].astype(np.float32)
            for name in ("logprobs", "model_logprobs")
            if name in arrays
        },
    }
    # One entry: safetensors writes several in any order, and the bytes of a set are to be the same each time.
    text = json_text({"prompts": list(prompts), "run": facts})
    return save({name: np.ascontiguousarray(one) for name, one in tensors.items()}, {"facts": text})
