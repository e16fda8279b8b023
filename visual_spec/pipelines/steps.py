"""What follows the steps of a call: callbacks, `pipe._interrupt`, which ends it, the bar, and streams."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from torch import Tensor

from visual_spec.models.core.settings import whole
from visual_spec.samplers.core.base import STOP, Sampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import SO_FAR

if TYPE_CHECKING:
    from tqdm import tqdm

    from visual_spec.samplers.core.trace import SampleResult

StepCallback = Callable[[Any, int, int, dict[str, Tensor]], object]
Generators = torch.Generator | Sequence[torch.Generator] | None  # one for the batch, or one a sample
Laws = TokenLaw | list[TokenLaw]  # one, or one for each scale

# Set while `check_call` runs a call: it ends where it would compute.
ONLY_CHECKED: ContextVar[bool] = ContextVar("only checked", default=False)


class Checked(Exception):
    """Ends a call that is only checked."""


def listed(values: Any) -> list[Any]:
    """One or several values as a list; None as an empty one."""
    return [] if values is None else list(values) if isinstance(values, list | tuple) else [values]


def check_each(number: int, what: str, count: int, of: str = "prompts") -> None:
    """Refuse a number of values that is neither one for all prompts nor one for each.

    Raises:
        ValueError: names both numbers.
    """
    if number not in (1, count):
        raise ValueError(f"{number} {what} for {count} {of}; pass 1 for all, or {count}, one for each.")


class StepListener:
    """Calls `callback_on_step_end`, and notices `pipe._interrupt`.

    Args:
        pipe: the pipeline; its `_callback_tensor_inputs` are the tensors that it shows.
        callback: called as (pipe, step, timestep, tensors); None: nothing is called.
        names: of the tensors that it asks for; None: the first one, or those that a `PipelineCallback` names itself.
        changeable: of the tensors that it may replace, by returning a dictionary with others.

    Raises:
        TypeError: no callback, but something that cannot be called.
        ValueError: a name that is not allowed; names those that are.
    """

    def __init__(
        self,
        pipe: Any,
        callback: StepCallback | None,
        names: Sequence[str] | None,
        changeable: Sequence[str] = (),
    ) -> None:
        if callback is not None and not callable(callback):
            raise TypeError(
                f"callback_on_step_end={callback!r}; pass a function of (pipe, step, timestep, tensors)."
            )
        if isinstance(callback, (PipelineCallback, MultiPipelineCallbacks)):
            names = callback.tensor_inputs
        allowed = pipe._callback_tensor_inputs
        if unknown := [name for name in names or () if name not in allowed]:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs holds {unknown}; allowed are {list(allowed)}."
            )
        self.pipe, self.callback, self.changeable = pipe, callback, changeable
        self.names = allowed[:1] if names is None else names

    def __call__(self, step: int, timestep: Callable[[], int], **tensors: Tensor) -> str | Tensor | None:
        """Tell the callback about a target call.

        Args:
            timestep: gives the callback's third argument; asked only if there is a callback.

        Returns:
            What a sampler's callback returns: `STOP`, a tensor in place of the changeable one, or None.

        Raises:
            TypeError, ValueError: the callback returned something that cannot be used.
        """
        replaced = None
        vars(self.pipe)["_steps_made"] += 1  # as an attribute it would be taken for a component
        if self.callback is not None:
            shown = {name: tensors[name] for name in self.names}
            returned = self.callback(self.pipe, step, timestep(), dict(shown))
            if returned is not None:
                replaced = self._replaced(shown, returned)
        return STOP if self.pipe._interrupt else replaced

    def of_tokens(self, step: int, lengths: Tensor) -> str | Tensor | None:
        """A sampler's callback: as a call, of the committed tokens of each sample, `lengths [B]`."""
        tokens = {"tokens": committed_tokens(SO_FAR.get()())} if "tokens" in self.names else {}
        return self(step, lambda: int(lengths.min()), lengths=lengths, **tokens)

    def _replaced(self, shown: Mapping[str, Tensor], returned: object) -> Tensor | None:
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"callback_on_step_end returned a {type(returned).__name__}; return a dictionary of tensors by name, "
                "or None."
            )
        changed = None
        for name, old in shown.items():
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


def committed_tokens(result: SampleResult) -> Tensor:
    """The tokens of a decode so far, 0 at those that are open."""
    is_open = (result.trace.commit_call < 0).to(result.tokens.device)
    return result.tokens.masked_fill(is_open[(...,) + (None,) * (result.tokens.dim() - 2)], 0)


