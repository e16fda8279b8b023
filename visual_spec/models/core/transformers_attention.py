"""Attention of a window inside the decoders of transformers models.

transformers passes a mask of the whole static cache to its attention, and repeats keys and values where several heads
share them. Within `window_calls` a decoder uses `window_attention` in place of it, which needs neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from visual_spec.kernels.window_attention import window_attention

_NAME = "visual_spec_window"


def _attend(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form of transformers: query [R, H, W, D], key and value [R, G, S, D]. Returns [R, W, H, D]."""
    places, prefix_mask = (kwargs[name].to(key.device) for name in ("window_places", "window_prefix"))
    return window_attention(query.transpose(1, 2), key, value, places, prefix_mask, scaling), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)


@contextmanager
def window_calls(decoder: Any, places: Tensor, prefix_mask: Tensor) -> Iterator[dict[str, Tensor]]:
    """Within, the decoder attends by `window_attention`. Yields arguments to call it with.

    Args:
        places: long [R, W], where the tokens of the call are written in the cache.
        prefix_mask: bool [R, T], the prefix places that other tokens see.
    """
    config, before = decoder.config, decoder.config._attn_implementation
    config._attn_implementation = {"": _NAME}  # not of configurations inside it
    try:
        # A mask of four axes is passed on as it is; nothing reads it.
        no_mask = prefix_mask[:, None, None, :0]  # [R, 1, 1, 0]
        yield dict(attention_mask=no_mask, window_places=places, window_prefix=prefix_mask)
    finally:
        config._attn_implementation = {"": before}
