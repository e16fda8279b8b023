"""The solver read off diffusers' scheduler takes the scheduler's steps, and what cannot be read is left to it."""

import copy
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from torch import Tensor

from visual_spec.models.continuous.dpm_solver import read_solver

COSINE: dict[str, Any] = dict(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
READ: dict[str, dict[str, Any]] = {
    "as VibeVoice ships it": {},
    "order 1": dict(solver_order=1),
    "order 3": dict(solver_order=3),
    "heun": dict(solver_type="heun"),
    "noise": dict(prediction_type="epsilon", beta_schedule="linear"),
    "data": dict(prediction_type="sample"),
    "flow": dict(prediction_type="flow_prediction", use_flow_sigmas=True),
    "no lower order at the end": dict(lower_order_final=False, final_sigmas_type="sigma_min"),
    "euler at the end": dict(euler_at_final=True),
    "solving for noise": dict(algorithm_type="dpmsolver", final_sigmas_type="sigma_min"),
    "other times": dict(timestep_spacing="trailing", use_lu_lambdas=True),
}


def scheduler(**changes: Any) -> DPMSolverMultistepScheduler:
    return DPMSolverMultistepScheduler(**COSINE | changes)


def network(index: int, sample: Tensor) -> Tensor:
    """Some output that is not linear in the sample."""
    return torch.sin(3 * sample + index) + 0.2 * index


@pytest.mark.fast_sets(17)
@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize("kind", READ)
def test_it_takes_the_steps_of_the_scheduler(kind, steps):
    own = scheduler(**READ[kind])
    before = copy.deepcopy(vars(own))
    solver = read_solver(own, steps)
    assert solver is not None and len(solver.steps) == steps
    assert repr(vars(own)) == repr(before)
    noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    own.set_timesteps(steps)
    assert solver.times == tuple(own.timesteps.tolist())
    want = noise
    for index, time in enumerate(own.timesteps):
        want = own.step(network(index, want), time, want, return_dict=False)[0]
    torch.testing.assert_close(solver.solve(noise, network), want, rtol=1e-10, atol=1e-10)


def test_half_precision_is_no_worse_than_the_schedulers():
    noise = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    own, solver = scheduler(), read_solver(scheduler(), 10)
    assert solver is not None
    exact, found = solver.solve(noise.double(), network), solver.solve(noise, network)
    own.set_timesteps(10)
    want = noise
    for index, time in enumerate(own.timesteps):
        want = own.step(network(index, want), time, want, return_dict=False)[0]
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().mean() < 1.2 * (want.double() - exact).abs().mean()


def test_what_is_random_or_not_linear_is_not_read():
    class Other(DPMSolverMultistepScheduler):
        pass

    for other in (
        scheduler(algorithm_type="sde-dpmsolver++"),
        scheduler(thresholding=True),
        scheduler(variance_type="learned_range"),
        Other(**COSINE),
        DDIMScheduler(),
        object(),
    ):
        assert read_solver(other, 10) is None


def test_a_scheduler_whose_steps_are_others_is_not_read(monkeypatch):
    plain = DPMSolverMultistepScheduler.convert_model_output
    monkeypatch.setattr(
        DPMSolverMultistepScheduler,
        "convert_model_output",
        lambda self, *args, **kwargs: plain(self, *args, **kwargs).clamp(-0.5, 0.5),
    )
    assert read_solver(scheduler(), 10) is None


def test_too_many_steps_for_the_schedule_fail_as_in_the_scheduler():
    with pytest.raises(IndexError):
        read_solver(scheduler(use_karras_sigmas=True), 10)
