"""Calls of a masked model as CUDA graphs.

What a decoder does beside the model is a few kernels; the call itself is hundreds of launches, which a small picture on
a fast GPU waits for. All calls of one kind have the same shapes: whole ones, ones that keep, and local ones of a group,
whose width is rounded up (`recap.group_width`). The first of a kind runs as it is, the second is recorded, and
the others are replayed. Recordings live as long as the decode.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from visual_spec.samplers.core.graph import RecordedFunction


class RecordedCalls:
    """A masked model that is called with one state, and records its calls.

    Args:
        model: the model.
        state: from its `prepare`. Calls that keep something, or go on from it, are recorded only if the state says that
            what is kept stays where it is (`MaskedState.fixed`).
    """

    def __init__(self, model: Any, state: Any) -> None:
        self.model, self.state = model, state
        self._functions: dict[Any, RecordedFunction] = {}

    def __call__(self, state: Any, tokens: Tensor, stage: int, **reuse: Any) -> Tensor:
        """See `ReusingMaskedModel`. Returns logits in memory of their own."""
        assert state is self.state, "recordings read the state that they were made with"
        if reuse and not state.fixed:
            return self.model(state, tokens, stage, **reuse)
        keep, places = reuse.get("keep"), reuse.get("places")
        kind = stage, keep, places is None
        if kind not in self._functions:
            self._functions[kind] = RecordedFunction(self.model, partial(self._call, stage, keep))
        return self._functions[kind](*([tokens] if places is None else [tokens, places]))

    def _call(self, stage: int, keep: int | None, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        if places is not None:
            return self.model(self.state, tokens, stage, places=places)
        if keep is not None:
            return self.model(self.state, tokens, stage, keep=keep)
        return self.model(self.state, tokens, stage)
