"""The window in the first model runner of vLLM, which runs on CPUs too: its interface for drafts of `custom_class`.

This runner takes no logits processor beside drafts. So the proposer, which is handed the model when it is loaded, puts
the law and the noise before what the model returns as logits. It was run eagerly and on CPUs; on a GPU use the second
runner.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

from visual_spec.serving.request import PictureRequest
from visual_spec.serving.vllm.start import check_cache, windows_of
from visual_spec.serving.windows import Rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class JacobiProposer:
    """`speculative_config={"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": W - 1}`.

    Raises:
        ValueError: the model does not serve pictures, or see `check_start`.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config, self.checked = vllm_config, False
        self.runner: Any = None
        windows = windows_of(vllm_config)
        if windows is None:
            raise ValueError(
                "the configuration of the model has no visual_spec; pass --additional-config "
                '\'{"visual_spec": {"grid": [height, width], "image_ids": [first, last + 1]}}\'.'
            )
        self.windows = windows

    def load_model(self, target: Any) -> None:
        """Put law and noise before the logits of the model. The runner that calls is the one whose requests count.

        Raises:
            RuntimeError: it is called by something else.
        """
        runner = sys._getframe(1).f_locals.get("self")
        if not hasattr(runner, "input_batch") or not hasattr(runner, "requests"):
            raise RuntimeError(
                f"load_model called by {type(runner).__name__}; only vLLM's first model runner fits."
            )
        self.runner, usual = runner, target.compute_logits

        def compute_logits(hidden_states: Tensor, *more: object, **named: object) -> Tensor | None:
            logits = usual(hidden_states, *more, **named)
            batch = self.rows()
            if logits is None or sum(rows.count for rows in batch) != len(logits):
                return logits  # vLLM measures memory, with no request in the batch
            if not self.checked:
                check_cache(self.vllm_config)
                self.checked = True
            return self.windows.force(logits, batch)

        target.compute_logits = compute_logits

    def rows(self) -> list[Rows]:
        """Return the requests of the runner's batch; those that are new to it join, and finished ones leave."""
        runner, batch, first = self.runner, [], 0
        known = self.windows.handles
        self.windows.leave(known - set(runner.requests))
        for handle, fed in zip(runner.input_batch.req_ids, runner.input_batch.spec_token_ids, strict=False):
            state = runner.requests[handle]
            if handle not in known and state.sampling_params is not None:
                self.windows.join(handle, PictureRequest.of(state.sampling_params.extra_args))
            rows = Rows(handle, first, len(state.output_token_ids), list(fed), state.num_prompt_tokens)
            batch.append(rows)
            first += rows.count
        return batch

    def propose(self, sampled_token_ids: list[list[int]], *more: object, **named: object) -> list[list[int]]:
        """Return the drafts of the requests in the order of the batch; none where nothing was drawn."""
        handles = self.runner.input_batch.req_ids
        return [
            self.windows.next_drafts(handle) if new else []
            for handle, new in zip(handles, sampled_token_ids, strict=False)
        ]
