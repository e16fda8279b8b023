"""The parts that all trainers share: optimisers with a cosine rate, a resumable checkpoint, and the record."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn

from visual_spec.files.documents import write_json
from visual_spec.files.program import is_of_memory, run_program
from visual_spec.files.whole import written_whole
from visual_spec.models.core.checkpoints import read_written, write_content
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.core.saved import SavedModel, quantised_as

_ANEW = "remove the file to start anew, or choose another folder"


class Resumed(Protocol):
    """What an interrupted run saves and restores."""

    def state_dict(self) -> object: ...

    def load_state_dict(self, saved: Any, /) -> object: ...


def cosine_rate(step: int, total: int, peak: float, warmup: int) -> float:
    """Return the learning rate at `step`: linear warm-up, then a cosine down to 2 % of `peak`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def print_record(record: dict[str, object]) -> None:
    """Print what a training has come to: its record, but for settings and loss curve."""
    print({name: value for name, value in record.items() if name not in ("settings", "loss")})


@torch.no_grad()
def round_matrices(model: SavedModel, out: Path) -> None:
    """Round the matrices of a model to 8 bits (e4m3) and all else to 16, in place, and store it in `out` so."""
    parts = {
        name: value.to(torch.float8_e4m3fn if value.ndim == 2 else torch.float16).contiguous()
        for name, value in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        parameter.copy_(parts[name])
    with written_whole(out) as folder:
        model.save_config(folder)
        config = json.loads((folder / "config.json").read_text())
        config.pop("_name_or_path", None)  # where it was trained is nobody's business
        write_json(folder / "config.json", config)
        save_file(parts, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with Nesterov momentum, at the rates of AdamW ("match_rms_adamw" of PyTorch's).

    `torch.optim.Muon`, of torch 2.9 and newer, orthogonalises in bfloat16 everywhere. A CPU without such units needs 20
    to 30 times as long for it: 4 of the 6 seconds of a step of the embedded transformer. Here a CPU takes float32.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            rate, momentum = float(group["lr"]), group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - momentum)
                update = _orthogonalise(p.grad.lerp(buffer, momentum))
                p.mul_(1 - rate * group["weight_decay"])
                # The rate that gives the update the root mean square of an AdamW update.
                p.add_(update, alpha=-rate * 0.2 * math.sqrt(max(p.shape)))


def _orthogonalise(matrix: Tensor) -> Tensor:
    """Move the singular values of a matrix towards 1 by five Newton-Schulz iterations."""
    a, b, c = 3.4445, -4.7750, 2.0315  # of the reference: steep at 0, within 0.7 and 1.2 afterwards
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide if wide.device.type == "cpu" else wide.bfloat16()
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide if matrix.shape[0] <= matrix.shape[1] else wide.T).to(matrix.dtype)


def muon_and_adamw(
    blocks: nn.Module, parameters: Iterable[nn.Parameter], rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of `blocks`, AdamW without decay for all other `parameters`.

    From the same weights of the embedded transformer, at a held-out loss of 0.69, 400 steps reached 0.575, and 400 of
    AdamW alone 0.602.
    """
    matrices = [p for p in blocks.parameters() if p.ndim == 2]
    known = set(map(id, matrices))
    others = [p for p in parameters if id(p) not in known]
    return [
        Muon(matrices, rate, weight_decay),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Descent:
    """The steps of optimisers under one cosine rate (`cosine_rate`).

    Args:
        optimisers: optimisers of disjoint parameters.
        total: steps of the run.
        peak, warmup: of the rate.
        clip: largest norm of all gradients together; None: no limit.
    """

    def __init__(
        self,
        optimisers: Sequence[torch.optim.Optimizer],
        total: int,
        peak: float,
        *,
        warmup: int = 100,
        clip: float | None = 1.0,
    ) -> None:
        self.optimisers, self.total, self.peak = list(optimisers), total, peak
        self.warmup, self.clip = warmup, clip
        self._groups = [group for optimiser in self.optimisers for group in optimiser.param_groups]

    def __call__(self, loss: Tensor, step: int) -> None:
        """Make one optimisation step on `loss`."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_([p for group in self._groups for p in group["params"]], self.clip)
        for group in self._groups:
            group["lr"] = cosine_rate(step, self.total, self.peak, self.warmup)
        for optimiser in self.optimisers:
            optimiser.step()

    def state_dict(self) -> dict[str, object]:
        return {"optimisers": [optimiser.state_dict() for optimiser in self.optimisers]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        # Loading replaces the parameter groups.
        self._groups = [group for optimiser in self.optimisers for group in optimiser.param_groups]


class ResumePoint:
    """Resumable state of a run in one file: its parts, the step, the loss curve and the seconds spent.

    Args:
        path: path of the file.
        every: steps between two saves.
        settings: plain values by name. A run resumes only with the same settings.
        reads: models that the run reads and does not change: a tokenizer, a teacher.
        parts: objects with `state_dict` and `load_state_dict`.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        settings: Mapping[str, object],
        *,
        reads: Iterable[nn.Module] = (),
        **parts: Resumed,
    ) -> None:
        self.path, self.every, self.parts = path, every, parts
        self.settings = {**settings, "weights of the models that are read": fingerprint(reads)}
        self.started = time.monotonic()
        self.seconds_before = 0.0
        self.curve: list[tuple[int, float]] = []
        self.saved_step = 0

    @property
    def seconds(self) -> float:
        """Training seconds so far, earlier runs included."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def kept(self) -> str:
        """What an interrupted run leaves, in words."""
        if not self.saved_step:
            return "nothing is saved"
        return f"{self.path} holds the state after step {self.saved_step}"

    def resume(self) -> int:
        """Restore the parts from an interrupted run. Returns the step to continue with, 0 if there was no such run.

        State saved on any device can be loaded.

        Raises:
            ValueError: the file is damaged, or is from a run with other settings or model sizes; the message names
                them.
        """
        if not self.path.exists():
            return 0
        saved = read_written(self.path)
        wanted = {"settings", "curve", "seconds", "step", *self.parts}
        if not isinstance(saved, dict) or not wanted <= saved.keys():
            raise ValueError(f"{self.path} is no interrupted run of this trainer; {_ANEW}.")
        self._refuse_other_settings(saved["settings"])
        try:
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{self.path} is of a run with a model of another size ({reason}); {_ANEW}."
            ) from error
        self.curve, self.seconds_before = saved["curve"], saved["seconds"]
        self.saved_step = saved["step"]
        return self.saved_step

    def _refuse_other_settings(self, before: Mapping[str, object]) -> None:
        nothing = object()
        changed = [
            f"{name}={before.get(name, 'nothing')!r} (now {self.settings.get(name, 'nothing')!r})"
            for name in {**before, **self.settings}
            if before.get(name, nothing) != self.settings.get(name, nothing)
        ]
        if changed:
            raise ValueError(
                f"{self.path} is of a run with {', '.join(changed)}; pass the same to go on, or {_ANEW}."
            )

    def after(self, step: int, total: int, loss: Tensor, *, curve_every: int = 20, digits: int = 4) -> None:
        """Record the loss of a step, save, and print, each at its own interval; the last step is saved, too.

        Raises:
            FloatingPointError: as of `refuse`, where the step has left something that is not finite.
        """
        if step % curve_every == 0:
            self.curve.append((step, round(loss.item(), digits)))
        if (step + 1) % self.every == 0 or step + 1 == total:
            self._save(step + 1, loss)
            print(f"step {step + 1}/{total} loss {loss.item():.4f} {self.seconds:.0f} s", flush=True)

    def refuse(self, step: int, loss: Tensor, what: str) -> NoReturn:
        """Stop a run that has come to what is not finite; the file stays as it is.

        Raises:
            FloatingPointError: names the step, the loss, and the state that is kept.
        """
        raise FloatingPointError(
            f"step {step}, loss {loss.item()}: {what} not finite, so training stops; {self.kept}. Look at the data, or "
            f"lower the learning rate: {_ANEW}."
        )

    def _save(self, step: int, loss: Tensor) -> None:
        """Write atomically: an interrupted save leaves the previous file."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        if wrong := _not_finite(state):
            self.refuse(step, loss, f"{wrong} is")
        record = {"settings": self.settings, "curve": self.curve, "seconds": self.seconds, "step": step}
        write_content(self.path, {**state, **record})
        self.saved_step = step

    def remove(self) -> None:
        """Remove the file; the run is done."""
        self.path.unlink(missing_ok=True)


def _not_finite(state: object) -> str:
    """Where in nested states there is a number that is not finite; "" for nowhere."""
    if isinstance(state, Tensor):
        checked = state.is_floating_point() and state.itemsize > 1
        return "" if not checked or state.isfinite().all() else "a tensor"
    parts = (
        state.items()
        if isinstance(state, Mapping)
        else enumerate(state if isinstance(state, list | tuple) else ())
    )
    for name, part in parts:
        if wrong := _not_finite(part):
            return f"{name}.{wrong}".removesuffix(".a tensor")
    return ""


class Trainer:
    """A resumable run: steps on a loss, and its record.

    An interrupted run resumes from `out/resume.pt` with the same result; the finished run removes the file.

    Args:
        model: what is trained; the record counts its parameters.
        settings: a dataclass with at least `steps`; with `compile`, the loss is compiled. A run resumes only with the
            same settings.
        out: folder of `resume.pt`.
        descend: the steps of optimisers (`Descent`), or a function of the loss and the step. A function's optimisers
            are among the parts.
        every: steps between two saves of `resume.pt`.
        reads: models that the run reads and does not change.
        parts: what `resume.pt` holds by name, beside `descend` (default: the model).
        facts: plain values of the data that a resumed run must share.
        curve_every, digits: of the loss curve.

    Raises:
        ValueError: weights to train are quantised, which no gradient reaches.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Any,
        out: Path,
        descend: Callable[[Tensor, int], None],
        *,
        every: int,
        reads: Iterable[nn.Module] = (),
        parts: Mapping[str, Resumed] | None = None,
        facts: Mapping[str, object] | None = None,
        curve_every: int = 20,
        digits: int = 4,
    ) -> None:
        self.model, self.settings, self.out, self.descend = model, settings, out, descend
        self.curve = dict(curve_every=curve_every, digits=digits)
        held: dict[str, Resumed] = {"model": model} if parts is None else dict(parts)
        self.networks = [part for part in held.values() if isinstance(part, nn.Module)]
        if (kind := quantised_as(model, *self.networks)) is not None:
            raise ValueError(
                f"the weights of {type(model).__name__} are quantised ({kind}), and no gradient reaches them; train "
                "the model that they were made of."
            )
        if isinstance(descend, Descent):
            held["descend"] = descend
        known = asdict(settings) | dict(facts or {})
        self.checkpoint = ResumePoint(out / "resume.pt", every, known, reads=reads, **held)

    def run(
        self,
        loss: Callable[..., Tensor | tuple[Tensor, Tensor, *tuple[object, ...]]],
        batches: Callable[[int], Sequence[object]],
        judge: Callable[[], Mapping[str, object]],
        save: Callable[[], object] = lambda: None,
        *,
        after: Callable[..., object] | None = None,
        folder: Path | None = None,
        dynamic: bool | None = None,
    ) -> dict[str, Any]:
        """Train, judge, save, and return the record, which is also written to `training.json`.

        Args:
            loss: of a batch; or the loss, the value that the curve shows, and more for `after`.
            batches: what the loss takes at a step, the same for the same step. Tensors move to the model's device.
            judge: figures for the record.
            save: writes the weights.
            after: is called with the step and what the loss gave more, when a step is made.
            folder: of `training.json` (default: `out`).
            dynamic: as of `torch.compile`.

        Raises:
            FloatingPointError: the loss, or what a step leaves, is not finite; the last good `resume.pt` stays, also
                where memory runs out.
        """
        steps, checkpoint = self.settings.steps, self.checkpoint
        compiled = getattr(self.settings, "compile", False)
        loss_of = torch.compile(loss, dynamic=dynamic) if compiled else loss
        device = next(self.model.parameters()).device
        for network in self.networks:
            network.train()
        try:
            for step in range(checkpoint.resume(), steps):
                batch = [part.to(device) if isinstance(part, Tensor) else part for part in batches(step)]
                terms = loss_of(*batch)
                minimised, shown, *more = terms if isinstance(terms, tuple) else (terms, terms)
                if not minimised.isfinite():
                    checkpoint.refuse(step, minimised, "the loss is")
                self.descend(minimised, step)
                if after is not None:
                    after(step, *more)
                checkpoint.after(step, steps, shown.detach(), **self.curve)
        except Exception as error:
            if is_of_memory(error):
                error.add_note(f"{checkpoint.kept}, with which only the same settings go on: {_ANEW}")
            raise
        for network in self.networks:
            network.eval()
        record = {
            "settings": asdict(self.settings),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": round(checkpoint.seconds),
            **judge(),
            "loss": checkpoint.curve,
        }
        save()
        write_json((folder or self.out) / "training.json", record)
        checkpoint.remove()
        return record


@dataclass(kw_only=True)
class OutOptions:
    """Options of all trainers. Folders have to be there, but for those that the run `writes`."""

    writes: ClassVar[tuple[str, ...]] = ("out",)

    out: Path = field(metadata={"help": "folder for weights and training.json; an interrupted run resumes"})


@dataclass(kw_only=True)
class RunOptions(OutOptions):
    """Options of trainers that run on any device."""

    device: str = "cpu"


def option(text: str, default: object = MISSING, **more: object) -> Any:
    """A field of a dataclass of options, with its help; required without a default."""
    return field(default=default, metadata={"help": text, **more})


def read_options(text: str, *kinds: Any) -> Any:
    """Dataclasses filled from the command line: one option a field; `text` is the help.

    Args:
        kinds: dataclasses; of their fields `metadata["help"]` is shown. The first one is
            `OutOptions`.

    Raises:
        ValueError: a folder to read is not there.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser(kinds, description=text, formatter_class=_Help)
    read = parser.parse_args_into_dataclasses()
    for name, value in vars(read[0]).items():
        if isinstance(value, Path) and name not in read[0].writes and not value.is_dir():
            raise ValueError(f"--{name} {value}: there is no such folder.")
    return read


def run_trainer(main: Callable[[], None]) -> NoReturn:
    """Run a trainer as a program."""
    sys.exit(run_program(main, Path(sys.argv[0]).stem, "a smaller --batch_size"))


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass
