"""Steps under one rate are those of plain loops, and a run that was interrupted goes on where it was."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.refusals import refuses
from visual_spec.training.loop import Descent, ResumePoint, Trainer, cosine_rate, muon_and_adamw

TOTAL = 9


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Linear(4, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    # Steep, so that gradients are clipped.
    return 50 * model(torch.randn(8, 3, generator=generator)).square().mean()


def descent(model: Any) -> Descent:
    return Descent(muon_and_adamw(model[1], model.parameters(), 0.1, 0.02), TOTAL, 0.1, warmup=3)


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def orthogonalise(matrix: Tensor, coefficients: tuple, steps: int, eps: float) -> Tensor:
    """The iteration of Muon on singular values, where it is a polynomial of each."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(steps):
        values = sum(c * values**power for c, power in zip(coefficients, (1, 3, 5), strict=True))
    return (left * values @ right).to(matrix.dtype)


def test_steps_are_those_of_a_plain_loop(monkeypatch):
    # PyTorch's own iterates in bfloat16, which no tolerance for float32 allows.
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", orthogonalise)
    model = network()
    other = copy.deepcopy(model)
    matrices = [other[1][0].weight, other[1][1].weight]  # the matrices of the blocks, and nothing else
    rest = [p for p in other.parameters() if not any(p is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.1, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    descend = descent(model)
    for step in range(TOTAL):
        descend(loss_of(model, step), step)
        other.zero_grad()
        loss_of(other, step).backward()
        norm = torch.stack([p.grad.norm() for p in other.parameters()]).norm()
        assert step or norm > 1
        for p in other.parameters():
            p.grad.mul_((1 / (norm + 1e-6)).clamp(max=1))
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = cosine_rate(step, TOTAL, 0.1, 3)
        muon.step()
        adamw.step()
    for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, capsys):
    def run(out: Path, until: int) -> tuple[nn.Sequential, ResumePoint]:
        model = network()
        descend = descent(model)
        checkpoint = ResumePoint(out / "resume.pt", 3, {"steps": TOTAL}, model=model, descend=descend)
        for step in range(checkpoint.resume(), until):
            loss = loss_of(model, step)
            descend(loss, step)
            checkpoint.after(step, TOTAL, loss, curve_every=2, digits=3)
        return model, checkpoint

    whole, record = run(tmp_path / "whole", TOTAL)
    run(tmp_path / "parts", 5)  # saved after step 2, so that two steps are lost
    again, resumed = run(tmp_path / "parts", TOTAL)
    assert equal(whole, again) and not equal(whole, network())
    assert resumed.curve == record.curve and [step for step, _ in record.curve] == [0, 2, 4, 6, 8]
    told = [line.split(" loss")[0] for line in capsys.readouterr().out.splitlines()]
    assert told[:3] == ["step 3/9", "step 6/9", "step 9/9"]
    resumed.remove()
    assert not (tmp_path / "parts" / "resume.pt").exists()
    resumed.remove()


def test_a_run_with_other_settings_is_refused_by_name(tmp_path: Path):
    """Going on would train with the new ones and record them as if they had held from the start."""
    teacher, settings = network(), {"steps": TOTAL, "seed": 0, "scales": (1, 2)}

    def resume(settings: dict, *reads: nn.Module, **parts: nn.Module) -> int:
        parts = parts or {"model": network()}
        return ResumePoint(tmp_path / "resume.pt", 1, settings, reads=reads, **parts).resume()

    left = ResumePoint(tmp_path / "resume.pt", 1, settings, reads=[teacher], model=network())
    left.after(0, TOTAL, torch.ones(()))
    assert resume(settings, teacher) == 1
    for name, value, message in [
        (
            "steps",
            100,
            rf"resume.pt is of a run with steps={TOTAL} \(now 100\); pass the same to go on, or remove",
        ),
        ("scales", (1, 3), r"scales=\(1, 2\) \(now \(1, 3\)\)"),
        ("bfloat16", True, "bfloat16='nothing'.*True"),
    ]:
        refuses(ValueError, message, resume, {**settings, name: value}, teacher)
    with pytest.raises(ValueError, match=r"seed=0.*3\), scales=\(1, 2\)"):
        resume({**settings, "seed": 3, "scales": ()}, teacher)
    with torch.no_grad():
        teacher[0].weight[0, 0] += 1e-3
    refuses(ValueError, "read='4075f9df6d03'", resume, settings, teacher)


@dataclass
class Settings:
    steps: int = 12


@pytest.mark.parametrize(
    ("spoil", "at", "message"),
    [
        (lambda loss: loss * math.nan, 7, "step 7, loss nan: the loss is not finite"),
        (lambda loss: loss / 0, 7, "step 7, loss inf: the loss is not finite"),
        # The loss is finite, and its gradient is not; the step makes the weights so.
        (lambda loss: loss + (loss - loss).sqrt(), 8, r"step 9, loss [\d.]+: model\.0\.weight is not finite"),
        (
            lambda loss: loss + (loss - loss).sqrt(),
            11,
            r"step 12, loss [\d.]+: model\.0\.weight is not finite",
        ),
    ],
)
def test_what_is_not_finite_stops_the_run_and_the_last_good_state_stays(tmp_path: Path, spoil, at, message):
    def run(spoil: Any = None, **judge: Any) -> tuple[nn.Module, dict]:
        model = network()
        trainer = Trainer(model, Settings(), tmp_path, descent(model), every=3)
        record = trainer.run(
            lambda step: spoil(loss_of(model, step)) if spoil and step == at else loss_of(model, step),
            lambda step: (step,),
            dict,
            lambda: torch.save(model.state_dict(), tmp_path / "model.pt"),
        )
        return model, record

    refuses(
        FloatingPointError, message + rf".*resume\.pt holds the state after step {at // 3 * 3}", run, spoil
    )
    assert [path.name for path in tmp_path.iterdir()] == ["resume.pt"]
    model, record = run()  # goes on from the good state
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    model_of_one_go = network()
    descend = descent(model_of_one_go)
    for step in range(12):
        descend(loss_of(model_of_one_go, step), step)
    assert equal(model, model_of_one_go) and record["settings"] == {"steps": 12}


def test_a_resume_file_with_any_byte_changed_is_refused_by_name_or_is_the_same(tmp_path: Path):
    path, wanted = tmp_path / "resume.pt", nn.Linear(3, 2)
    ResumePoint(path, 1, {}, model=wanted).after(0, 3, torch.ones(()))
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        model = nn.Linear(3, 2)
        try:
            assert ResumePoint(path, 1, {}, model=model).resume() == 1
            assert equal(model, wanted), place
        except ValueError as error:
            assert "resume.pt" in str(error)
            refused += 1
    assert refused > len(whole) / 7 / 3


def test_what_is_no_run_of_this_trainer_is_refused(tmp_path: Path):
    path, settings = tmp_path / "resume.pt", {"steps": 3}

    def resume(model: nn.Module) -> int:
        return ResumePoint(path, 1, settings, model=model).resume()

    ResumePoint(path, 1, settings, model=nn.Linear(3, 2)).after(0, 3, torch.ones(()))
    whole = path.read_bytes()
    refuses(ValueError, r"resume\.pt.*size mismatch", resume, nn.Linear(3, 5))
    path.write_bytes(whole[:-200])
    refuses(ValueError, r"resume\.pt.*truncated", resume, nn.Linear(3, 2))
    for content in ({"model": {}}, [1]):
        torch.save(content, path)
        refuses(ValueError, r"resume\.pt.*interrupted", resume, nn.Linear(3, 2))
