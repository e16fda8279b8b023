"""Teach a model of pictures by reinforcement learning (GRPO): `things` learns to do without guidance.

    python examples/grpo.py --output_dir grpo           # half an hour on two cores; goes on where it was stopped
    python examples/grpo.py --output_dir grpo --time    # what drawing costs, plainly and by windows: three minutes

A step draws groups of pictures, lets the parser of the data say which attributes of the prompt each picture has, and
makes the tokens of those above the mean of their group more likely (Shao et al. 2024, arXiv 2402.03300, section 4.1).
There is no critic. The ratios start from the log-probabilities that the sampler itself returns (`output_logprobs`), so
no pass over the pictures is spent on them; a window draws the tokens of plain decoding, so it changes the time alone.
Names and defaults are those of TRL's `GRPOConfig` where it has them.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import HfArgumentParser

from visual_spec import ImagePipeline
from visual_spec.data import things, things_parser
from visual_spec.eval.intervals import rate, share_figure
from visual_spec.eval.machine import environment
from visual_spec.files.documents import write_json
from visual_spec.files.whole import whole_file
from visual_spec.pipelines.texts import as_condition

Reward = Callable[[str, np.ndarray], float]


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    output_dir: str  # of checkpoint.pt, grpo.json, times.json and of the trained pipeline
    max_steps: int = 40
    generation_batch_size: int = 64  # pictures a step
    num_generations: int = 8  # pictures of one prompt: a group
    drawn_together: int = 16  # pictures a call of the pipeline, at which a window pays most on two cores
    per_device_train_batch_size: int = 16  # pictures an update
    num_iterations: int = 2  # updates for each picture
    learning_rate: float = 2e-4
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    epsilon: float = 0.2  # how far a ratio counts
    beta: float = 0.0  # weight of the divergence from the model before training
    seed: int = 0
    save_steps: int = 1
    eval_prompts: int = 500  # held-out ones, before and after
    time: bool = False  # time both ways of drawing, and train nothing
    time_steps: int = 3


@dataclass
class Rollout:
    """Pictures of a step, N = groups x `num_generations`, one group after the other."""

    prompts: list[str]
    tokens: Tensor  # long [N, L]
    logprobs: Tensor  # float [N, L], of each token when it was drawn
    pictures: np.ndarray  # uint8 [N, H, W, 3]
    calls: float  # mean target calls of a picture

    def score(self, reward: Reward) -> Tensor:
        return torch.tensor([reward(*pair) for pair in zip(self.prompts, self.pictures, strict=True)])


def attributes_right(prompt: str, picture: np.ndarray) -> float:
    """The reward: the share of a caption's attributes that the picture has, and as much again if it has all."""
    hits = list(things_parser.score(prompt, picture).values())
    return (sum(hits) / len(hits) + all(hits)) / 2


def draw(pipe: Any, prompts: Sequence[str], first_seed: int, config: Config) -> Rollout:
    """Draw one picture for each prompt, without guidance; picture i has the seed `first_seed + i`."""
    outputs = []
    for start in range(0, len(prompts), config.drawn_together):
        some = list(prompts[start : start + config.drawn_together])
        seeds = [torch.Generator().manual_seed(first_seed + start + place) for place in range(len(some))]
        law = dict(guidance_scale=1.0, temperature=config.temperature, top_k=0, top_p=1.0)
        outputs.append(pipe(some, generator=seeds, output_type="np", output_logprobs=True, **law))
    calls = torch.cat([output.trace.target_calls for output in outputs])
    return Rollout(
        list(prompts),
        torch.cat([output.tokens for output in outputs]),
        torch.cat([output.trace.logprobs.to(output.tokens.device) for output in outputs]),
        np.rint(255 * np.concatenate([output.images for output in outputs])).astype(np.uint8),
        calls.float().mean().item(),
    )


def log_probabilities(policy: Any, pipe: Any, prompts: Sequence[str], tokens: Tensor, temperature: float):
    """Of every token under the policy, float [N, L], by one teacher-forced pass."""
    condition = as_condition(*pipe.encode_prompt(list(prompts)))
    return -F.cross_entropy(
        policy.teacher_forced(tokens, condition).mT / temperature, tokens, reduction="none"
    )


