"""The example of GRPO on a tiny model: its losses, its advantages, its steps, and what it refuses."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from examples.grpo import Config, Trainer, advantages_of, both_ways, draw, grpo_loss
from examples.grpo import score as score_of_middle
from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_pipeline
from visual_spec.data import things
from visual_spec.pipelines.texts import as_condition
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

PROMPTS = ["a red circle", "a blue square", "a circle on a square", "red on blue"]


def score(prompt: str, picture: np.ndarray) -> dict[str, bool]:  # of another data set
    grey = picture.astype(float).mean(-1)
    return {"left": bool(grey[:, :4].mean() > grey[:, 4:].mean() - 4), "light": bool(grey.mean() > 120)}


def config(folder: Any, **changes: Any) -> Config:
    settings: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=2, generation_batch_size=8, num_generations=4, drawn_together=3
    )
    return Config(
        **{
            **settings,
            "per_device_train_batch_size": 4,
            "num_iterations": 2,
            "learning_rate": 0.01,
            "trainable": "",
            "temperature": 1.0,
            **changes,
        }
    )


def trainer(folder: Any, **changes: Any) -> Trainer:
    pipe = tiny_pipeline(SpeculativeJacobiSampler(window=4))
    return Trainer(pipe, config(folder, **changes), lambda count, seed: PROMPTS[seed % 3 :][:count], score)


def parameters(one: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in one.policy.parameters()]


def test_on_a_bandit_the_gradient_is_that_of_the_expected_reward_and_a_step_raises_it():
    """In closed form, over all groups of two draws: rewards of 0 and 1 make its advantages a difference of rewards."""
    laws = torch.tensor([[0.3, -1.0, 0.8, 0.1, -0.4], [0.0, 2.0, -0.5, 0.2, 1.0]], dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0, 1.0]], dtype=torch.float64)

    def expected(laws: torch.Tensor) -> torch.Tensor:  # two tokens a sample, each with a reward
        return (laws.softmax(-1) * rewards).sum()

    policy = laws.clone().requires_grad_(True)
    drawn, chances, loss = policy.detach().log_softmax(-1), laws.softmax(-1), torch.zeros(())
    for place, arms in product(range(2), product(range(5), repeat=2)):
        chosen = torch.tensor(arms)
        gains = advantages_of(rewards[place, chosen], 2)
        logprobs = policy.log_softmax(-1)[place, chosen, None]
        loss = loss + chances[place, chosen].prod() * grpo_loss(
            logprobs, drawn[place, chosen, None], gains, config(".")
        )
    loss.backward()
    assert policy.grad is not None
    exact = torch.autograd.functional.jacobian(expected, laws)
    torch.testing.assert_close(policy.grad, -exact / (2 * (np.sqrt(0.5) + 1e-4)))
    after = expected(laws - 0.5 * policy.grad)
    assert after - expected(laws) > 0.25 * (exact**2).sum() / (2 * np.sqrt(0.5))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_before_the_first_update_of_a_step_all_ratios_are_1(tmp_path, temperature):
    """Of tokens that windows committed, also by weights that were trained: a teacher-forced pass gives the same."""
    one = trainer(tmp_path, temperature=temperature)
    for step in one.steps():
        rollout = one.rollout(step + 1)
        assert rollout.calls < 16  # tokens of the pictures
        with torch.no_grad():
            forced = one.log_probabilities(one.policy, rollout, torch.arange(8))
        ratios = (forced - rollout.logprobs).exp()
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-5)
        assert rollout.logprobs.min() < -1  # they are not all 1


def test_the_middle_is_that_of_all_things():
    def picture(*places: tuple[str, int, int]) -> np.ndarray:
        return things.render(things.ThingsScene(tuple(things.Thing(*place) for place in places), "sky"))

    one, two = "a fox on a sky background", "a fox left of a pig on a sky background"
    centred = score_of_middle(one, picture(("fox", 64, 64)))
    assert all(centred.values()) and list(centred) == ["thing", "count", "background", "across", "down"]
    beside = score_of_middle(one, picture(("fox", 72, 64)))
    assert (beside["across"], beside["down"]) == (False, True)
    # 24 and 96 pixels: four left of the middle, at the limit; and eight.
    for far, across in ((96, True), (88, False)):
        found = score_of_middle(two, picture(("fox", 24, 72), ("pig", far, 72)))
        assert (found["relation"], found["across"], found["down"]) == (True, across, False)
    empty = score_of_middle(one, picture())
    assert not empty["across"] and not empty["down"] and empty["background"]


def test_rewards_of_a_group_are_normalised():
    rewards = torch.tensor([1.0, 0.5, 0.5, 0.0, 0.25, 0.25, 0.25, 0.25])
    found = advantages_of(rewards, 4)
    spread = np.std([1.0, 0.5, 0.5, 0.0], ddof=1)
    expected = [0.5 / spread, 0, 0, -0.5 / spread, 0, 0, 0, 0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=1e-3, atol=1e-6)


def test_the_loss_is_that_of_a_loop_over_tokens():
    torch.manual_seed(0)
    logprobs, drawn, reference = torch.randn(3, 3, 5).sub(3).mul(0.3).double()
    advantages, total = torch.tensor([1.3, -0.7, 0.4]).double(), 0.0
    for row, gain in enumerate(advantages.tolist()):
        for new, old, first in zip(logprobs[row], drawn[row], reference[row], strict=True):
            ratio = float(torch.exp(new)) / float(torch.exp(old))
            total -= min(ratio * gain, min(max(ratio, 0.9), 1.1) * gain)
            other = float(torch.exp(first)) / float(torch.exp(new))
            total += 0.3 * (other - np.log(other) - 1)
    settings = config(".", epsilon=0.1, beta=0.3)
    found = grpo_loss(logprobs, drawn, advantages, settings, reference)
    assert found.item() == pytest.approx(total / 15, rel=1e-9)


def test_a_step_is_what_plain_code_makes_of_the_same_pictures(tmp_path):
    """One minibatch of all pictures, once: where the ratios are 1, the gradient is that of weighted likelihoods."""
    one = trainer(tmp_path, per_device_train_batch_size=8, num_iterations=1, max_steps=1)
    rollout = one.rollout(0)
    assert [rollout.prompts[place] for place in (0, 3, 4, 7)] == [PROMPTS[0], PROMPTS[0], *[PROMPTS[1]] * 2]
    for place, prompt in enumerate(rollout.prompts):
        seed = torch.Generator().manual_seed(place)
        alone = tiny_pipeline()(prompt, generator=seed, guidance_scale=1.0, output_type="np")
        assert torch.equal(alone.tokens[0].flatten(), rollout.tokens[place].flatten())
        hits = [*score(prompt, np.rint(255 * alone.images[0])).values()]
        assert rollout.rewards[place] == (sum(hits) / 2 + all(hits)) / 2
    groups = rollout.rewards.numpy().reshape(2, 4)
    gains = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-4)
    gains = torch.tensor(gains.ravel(), dtype=torch.float32)
    used = gains != 0
    assert 0 < used.sum() <= 8
    model = tiny_pipeline().transformer.requires_grad_(True)
    tokens = rollout.tokens.flatten(1)[used]
    condition = as_condition(*one.pipe.encode_prompt([rollout.prompts[row] for row in used.nonzero()[:, 0]]))
    laws = model.teacher_forced(tokens, condition).log_softmax(-1)
    likely = laws.gather(-1, tokens[..., None])[..., 0]
    (-(likely * gains[used, None]).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0).step()
    assert list(one.steps()) == [0]
    assert one.curve[0]["loss"] == pytest.approx(-gains[used].mean().item(), abs=1e-5)
    assert one.curve[0]["taught"] == used.sum()
    for found, expected in zip(one.policy.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    for found, policy in zip(one.pipe.transformer.parameters(), one.policy.parameters(), strict=True):
        assert torch.equal(found, policy)  # what is drawn next is drawn by it


@pytest.mark.slow
def test_it_learns(tmp_path):
    one = trainer(tmp_path, max_steps=16, generation_batch_size=32, num_generations=16, num_iterations=4)
    list(one.steps())
    rewards = [row["reward"] for row in one.curve]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert any(row["clipped"] > 0 for row in one.curve)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, beta):
    whole, first = trainer(tmp_path / "a", beta=beta), trainer(tmp_path / "b", beta=beta)
    list(whole.steps())
    next(first.steps())
    again = trainer(tmp_path / "b", beta=beta)
    again.resume()
    assert list(again.steps()) == [1]
    for found, expected in zip(parameters(again), parameters(whole), strict=True):
        assert torch.equal(found, expected)
    timeless = [
        [{name: value for name, value in row.items() if name not in ("drawing", "training")} for row in curve]
        for curve in (again.curve, whole.curve)
    ]
    assert timeless[0] == timeless[1]
    with pytest.raises(ValueError, match="other settings"):
        trainer(tmp_path / "b", beta=beta, epsilon=0.3).resume()


def test_another_law_than_the_samplers_stops_it(tmp_path):
    one = trainer(tmp_path)
    rollout = one.rollout(0)
    one.config = replace(one.config, temperature=0.9)
    refuses(RuntimeError, "step 0.*nats away from the sampler's law", one.learn, rollout, 0)


def test_both_ways_draw_the_same(tmp_path):
    rows = list(both_ways(trainer(tmp_path, time_steps=2)))
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["equal_tokens"] and row["logprobs_apart"] < 1e-5
        assert row["calls"]["default"] < row["calls"]["plain"] == 16
        assert set(row["seconds"]) == {"plain", "plain, 4", "default", "training"}


def test_pictures_depend_on_their_seeds_alone(tmp_path):
    pipe = tiny_pipeline()
    one, other = (
        draw(pipe, PROMPTS, 7, replace(config(tmp_path), drawn_together=count), score) for count in (1, 4)
    )
    assert torch.equal(one.tokens, other.tokens) and one.hits == other.hits
