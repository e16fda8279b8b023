"""`callback_on_step_end` of a call, and `pipe._interrupt`, which ends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from torch import Tensor

from visual_spec.samplers.core.base import STOP

StepCallback = Callable[[Any, int, int, dict[str, Any]], Any]


class StepListener:
    """Calls `callback_on_step_end`, and notices `pipe._interrupt`.

    Args:
        pipe: the pipeline; its `_interrupt` is cleared.
        callback: called as (pipe, step, timestep, tensors); None: nothing is called.
        names: of the tensors that it asks for; None: all of them.
        changeable: of the tensors that it may replace, by returning a dictionary with others.
    """

    def __init__(
        self,
        pipe: Any,
        callback: StepCallback | None,
        names: Sequence[str] | None,
        changeable: Sequence[str] = (),
    ) -> None:
        self.pipe, self.callback, self.changeable = pipe, callback, changeable
        self.names = asked_tensors(callback, names, pipe._callback_tensor_inputs)
        pipe._interrupt = False

    def __call__(self, step: int, timestep: Callable[[], int], **tensors: Tensor) -> Any:
        """Tell the callback about a target call.

        Args:
            timestep: gives the callback's third argument; asked only if there is a callback.

        Returns:
            What a sampler's callback returns: `STOP`, a tensor in place of the changeable one, or None.

        Raises:
            TypeError, ValueError: the callback returned something that cannot be used.
        """
        replaced = None
        if self.callback is not None:
            given = {name: tensors[name] for name in self.names}
            returned = self.callback(self.pipe, step, timestep(), dict(given))
            if returned is not None:
                replaced = self._replaced(given, returned)
        return STOP if self.pipe.interrupt else replaced

    def _replaced(self, given: Mapping[str, Tensor], returned: Any) -> Tensor | None:
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"callback_on_step_end returned a {type(returned).__name__}; return a dictionary of tensors by name, "
                "or None."
            )
        changed = None
        for name, old in given.items():
            new = returned.get(name, old)
            if new is old and name not in self.changeable:
                continue
            same_form = isinstance(new, Tensor) and (new.shape, new.dtype) == (old.shape, old.dtype)
            if not same_form:
                said = (
                    f"{new.dtype} of shape {tuple(new.shape)}"
                    if isinstance(new, Tensor)
                    else type(new).__name__
                )
                raise ValueError(
                    f"callback_on_step_end returned {name} as {said}; return {old.dtype} of shape {tuple(old.shape)}."
                )
            new = new.to(old.device)
            if name in self.changeable:
                changed = new
            elif not torch.equal(new, old):
                raise ValueError(
                    f"callback_on_step_end changed {name}, which tells what is committed and cannot be changed; "
                    "return it as it was, or None. pipe._interrupt = True ends the call."
                )
        return changed


def asked_tensors(callback: Any, names: Sequence[str] | None, allowed: Sequence[str]) -> Sequence[str]:
    """The tensors that a callback asks for: by name, or by itself if it is a `PipelineCallback` of diffusers.

    Raises:
        ValueError: a name that is not allowed; names those that are.
    """
    if isinstance(callback, (PipelineCallback, MultiPipelineCallbacks)):
        names = callback.tensor_inputs
    if names is None:
        return allowed
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ValueError(f"callback_on_step_end_tensor_inputs holds {unknown}; allowed are {list(allowed)}.")
    return names
