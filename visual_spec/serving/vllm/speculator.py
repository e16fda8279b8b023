"""The window in the second model runner of vLLM: its speculator, and a sampler that keeps vLLM's own seeded noise."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from visual_spec.samplers.core.acceptance import accepted_prefix
from visual_spec.serving.vllm.start import check_cache, num_drafts_of, windows_of
from visual_spec.serving.windows import Rows

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState


class JacobiSpeculator(BaseSpeculator):
    """Returns the drafts that `Windows` made when it drew the tokens. Chosen by `register`."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        self.vllm_config, self.device, self.states = vllm_config, device, req_states
        self.num_drafts, self.windows = num_drafts_of(vllm_config), windows_of(vllm_config)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        check_cache(self.vllm_config)

    def capture(self) -> None:
        pass

    def propose(self, input_batch: InputBatch, *more: object, **named: object) -> Tensor:
        """Return long [R, W - 1]; zeros for requests that are not for us, and where no drafts are tested next."""
        count = input_batch.num_reqs
        drafts = torch.zeros(count, self.num_drafts, dtype=torch.int64)
        unused = named.get("num_speculative_tokens") == 0
        if self.windows is None or unused or named.get("dummy_run") or named.get("is_profile"):
            return drafts.to(self.device)
        for row, handle in enumerate(input_batch.idx_mapping_np[:count].tolist()):
            own = self.windows.next_drafts(handle)
            drafts[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
        return drafts.to(self.device)


class OwnNoiseSampler:
    """Keeps a draft exactly if vLLM's own sampler draws it in that row: vLLM's plain tokens of a seed, in fewer calls.

    No guidance: vLLM has none. Requests give `seed` and `temperature` to vLLM, and no seed in `extra_args`.

    Args:
        usual: vLLM's sampler.
    """

    def __init__(self, usual: Sampler, windows: Any) -> None:
        self.usual, self.windows = usual, windows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.usual, name)

    def __call__(
        self, logits: Tensor, batch: InputBatch, draft_logits: object = None, invalid_drafts: object = None
    ) -> SamplerOutput:
        places, fed = batch.positions[batch.logits_indices], batch.input_ids[batch.logits_indices]
        drawn, _ = self.usual.sample(
            logits,
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            places,
            fed,
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
        )
        self.windows.calls += 1
        bounds = batch.cu_num_logits_np[: batch.num_reqs + 1].tolist()
        width = max(stop - first for first, stop in zip(bounds, bounds[1:], strict=False))
        tokens = torch.zeros(batch.num_reqs, width, dtype=drawn.dtype, device=drawn.device)
        count = torch.ones(batch.num_reqs, dtype=batch.seq_lens.dtype, device=drawn.device)
        lengths = self.usual.req_states.prompt_len.np
        for row, (first, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            handle = int(batch.idx_mapping_np[row])
            own, drafts = drawn[first:stop], fed[first + 1 : stop]
            count[row] = accepted_prefix(drafts == own[:-1]) + 1
            tokens[row, : stop - first] = own
            slot = int(places[first]) - int(lengths[handle]) + 1
            if slot == 0:  # a new request
                self.windows.leave([handle])
            if 0 <= slot < len(self.windows.served.places):
                slots = slot + torch.arange(stop - first, device=drawn.device)[None]
                ids = (own - self.windows.served.first).long()[None]
                rows = Rows(handle, first, slot, drafts.tolist())
                self.windows.settle(rows, slots, ids, count[row, None].long())
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            count,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.usual.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


class OwnNoiseState(DefaultModelState):
    """A model whose `get_model_state_cls` returns this class is decoded by `OwnNoiseSampler`."""

    def custom_sampler(self, sampler: Sampler) -> tuple[OwnNoiseSampler, OwnNoiseSampler]:
        own = OwnNoiseSampler(sampler, windows_of(self.vllm_config))
        return own, own
