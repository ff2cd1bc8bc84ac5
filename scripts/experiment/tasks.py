"""What is learnt, how answers are graded, and how a policy is measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dmpo.cpu import np_run, quickstart, toy_model, toy_task
from dmpo.report import metrics
from dmpo.tasks.np_bench import reward

if TYPE_CHECKING:
    from .standin import Policy, Rollouts

SAMPLES = 64
"""Responses to a prompt that coverage and the like are about."""
KS = (1, 4, 16, 64)


class Task:
    """Prompts, their rewards, and a measurement.

    Attributes:
        prompts: chat messages of each.
        max_tokens: of a response.
        end, pad: tokens.
    """

    prompts: list[list[dict[str, str]]]
    max_tokens: int

    def __init__(self, start: Path) -> None:
        self.start = start
        self.tokenizer = AutoTokenizer.from_pretrained(start / "model")
        self.end, self.pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id

    def model(self) -> Any:
        """The model that every run starts from."""
        return AutoModelForCausalLM.from_pretrained(self.start / "model", dtype=torch.float32)

    def encode(self, prompt: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def texts(self, rollouts: Rollouts) -> list[str]:
        rows = zip(rollouts.tokens.tolist(), rollouts.mask.tolist(), strict=True)
        kept = [[t for t, m in zip(row, mask, strict=True) if m and t != self.end] for row, mask in rows]
        return self.tokenizer.batch_decode(kept)

    def batch(self, number: int, step: int, rng: np.random.Generator) -> list[int]:
        """`number` prompts of training step `step`."""
        raise NotImplementedError

    def scores(self, rollouts: Rollouts) -> list[float]:
        """Reward of each rollout."""
        raise NotImplementedError

    def measure(self, policy: Policy, seed: int) -> dict[str, float]:
        """`accuracy`, `coverage`, `effective` and more; means over prompts."""
        raise NotImplementedError


class TwoDigits(Task):
    """The quickstart's task and start: two digits that add up to a number.

    Measured exactly, since all answers can be written down: with p the probability of each right answer, accuracy is
    their sum, coverage the expected share of them among 64 samples, and effective the exponential of their entropy
    given that the answer is right, as a share of their number.
    """

    before = ""
    max_tokens = 8

    def __init__(self, start: Path, seed: int) -> None:
        if not (start / "model").exists():
            self.make_start(start, seed)
        super().__init__(start)
        self.numbers = list(toy_task.NUMBERS)
        self.prompts = [[{"role": "user", "content": toy_task.prompt(number)}] for number in self.numbers]
        answers = [f"{a}+{b}" for a in range(10) for b in range(10)]
        rows = [
            self.tokenizer.encode(self.before + answer, add_special_tokens=False) + [self.end] for answer in answers
        ]
        self.answers = torch.tensor(rows)  # of one length
        self.right = torch.tensor([[answer in toy_task.answers(n) for answer in answers] for n in self.numbers])

    def make_start(self, start: Path, seed: int) -> None:
        quickstart.make_start(start, seed)

    def batch(self, number: int, step: int, rng: np.random.Generator) -> list[int]:
        """Every number equally often; those that a small batch leaves out come next."""
        first = number * step
        return [i % len(self.prompts) for i in range(first, first + number)]

    def scores(self, rollouts: Rollouts) -> list[float]:
        n = len(rollouts.tokens) // len(rollouts.prompts)
        numbers = [str(self.numbers[p]) for p in rollouts.prompts for _ in range(n)]
        return [
            toy_task.compute_score("", text[len(self.before) :], number) if text.startswith(self.before) else 0.0
            for text, number in zip(self.texts(rollouts), numbers, strict=True)
        ]

    @torch.no_grad()
    def probabilities(self, policy: Policy) -> np.ndarray:
        """Of each number's answers, (16, 100)."""
        from .standin import Rollouts

        prompts = list(range(len(self.prompts)))
        tokens = self.answers.repeat(len(prompts), 1)
        every = Rollouts(prompts, tokens, torch.ones_like(tokens, dtype=torch.bool))
        return policy.log_prob(every)[0].sum(-1).view(len(prompts), -1).double().exp().numpy()

    def measure(self, policy: Policy, seed: int) -> dict[str, float]:
        p = np.where(self.right, self.probabilities(policy), 0)
        number, accuracy = self.right.sum(-1).numpy(), p.sum(-1)
        given = p / accuracy[:, None]
        entropy = -(given * np.log(np.where(given > 0, given, 1))).sum(-1)
        found = (1 - (1 - p) ** SAMPLES).sum(-1)
        return {
            "accuracy": float(accuracy.mean()),
            "coverage": float((found / number).mean()),
            "effective": float((np.exp(entropy) / number).mean()),
            "distinct_correct": float(found.mean()),
            **{f"pass@{k}": float((1 - (1 - accuracy) ** k).mean()) for k in KS},
        }


