"""A training loop without verl, of seconds a run: the same start, task, losses and sizes as the runs through verl.

On-policy, one model on one core. The group term is `dmpo.groups`' coefficients times the sequence scores, as on verl's
workers. What verl does besides (Ray, vLLM, FSDP2, other random numbers) has no counterpart here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmpo.groups import group_statistics, sequence_scores

from .cut import cut_coefficients, published_micro_batches
from .settings import Setting
from .tasks import Task

LEARNING_RATE = 5e-4
ROLLOUTS = 128
"""Of a step, whatever the size of a group."""


@dataclass
class Rollouts:
    """Responses to `prompts`, G to each and in their order.

    Attributes:
        prompts: positions in the task's prompts, P.
        tokens: (P * G, T) int64 tokens, padded on the right.
        mask: (P * G, T) bool, the response and its end.
    """

    prompts: list[int]
    tokens: Tensor
    mask: Tensor


class Policy:
    """A causal language model that works on several responses to each of a task's prompts at once."""

    def __init__(self, model: Any, task: Task) -> None:
        self.model, self.task = model, task
        encoded = [torch.tensor(task.encode(prompt)) for prompt in task.prompts]
        width = max(map(len, encoded))
        self.ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0), value=task.pad) for p in encoded])
        self.present = self.ids != task.pad

    def _read(self, prompts: list[int], n: int) -> tuple[Any, Tensor, Tensor]:
        """Cache, mask and last logits of the prompts, n times each."""
        ids, present = self.ids[prompts], self.present[prompts]
        out = self.model(input_ids=ids, attention_mask=present, use_cache=True, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(n)
        return out.past_key_values, present.repeat_interleave(n, 0), out.logits[:, -1].repeat_interleave(n, 0)

    @torch.no_grad()
    def sample(self, prompts: list[int], n: int, generator: torch.Generator) -> Rollouts:
        """n responses to each prompt at temperature 1."""
        cache, present, logits = self._read(prompts, n)
        running = torch.ones(len(prompts) * n, dtype=torch.bool)
        tokens, masks = [], []
        for _ in range(self.task.max_tokens):
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
            token = torch.where(running, token, self.task.pad)
            tokens.append(token)
            masks.append(running)
            running = running & (token != self.task.end)
            if not running.any():
                break
            present = torch.cat([present, masks[-1][:, None]], 1)
            positions = present.sum(1, keepdim=True) - 1
            logits = self.model(
                input_ids=token[:, None], attention_mask=present, position_ids=positions, past_key_values=cache
            ).logits[:, -1]
        return Rollouts(prompts, torch.stack(tokens, 1), torch.stack(masks, 1))

    def log_prob(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, both (B, T) in nats, differentiable."""
        n = len(rollouts.tokens) // len(rollouts.prompts)
        cache, present, first = self._read(rollouts.prompts, n)
        before = torch.cat([present, rollouts.mask[:, :-1]], 1)
        positions = (before.cumsum(1) - 1)[:, present.shape[1] :].clamp_min(0)
        rest = self.model(
            input_ids=rollouts.tokens[:, :-1], attention_mask=before, position_ids=positions, past_key_values=cache
        ).logits
        log_p = torch.cat([first[:, None], rest], 1).log_softmax(-1)
        return log_p.gather(-1, rollouts.tokens[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def advantages(scores: Tensor, n: int) -> Tensor:
    """GRPO's, (B,), as verl has them: (score - mean) / (standard deviation + 1e-6) over each prompt's n scores."""
    group = scores.view(-1, n)
    return ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-6)).flatten()


def base_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, clip_high: float) -> Tensor:
    """PPO's clipped loss, mean over tokens: verl's vanilla loss with `token-mean`, without the dual clip."""
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(0.8, 1 + clip_high)
    loss = torch.maximum(-advantage[:, None] * ratio, -advantage[:, None] * clipped)
    return (loss * mask).sum() / mask.sum()


def coefficients(setting: Setting, phi: Tensor, scores: Tensor, n: int, step: int, rng: np.random.Generator) -> Tensor:
    """beta * dL/dphi of each row, (B,), of the unsplit batch or as the published recipe has it in verl."""
    group = torch.arange(len(phi)) // n
    tau = setting.tau
    if setting.auto_tau is not None:
        tau = max(setting.auto_tau * float(phi.view(-1, n).std(1).mean()), 1e-6)
    options: dict[str, Any] = dict(
        temperature=setting.alpha,
        policy_temperature=tau,
        divergence=setting.divergence,
        zero_signal=setting.zero_signal,
    )
    score = advantages(scores, n) if setting.target == "advantage" else scores
    if setting.cut:
        coef = cut_coefficients(phi, score, group, published_micro_batches(len(phi), rng), **options)
    else:
        coef = group_statistics(phi, score, group, reward=scores, **options).coef
    return setting.beta_at(step) * coef


def train(
    policy: Policy,
    setting: Setting,
    seed: int,
    steps: int,
    interval: int,
    progress: Callable[[int], None] = lambda step: None,
) -> list[dict[str, float]]:
    """Train a copy of the policy and measure it every `interval` steps, before the first and after the last as well."""
    task = policy.task
    policy = Policy(copy.deepcopy(policy.model), task)
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    n = setting.group_size
    curve = []
    for step in range(steps + 1):
        if step % interval == 0 or step == steps:
            curve.append({"step": step, **task.measure(policy, seed)})
            progress(step)
        if step == steps:
            return curve
        rollouts = policy.sample(task.batch(ROLLOUTS // n, step, rng), n, generator)
        scores = torch.tensor(task.scores(rollouts))
        advantage, mask = advantages(scores, n), rollouts.mask
        old = coef = None
        for _ in range(setting.epochs):
            log_prob, entropy = policy.log_prob(rollouts)
            phi = sequence_scores(log_prob, mask, setting.length_norm)
            if old is None:
                old = log_prob.detach()
                if setting.divergence is not None:
                    coef = coefficients(setting, phi.detach(), scores, n, step + 1, rng).float()
            loss = log_prob.sum() * 0
            if setting.base:
                loss = loss + base_loss(log_prob, old, advantage, mask, setting.clip_high)
            if setting.entropy:
                loss = loss - setting.entropy * (entropy * mask).sum() / mask.sum()
            if coef is not None:
                loss = loss + (coef * phi).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            optimizer.step()
    raise AssertionError("unreachable")