def planned_steps(sampler: object, model: object, parts: dict[str, Any], otherwise: int) -> int:
    """How often the callback of a decode is called, where the settings of the sampler say it, as of a masked model.

    Args:
        parts: what the sampler takes beside the model.
        otherwise: what is returned of the others: their tokens or columns.
    """
    planned = sampler.planned_calls(model, parts) if isinstance(sampler, Sampler) else None
    return otherwise if planned is None else planned


class Streams:
    """A pipeline whose samples can be looked at while they grow."""

    def stream(self, *args: Any, every: int = 1, **kwargs: Any) -> Generator[Any]:
        """Draw or play, and yield the output of the call again and again: so far, and at last whole.

        Of pictures and clips, tokens that are open are grey, and `trace.commit_call` is -1 there; a next-scale model
        shows the picture that its scales make so far. Of music, `audios` is what is heard so far, and `codes` and
        `trace` are None until the end. The last output equals what the call itself returns, bit by bit. Decoding goes
        on in a thread until the iterator ends or is closed; until then, nothing else may use the pipeline.

        Args:
            every: target calls from one output to the next; music comes by stretches (`stretch_in_s`).
            args, kwargs: as for the call.

        Raises:
            ValueError, TypeError: bad input, before any computation.

        Example:
            >>> for output in pipe.stream("a large red circle on a plain sky background", every=4):
            ...     output.images[0].save("circle.png")
        """
        from visual_spec.pipelines import streaming

        whole("every", every)
        this: Any = self
        taken = inspect.signature(type(this).__call__).parameters
        if not hasattr(this, "_partial") and "callback_on_audio" not in taken:
            raise TypeError(f"a {type(this).__name__} has nothing to show before its end; call it.")
        this.check_call(*args, **kwargs)
        output_type = kwargs.get("output_type", taken["output_type"].default)
        kwargs["return_dict"] = True
        if "callback_on_audio" in taken:
            return streaming.stream_waves(this, args, kwargs, output_type)
        return streaming.stream_pictures(
            this, every, args, kwargs, lambda result: this._partial(result, output_type)
        )


class DecodeProgress:
    """Sampler callback: moves a progress bar by committed tokens, and passes each target call on to a listener.

    On CUDA the lengths are copied while the next call runs and shown one call late, so that watching costs no
    synchronisation. A listener is called at once, and synchronises only if it looks at the tensor; what it returns is
    passed on to the sampler.

    Args:
        bar: a tqdm bar over `batch_size * num_tokens` tokens, without the known ones.
        num_tokens: tokens of one sample.
        known: tokens of all samples that were not to be decoded, such as those around what is painted anew.
        listener: called as (call_index, lengths [B]) after every target call.
        unit: what is counted.
    """

    def __init__(
        self,
        bar: tqdm,
        num_tokens: int,
        listener: Callable[[int, Tensor], object] | None = None,
        *,
        unit: str = "tokens",
        known: int = 0,
    ):
        self.bar = bar
        bar.unit = f" {unit}"
        self.num_tokens = num_tokens
        self.listener = listener
        self.unit, self.known = unit, known
        self._pending: tuple[int, Tensor, torch.cuda.Event] | None = None

    def __call__(self, call_index: int, lengths: Tensor) -> object:
        if not self.bar.disable:
            if lengths.is_cuda:
                self.finish()
                copied = torch.cuda.Event()
                host = lengths.to("cpu", non_blocking=True)
                copied.record()
                self._pending = (call_index, host, copied)
            else:
                self._show(call_index, lengths)
        return None if self.listener is None else self.listener(call_index, lengths)

    def finish(self) -> None:
        """Show the copy that is still on its way, if any."""
        if self._pending is not None:
            call_index, lengths, copied = self._pending
            copied.synchronize()
            self._pending = None
            self._show(call_index, lengths)

    def _show(self, call_index: int, lengths: Tensor) -> None:
        committed = int(lengths.clamp(max=self.num_tokens).sum()) - self.known
        calls = call_index + 1  # the prefill is call 0
        per_call = committed / lengths.shape[0] / calls
        self.bar.set_postfix_str(
            f"{calls} call{'s' * (calls > 1)}, {per_call:.2f} {self.unit} per call", refresh=False
        )
        self.bar.update(committed - self.bar.n)
