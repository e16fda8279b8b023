"""The law and the noise as a logits processor of vLLM: of the second model runner, and of the first without a window.

One class has both interfaces: both runners read the entry point `vllm.logits_processors`, and refuse a class that is
not theirs. The first runner takes no logits processor beside drafts; there `JacobiProposer` calls the same code.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

import contextlib
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from visual_spec.serving.request import PictureRequest
from visual_spec.serving.vllm.start import windows_of
from visual_spec.serving.windows import Rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState

# Every vLLM beside this package loads this class, whatever it serves. One without these interfaces serves no pictures
# (`start.missing`), but must not fail for them.
FirstInterface: Any = type("NoFirstInterface", (), {})
SecondInterface: Any = type("NoSecondInterface", (), {})
with contextlib.suppress(ImportError):
    from vllm.v1.sample.logits_processor.interface import LogitsProcessor as FirstInterface
    from vllm.v1.sample.logits_processor.interface import MoveDirectionality
with contextlib.suppress(ImportError):
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SecondInterface


class PictureLaw(FirstInterface, SecondInterface):
    """Gives each row of a picture the token that guidance, filters, temperature and the slot's own noise draw.

    Requests say seed, law and pair in `SamplingParams.extra_args` (`PictureRequest.of`), and ask vLLM for temperature
    0: then vLLM keeps a draft exactly if it is this token. Requests without a seed there are left as they are.
    """

    def __init__(self, vllm_config: VllmConfig, *more: Any) -> None:
        """Take `(vllm_config, req_states)` of the second runner, or `(vllm_config, device, is_pin_memory)`."""
        self.windows = windows_of(vllm_config)
        self.states = more[0] if len(more) == 1 else None
        # Of the first runner, by row: handle, output tokens, length of the prompt.
        self.places: dict[int, tuple[int, list[int], int | None]] = {}
        self.entered = 0

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request before it enters, by ValueError: as `PictureRequest.of`, or vLLM would change the law."""
        if PictureRequest.of(sampling_params.extra_args) is None:
            return
        params = sampling_params
        changed = {
            "temperature": params.temperature == 0,
            "presence_penalty": params.presence_penalty == 0,
            "frequency_penalty": params.frequency_penalty == 0,
            "repetition_penalty": params.repetition_penalty == 1,
            "n": params.n == 1,
        }
        if wrong := [name for name, right in changed.items() if not right]:
            listed = ", ".join(f"{name}={getattr(params, name)}" for name in wrong)
            raise ValueError(
                f"{listed} of the engine for a picture; pass temperature=0, no penalties and n=1 there. The law of a "
                "picture, its temperature too, stands in extra_args."
            )

    # -- the second model runner -------------------------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        if self.windows is None:
            return False
        request = PictureRequest.of(sampling_params.extra_args)
        self.windows.join(req_idx, request)
        return request is not None

    def apply(self, logits: Tensor, ctx: LogitsContext | None = None) -> Tensor:
        if self.windows is None:
            return logits
        batch = self._first_rows() if ctx is None else rows_of(ctx, self.states)
        return self.windows.force(logits, batch)

    # -- the first model runner, without drafts ----------------------------------------------------------------------

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None or self.windows is None:
            return
        for index in batch_update.removed:
            self._leave(index)
        for index, params, prompt, output in batch_update.added:
            self._leave(index)
            self.entered += 1
            self.places[index] = self.entered, output, None if prompt is None else len(prompt)
            self.windows.join(self.entered, PictureRequest.of(params.extra_args))
        for source, target, kind in batch_update.moved:
            moved, other = self.places.pop(source, None), self.places.pop(target, None)
            if moved is not None:
                self.places[target] = moved
            if kind == MoveDirectionality.SWAP and other is not None:
                self.places[source] = other

    def _leave(self, index: int) -> None:
        if self.windows is not None and index in self.places:
            self.windows.leave([self.places.pop(index)[0]])

    def _first_rows(self) -> list[Rows]:
        return [
            Rows(handle, row, len(output), (), prompt)
            for row, (handle, output, prompt) in self.places.items()
        ]


def rows_of(ctx: LogitsContext, states: LogitsProcRequestState) -> list[Rows]:
    """Return the requests of a batch of the second runner. Copies three numbers a row to the host.

    Args:
        ctx: its `LogitsContext`.
        states: its `LogitsProcRequestState`.
    """
    table = torch.stack([part.long() for part in (ctx.expanded_idx_mapping, ctx.pos, ctx.input_ids)])
    owners, places, fed = table.tolist()
    batch, lengths = [], states.prompt_len.np
    for owner, rows in groupby(range(len(owners)), owners.__getitem__):
        first, *drafts = rows
        slot = places[first] - int(lengths[owner]) + 1
        if slot >= 0:
            batch.append(Rows(owner, first, slot, [fed[row] for row in drafts], int(lengths[owner])))
    return batch
