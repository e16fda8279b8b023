"""Drawing with the vocabulary split over programs: the kernels, when they are taken, and how often they launch."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.without_numbers import NoHost, without_numbers
from tests.kernels.laws import window
from visual_spec.kernels import draw as whole
from visual_spec.kernels import split_draw as module
from visual_spec.kernels.law import LawNumbers
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.core.state import draw_near, draw_tokens


@pytest.mark.parametrize(
    ("slots", "count", "split"),
    [(1, 16384, True), (32, 16384, True), (2048, 16384, False), (1, 1024, False), (0, 16384, False)],
)
def test_few_slots_of_large_vocabularies_are_split(slots, count, split):
    assert module.splits(slots, LawNumbers(False, 1.0, 1.0, 0, 1.0, 5, 5 + count)) == split


@pytest.mark.parametrize("margins", [False, True])
@pytest.mark.parametrize("batch_size", [1, 8, 70])
def test_a_draw_takes_at_most_two_launches(monkeypatch, margins, batch_size):
    """Of the kernels, whatever the law; and the operators of PyTorch around them only allocate."""
    pytest.importorskip("triton")
    launched: list[str] = []

    class Watched:
        def __init__(self, kernel: str) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launched.append(f"{self.kernel} {grid}")

    class Working(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.__name__.partition(".")[0]
            if not func.is_view and name not in ("draw", "empty", "new_empty", "empty_like"):
                launched.append(name)
            return func(*args, **(kwargs or {}))

    for owner in (whole, module):
        for kernel in [name for name in vars(owner) if name.endswith("_kernel")]:
            monkeypatch.setattr(owner, kernel, Watched(kernel))
    monkeypatch.setattr(whole, "on_gpu", lambda tensor: True)
    for law in (
        TokenLaw(guidance_scale=2.0, top_k=5, top_p=0.9),
        TokenLaw(temperature=0.0),
        TokenLaw(guidance_scale=2.0),
    ):
        here = window(law, batch_size, 4, 5000, dtype=torch.bfloat16)
        launched.clear()
        with Working():
            whole.draw(here.logits, here.keys, here.slots, here.numbers, stream=0, margins=margins)
        if batch_size < 70:
            count = 4 * batch_size
            assert launched == [f"_split_kernel ({count}, 5)", f"_merge_kernel ({count},)"]
        else:
            assert launched == ["_draw_kernel (280,)"]


@pytest.mark.parametrize("near", [False, True])
def test_a_sampler_draws_in_one_operator(monkeypatch, near):
    """Without a copy of the logits: what stands around it has a number a slot, and waits for nobody."""
    large: list[str] = []

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            numbers = [one.numel() for one in tree_leaves((args, found)) if isinstance(one, torch.Tensor)]
            if max(numbers, default=0) >= 5000:
                large.append(func.__name__.partition(".")[0])
            return found

    law = TokenLaw(guidance_scale=2.0, top_k=5)
    here = window(law, 2, 3, 5000, dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits, slots = without_numbers((here.logits, here.slots))
        noise = without_numbers(CounterNoise(here.keys, "cpu"))
        checked = CheckedLaw(law, 100, deferred=True)
        checked.remember(torch.zeros(2, 1, dtype=torch.bool, device="cuda"), slots[:, :1])
        with NoHost(), Large():
            if near:
                tokens, _ = draw_near(checked, noise, logits, slots, True, 2.0**-8)
            else:
                tokens = draw_tokens(checked, noise, logits, slots, True)
        assert tokens.shape == (2, 3) and tokens.device.type == "cuda"
    assert large.count("draw") == 1 and (near or large == ["draw"])
