"""Set up for all tests: no network, uninitialised memory that shows, and a mark on those that compare bits."""

import functools
import gc
import inspect
import logging
import os
from collections import defaultdict
from collections.abc import Generator
from types import CodeType, FunctionType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of huggingface_hub, which reads it once

import pytest
import torch
from torch.utils._device import _device_constructors

_device_constructors()  # cached now: `with torch.device("meta")` must know the true `torch.empty`, not the poisoned one
gc.disable()  # until all tests are imported: what imports make stays
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


@pytest.fixture(autouse=True)
def send_messages_where_they_are_caught() -> None:
    """Undo what a command of an earlier test set: it writes messages to standard error itself."""
    logger = logging.getLogger("visual_spec")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


_COMPARES_BITS = {"equal", "array_equal", "tobytes"}


@functools.cache
def _compares_bits(code: CodeType) -> bool:
    """Whether code, or code inside it, names a comparison of arrays bit by bit."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return not _COMPARES_BITS.isdisjoint(code.co_names) or any(map(_compares_bits, inner))


@functools.cache
def _test_compares_bits(test: FunctionType) -> bool:
    """Whether a test, or a function of ours that it names, compares arrays bit by bit."""
    named = (test.__globals__.get(name) for name in test.__code__.co_names)
    helpers = [one for one in named if isinstance(one, FunctionType) and one.__module__.startswith("tests.")]
    return any(_compares_bits(one.__code__) for one in (test, *helpers))


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "of each test without the mark every_set run at most N parameter sets, spread evenly from first to last"
    parser.addoption("--parameter-sets", type=int, metavar="N", help=what)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, Any, Any]:
    """Mark tests that compare bits before marks select, and thin out parameter sets after it."""
    for item in items:
        test = inspect.unwrap(getattr(item, "function", None) or len)
        if isinstance(test, FunctionType) and _test_compares_bits(test):
            item.add_marker("bitwise")
    for group in _by_function(items):
        mark = group[0].get_closest_marker("fast_sets")
        fast = {id(one) for one in _spread(group, mark.args[0])} if mark else None
        for item in group:
            if fast is not None and id(item) not in fast:
                item.add_marker("slow")
    result = yield
    most = config.getoption("parameter_sets")
    if most:
        thinned = [
            group if group[0].get_closest_marker("every_set") else _spread(group, most)
            for group in _by_function(items)
        ]
        kept = {id(one) for group in thinned for one in group}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]
    return result


def pytest_collection_finish() -> None:
    """Collect the garbage of tests only: libraries and collected tests are millions of objects that stay."""
    gc.freeze()
    gc.enable()


def _by_function(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    sets: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        sets[item.nodeid.partition("[")[0]].append(item)
    return list(sets.values())


def _spread(group: list[pytest.Item], most: int) -> list[pytest.Item]:
    if len(group) <= most:
        return group
    return [group[round(place * (len(group) - 1) / max(most - 1, 1))] for place in range(most)]
