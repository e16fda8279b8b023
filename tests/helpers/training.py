"""What every trainer promises: a run that is killed ends as one that is not, and leaves what it says it leaves."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.training import tokens
from visual_spec.training.loop import ResumePoint


class Killed(BaseException):
    pass


@contextmanager
def killed_after(steps: int) -> Iterator[None]:
    """Within, a training ends when it has made so many steps; that it does is checked."""
    after = ResumePoint.after

    def until(checkpoint: ResumePoint, step: int, total: int, loss: Tensor, **more: Any) -> None:
        after(checkpoint, step, total, loss, **more)
        if step + 1 == steps:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumePoint, "after", until)
        with pytest.raises(Killed):
            yield


def equal(mine: nn.Module, theirs: nn.Module) -> bool:
    """Whether two networks have the same weights, bit for bit; files may hold them in another precision."""
    one, other = mine.state_dict(), theirs.state_dict()
    return one.keys() == other.keys() and all(
        torch.equal(*((a, b) if a.dtype == b.dtype else (a.float(), b.float())))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def trained(make: Callable[[], Any], train: Callable[..., Any], *parts: Any, **settings: Any) -> Any:
    """A run for `check_training`: a network is made anew, and trained with these parts."""

    def run(out: Path, every: int) -> tuple[Any, Any]:
        model = make()
        return train(model, *parts, out, every=every, **settings), model

    return run


def check_training(
    folder: Path,
    train: Callable[[Path, int], tuple[Any, ...]],
    *at: int,
    every: int,
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """Train whole, and killed and resumed: same weights, same loss curve; the files hold what was trained.

    Args:
        train: (folder, steps between two saves) -> the record, and the networks, made anew each time.
        at: a run is killed after so many steps, one run for each.
        saved: the classes that read the networks' weights, by folder below that of the run, in their order.

    Returns:
        The record of the whole run.
    """
    record, *whole = train(folder / "whole", 10**6)
    (written,) = (folder / "whole").rglob("training.json")
    assert json.loads(written.read_text()) == json.loads(json.dumps(record))
    assert not list(folder.rglob("resume.pt")) and not any(network.training for network in whole)
    for network, (name, kind) in zip(whole, saved.items(), strict=True):
        assert equal(kind.from_pretrained(folder / "whole" / name), network), name
    for stop in at:
        out = folder / str(stop)
        with killed_after(stop):
            train(out, every)
        assert (out / "resume.pt").exists() == (stop >= every)
        torch.manual_seed(99)  # what is drawn must not depend on the state of PyTorch's generator
        again, *resumed = train(out, every)
        assert again["loss"] == record["loss"] and not (out / "resume.pt").exists()
        assert all(equal(one, other) for one, other in zip(whole, resumed, strict=True)), stop
    return record


def shrink_pictures(monkeypatch: pytest.MonkeyPatch, trainer: Any, judge: str) -> None:
    """Let the module of a trainer read pictures of 16 tokens, and its function `judge` few held-out ones."""
    monkeypatch.setattr(
        trainer,
        "tokenize_dataset",
        lambda *args, **more: tokens.tokenize_dataset(*args, **{"side": 4, **more}),
    )
    monkeypatch.setattr(trainer, judge, partial(getattr(trainer, judge), count=8))


def tiny_raster(seed: int = 2, **changes: Any) -> LlamaGenTransformer:
    """A LlamaGen of captions over 4 x 4 tokens, the same at every call, that others start from."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(vocab_size=16, dim=16, num_layers=2, num_heads=2, grid_size=4)
    words: dict[str, Any] = dict(prefix_length=20, num_classes=None, caption_dim=8, zero_prefix_keys=False)
    return LlamaGenTransformer(**sizes | words | changes).eval()
