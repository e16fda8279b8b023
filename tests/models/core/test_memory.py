"""A batch that does not fit the GPU is refused by the bytes that its cache takes; memory is stood in for."""

from typing import Any

import psutil
import pytest
import torch

from tests.helpers.cached_decoders import case
from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_transformer
from visual_spec.models.core import offload
from visual_spec.models.next_token.llamagen import TextCondition


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", ["llamagen", "janus", "emu3"])
def test_what_is_refused_is_what_would_be_allocated(monkeypatch, name, guided):
    model: Any = tiny_transformer()
    condition: Any = TextCondition(torch.zeros(4, 6, 8), torch.ones(4, 6, dtype=torch.bool))
    if name != "llamagen":
        model, condition = case(name)
    settings: Any = dict(batch_size=4, guided=guided, window=3)
    state = model.prefill(condition, **settings)
    held = [tensor for tensor in state.buffers() if tensor.ndim > 3]  # keys and values
    needed = sum(tensor.nbytes for tensor in held)
    assert needed > 1000
    monkeypatch.setattr(offload, "free_bytes", lambda device: needed)
    model.prefill(condition, **settings)
    monkeypatch.setattr(offload, "free_bytes", lambda device: needed - 1)
    refuses(ValueError, "4 samples.*3", model.prefill, condition, **settings)
    monkeypatch.setattr(offload, "free_bytes", lambda device: needed // 4 - 1)
    refuses(ValueError, "no room", model.prefill, condition, **settings)


def test_unused_memory_that_pytorch_holds_is_free(monkeypatch):
    for name, value in [("memory_reserved", 70), ("memory_allocated", 50), ("mem_get_info", (1000, 5000))]:
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert offload.free_bytes(torch.device("cuda")) == 1020
    assert offload.free_bytes(torch.device("meta")) is None


def test_on_the_host_a_batch_has_to_fit_what_is_available(monkeypatch):
    """Before any of it is taken: systems hand out memory that they do not have, and end the process later."""
    available = psutil.virtual_memory().available
    free = offload.free_bytes(torch.device("cpu"))
    assert free is not None and 0.5 * available < free < 2 * available
    many = 10**9
    with pytest.raises(
        ValueError, match=r"cache of 1000000000 samples takes .* GB, cpu has .* GB free; pass at most"
    ):
        offload.check_cache_fits(2**20, many, torch.device("cpu"))
    offload.check_cache_fits(2**20, 4, torch.device("cpu"))
