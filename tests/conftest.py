"""Set up for all tests: no network, and uninitialised memory that shows."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of huggingface_hub, which reads it once

import pytest
import torch
from torch.utils._device import _device_constructors

_device_constructors()  # cached now: `with torch.device("meta")` must know the true `torch.empty`, not the poisoned one
torch.set_num_threads(1)  # the tests' tensors are tiny: threads would only wait for each other


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` returns, so that code which reads a cell it never wrote gives nan or absurd ids."""

    def poisoned(make):
        def call(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.device.type == "meta":
                return tensor
            with torch.no_grad():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(float("nan"))
                elif tensor.dtype in (torch.int16, torch.int32, torch.int64):
                    tensor.fill_(torch.iinfo(tensor.dtype).min)
            return tensor

        return call

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