def advantages_of(rewards: Tensor, num_generations: int) -> Tensor:
    """Rewards [N] less the mean of their group, over its standard deviation."""
    groups = rewards.view(-1, num_generations)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def grpo_loss(
    logprobs: Tensor,
    drawn: Tensor,
    advantages: Tensor,
    epsilon: float,
    beta: float = 0.0,
    reference: Tensor | None = None,
) -> Tensor:
    """The mean over pictures and tokens of the clipped objective, negated.

    Args:
        logprobs, drawn: [N, L], under the policy as it is, and as it was when the tokens were drawn.
        advantages: [N].
        reference: [N, L], under the model before training; with it, `beta` times an estimate of the divergence is
            added (Schulman's k3, as in the paper).
    """
    ratio, gain = (logprobs - drawn).exp(), advantages[:, None]
    loss = -torch.minimum(ratio * gain, ratio.clamp(1 - epsilon, 1 + epsilon) * gain).mean()
    if reference is not None:
        gap = reference - logprobs
        loss = loss + beta * (gap.exp() - gap - 1).mean()
    return loss


class Trainer:
    """A policy, its optimiser, and the pipeline that draws with the policy's weights."""

    def __init__(
        self, pipe: Any, config: Config, prompts_of: Callable[[int, int], list[str]], reward: Reward
    ) -> None:
        """`prompts_of(count, seed)` gives prompts to train on."""
        self.pipe, self.config, self.prompts_of, self.reward = pipe, config, prompts_of, reward
        self.policy = copy.deepcopy(pipe.transformer).requires_grad_(True)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False) if config.beta else None
        self.optimiser = torch.optim.AdamW(
            self.policy.parameters(), lr=config.learning_rate, weight_decay=0.0
        )
        self.curve: list[dict[str, float]] = []

    def rollout(self, step: int) -> Rollout:
        """Draw the pictures of a step. They depend on the step, the seed and the weights alone."""
        size, group = self.config.generation_batch_size, self.config.num_generations
        step = self.config.seed * 10**6 + step
        asked = self.prompts_of(size // group, step)
        return draw(self.pipe, [prompt for prompt in asked for _ in range(group)], step * size, self.config)

    def learn(self, rollout: Rollout, rewards: Tensor, step: int) -> dict[str, float]:
        """Update the policy `num_iterations` times for every minibatch. Groups of one reward teach nothing, and are left out.

        Raises:
            RuntimeError: before the first update, the policy gives other log-probabilities than the sampler did.
        """
        config, policy = self.config, self.policy
        advantages = advantages_of(rewards, config.num_generations)
        shuffled = torch.randperm(
            len(rewards), generator=torch.Generator().manual_seed(config.seed + 10**6 * step)
        )
        useful = shuffled[(advantages[shuffled] != 0) | bool(config.beta)]
        clipped, losses, apart = [], [], 0.0
        batches = useful.split(config.per_device_train_batch_size) * config.num_iterations
        for number, rows in enumerate(batches):
            prompts, tokens = [rollout.prompts[row] for row in rows], rollout.tokens[rows]
            inputs = self.pipe, prompts, tokens, config.temperature
            logprobs, drawn = log_probabilities(policy, *inputs), rollout.logprobs[rows]
            if number == 0:
                apart = (logprobs - drawn).abs().max().item()
                if not apart < 1e-3:
                    raise RuntimeError(f"step {step}: log-probabilities differ by {apart} from the sampler's")
            reference = None
            if self.reference is not None:
                with torch.no_grad():
                    reference = log_probabilities(self.reference, *inputs)
            gains = advantages[rows].to(logprobs)
            loss = grpo_loss(logprobs, drawn, gains, config.epsilon, config.beta, reference)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            self.optimiser.step()
            losses.append(loss.item())
            ratio = (logprobs - drawn).detach().exp()
            clipped.append(((ratio - 1).abs() > config.epsilon).float().mean().item())
        self.pipe.transformer.load_state_dict(policy.state_dict())
        mean: Any = lambda values: float(np.mean(values)) if values else 0.0  # noqa: E731
        return {"loss": mean(losses), "clipped": mean(clipped), "apart": apart, "taught": len(useful)}

    def step(self, step: int) -> None:
        """Draw, score, learn, and keep what came of it."""
        busy = [time.process_time()]
        rollout = self.rollout(step)
        busy.append(time.process_time())
        rewards = rollout.score(self.reward)
        busy.append(time.process_time())
        learned = self.learn(rollout, rewards, step)
        busy.append(time.process_time())
        seconds = dict(zip(("drawing", "scoring", "training"), np.diff(busy).tolist(), strict=True))
        facts = {"reward": rewards.mean().item(), "whole": (rewards == 1).float().mean().item()}
        nats = -rollout.logprobs.sum(1).mean().item()
        self.curve.append({**facts, **learned, "nats": nats, "calls": rollout.calls, **seconds})

    def steps(self) -> Iterator[int]:
        """Go through the steps that are left, and save."""
        for step in range(len(self.curve), self.config.max_steps):
            self.step(step)
            if (step + 1) % self.config.save_steps == 0 or step + 1 == self.config.max_steps:
                with whole_file(self._checkpoint) as path, path.open("wb") as file:
                    torch.save({**self._state(), "optimiser": self.optimiser.state_dict()}, file)
            yield step

    def resume(self) -> None:
        """Go on where a run with the same settings was stopped, if there was one."""
        if not self._checkpoint.exists():
            return
        saved = torch.load(self._checkpoint, weights_only=True)
        if saved["settings"] != self._state()["settings"]:
            raise ValueError(
                f"{self._checkpoint} is of a run with other settings; choose another --output_dir"
            )
        self.policy.load_state_dict(saved["policy"])
        self.pipe.transformer.load_state_dict(saved["policy"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.curve = saved["curve"]

    @property
    def _checkpoint(self) -> Path:
        return Path(self.config.output_dir) / "checkpoint.pt"

    def _state(self) -> dict[str, Any]:
        free = ("output_dir", "max_steps", "save_steps", "eval_prompts", "time", "time_steps")
        settings = {name: value for name, value in asdict(self.config).items() if name not in free}
        return {"settings": settings, "policy": self.policy.state_dict(), "curve": self.curve}


def accuracy(pipe: Any, config: Config) -> dict[str, Any]:
    """What a pipeline gets right of held-out prompts, with 95 % intervals, and the nats of a picture."""
    prompts = things.held_out_prompts(config.eval_prompts, seed=1)
    rollout = draw(pipe, prompts, 10**9, config)
    hits = [things_parser.score(*pair) for pair in zip(prompts, rollout.pictures, strict=True)]
    return {
        "all_correct": rate([all(hit.values()) for hit in hits]),
        "mean_attribute": share_figure([sum(hit.values()) / len(hit) for hit in hits]),
        "nats": -rollout.logprobs.sum(1).mean().item(),
        "calls": rollout.calls,
    }


def both_ways(trainer: Trainer) -> list[dict[str, Any]]:
    """Draw the pictures of the first steps plainly and with the pipeline's own sampler, and train on them."""
    pipe, rows = trainer.pipe, []
    ways = {"plain": pipe.plain, "default": pipe.sampler}
    for step in range(trainer.config.time_steps):
        drawn, seconds = {}, {}
        for way, sampler in list(ways.items())[:: 1 if step % 2 else -1]:
            pipe.sampler, start = sampler, time.perf_counter()
            drawn[way] = trainer.rollout(step)
            seconds[way] = time.perf_counter() - start
        start, rewards = time.perf_counter(), drawn["default"].score(trainer.reward)
        seconds["scoring"] = time.perf_counter() - start
        start, facts = time.perf_counter(), trainer.learn(drawn["default"], rewards, step)
        seconds["training"] = time.perf_counter() - start
        one, other = drawn["plain"], drawn["default"]
        rows.append(
            {
                "seconds": seconds,
                "equal_tokens": torch.equal(one.tokens, other.tokens),
                "logprobs_apart": (one.logprobs - other.logprobs).abs().max().item(),
                "calls": {way: drawn[way].calls for way in ways},
                "reward": rewards.mean().item(),
                "taught": facts["taught"],
            }
        )
    return rows


def main() -> None:
    (config,) = HfArgumentParser(Config).parse_args_into_dataclasses()  # pyright: ignore[reportArgumentType]
    out = Path(config.output_dir)
    pipe: Any = ImagePipeline.from_pretrained("things")
    pipe.set_progress_bar_config(disable=True)
    trainer = Trainer(pipe, config, lambda *asked: things.training_prompts(*asked), attributes_right)
    document: dict[str, Any] = {"environment": environment(pipe.device, pipe.transformer.dtype)}
    document["settings"] = {one.name: getattr(config, one.name) for one in fields(config)[1:]}
    if config.time:
        write_json(out / "times.json", {**document, "steps": both_ways(trainer)}, indent=1)
        return
    before = out / "before.json"
    if not before.exists():
        write_json(before, accuracy(pipe, config))
    trainer.resume()
    for step in trainer.steps():
        print(step, {name: round(value, 4) for name, value in trainer.curve[-1].items()}, flush=True)
    pipe.save_pretrained(out / "trained")
    document |= {"before": json.loads(before.read_text()), "after": accuracy(pipe, config)}
    write_json(out / "grpo.json", {**document, "curve": trainer.curve}, indent=1)


if __name__ == "__main__":
    sys.exit(main())
