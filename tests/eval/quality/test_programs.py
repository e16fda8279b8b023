"""Networks that are TorchScript programs: not run unless trusted, and their failures are one line each."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from visual_spec.cli import main
from visual_spec.eval.quality import programs


class Fine(nn.Module):
    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        return x.mean([2, 3, 4])


class Raising(nn.Module):
    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        raise RuntimeError("no such layer")


class OneRow(nn.Module):
    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        return x.mean([2, 3, 4])[:1].expand(7, -1)


class Pair(nn.Module):
    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> tuple[Tensor, Tensor]:
        return x, x


class NoNumber(nn.Module):
    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        return x.mean([2, 3, 4]) * float("nan")


class Writing(nn.Module):
    """Writes a file, as any TorchScript may."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Tensor, rescale: bool, resize: bool, return_features: bool) -> Tensor:
        made = torch.from_file(self.path, True, 8)  # makes the file
        return x.mean([2, 3, 4]) + 0 * made.sum()


def save(network: nn.Module, path: Path) -> Path:
    torch.jit.script(network.eval()).save(str(path))
    return path


def videos(path: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    np.savez(path, arr_0=rng.integers(0, 256, (5, 3, 8, 8, 3), np.uint8))
    return path


def score(folder: Path, program: Path, *more: str) -> int:
    sets = [str(videos(folder / "one.npz")), "--reference", str(videos(folder / "two.npz", 1))]
    return main(
        ["score", *sets, "--metrics", "fvd", "--i3d", str(program), "--out", str(folder / "s"), *more]
    )


def test_a_program_runs_only_where_it_is_trusted(tmp_path, capsys):
    program = save(Writing(str(tmp_path / "written")), tmp_path / "program.pt")
    assert score(tmp_path, program) == 2
    said = capsys.readouterr().err
    assert programs.checksum(program) in said and "--trust-program" in said and said.count("\n") == 1
    assert not (tmp_path / "written").exists()
    assert score(tmp_path, program, "--trust-program") == 0
    assert (tmp_path / "written").exists()  # the planted program does what it is said to do


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (Raising(), "no such layer"),
        (OneRow(), "returned [7, 3] for 5 videos"),
        (Pair(), "returned a tuple"),
        (NoNumber(), "returned nan"),
    ],
)
def test_a_program_that_fails_is_one_line(tmp_path, capsys, network, said):
    program = save(network, tmp_path / "program.pt")
    assert score(tmp_path, program, "--trust-program") == 2
    error = capsys.readouterr().err
    assert said in error and str(program) in error and error.count("\n") == 1, error


def test_features_are_the_network_s_own(tmp_path):
    network = programs.VideoProgram(save(Fine(), tmp_path / "program.pt"), "cpu")
    given = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8, 3), np.uint8)
    expected = given.astype(np.float64).mean((1, 2, 3))
    np.testing.assert_allclose(network(given).numpy(), expected, rtol=1e-5)