class TwoDigitsLong(TwoDigits):
    """The same answers at the end of a fixed line of text, so that a response has ten times as many tokens."""

    before = "we look for two digits whose sum is that: "
    max_tokens = 56

    def make_start(self, start: Path, seed: int) -> None:
        toy_model.warm_start(start / "model", seed, before=self.before)


class NPHard(Task):
    """Easy instances of an NP-hard task, the start and prompts of `scripts/run_np_cpu.sh`; measured with samples."""

    max_tokens = 64
    samples = 16

    def __init__(self, start: Path, seed: int, task: str = "maximum_cut") -> None:
        np_run.make_start(start, [task], seed)
        super().__init__(start)
        import pandas

        rows = {name: pandas.read_parquet(start / "data" / f"{name}.parquet") for name in ("train", "validation")}
        self.rows = [row for table in rows.values() for row in table.to_dict("records")]
        self.prompts = [list(row["prompt"]) for row in self.rows]
        self.train = len(rows["train"])

    def batch(self, number: int, step: int, rng: np.random.Generator) -> list[int]:
        return rng.choice(self.train, number, replace=False).tolist()

    def results(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        n = len(rollouts.tokens) // len(rollouts.prompts)
        rows = [self.rows[p] for p in rollouts.prompts for _ in range(n)]
        return [
            reward.compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
            for text, row in zip(self.texts(rollouts), rows, strict=True)
        ]

    def scores(self, rollouts: Rollouts) -> list[float]:
        return [result["score"] for result in self.results(rollouts)]

    def measure(self, policy: Policy, seed: int) -> dict[str, float]:
        prompts = list(range(self.train, len(self.prompts)))
        generator = torch.Generator().manual_seed(10_000 + seed)
        results = self.results(policy.sample(prompts, self.samples, generator))
        groups = [results[i : i + self.samples] for i in range(0, len(results), self.samples)]
        valid = np.array([[result["acc"] for result in group] for group in groups], dtype=float)
        ratio = np.array([[min(result["ratio"] or 0.0, 1.0) for result in group] for group in groups])
        labels = [[result["answer"] if result["acc"] else None for result in group] for group in groups]
        return {
            "accuracy": float(valid.mean()),
            "quality": float(ratio.mean()),
            f"best@{self.samples}": float(metrics.best_of_k(ratio, self.samples).mean()),
            "distinct_correct": float(np.mean([len(set(group) - {None}) for group in labels])),
            "effective": float(np.mean([effective(group) for group in labels])),
        }


def effective(labels: list[str | None]) -> float:
    """Exponential of the entropy of the labels that are not None, 0 without any."""
    counts = np.array(list(Counter(label for label in labels if label is not None).values()), dtype=float)
    share = counts / counts.sum() if counts.size else counts
    return float(np.exp(-(share * np.log(share)).sum())) if counts.size else 0.0


TASKS = {"two_digits": TwoDigits, "two_digits_long": TwoDigitsLong, "maximum_cut": NPHard}
