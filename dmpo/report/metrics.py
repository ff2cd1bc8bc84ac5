"""Measures of several samples per prompt: how good they are, and how different.

Everything is computed from rows (prompt, score, answer), one for each sample. An answer is any hashable label, the same
for answers that mean the same; None stands for a response without an answer.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pass_at_k(num_samples: ArrayLike, num_correct: ArrayLike, k: int) -> NDArray[np.float64]:
    """Probability that k of the samples, drawn without replacement, contain a correct one.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1), 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: (P,) n >= k of each prompt.
        num_correct: (P,) c of each prompt, 0 to n.
        k: 1 or more.

    Returns:
        (P,) probabilities.

    Raises:
        ValueError: if k is not in 1..n, or c not in 0..n.
    """
    n, c = np.broadcast_arrays(np.asarray(num_samples, dtype=np.int64), np.asarray(num_correct, dtype=np.int64))
    if k < 1 or (n < k).any():
        raise ValueError(f"k must be from 1 to the number of samples, got {k} for {n.min() if n.size else 0} samples")
    if (c < 0).any() or (c > n).any():
        raise ValueError("num_correct must be from 0 to num_samples")
    missed = np.ones(n.shape)
    for drawn in range(k):  # all k wrong, drawn one after another
        missed *= np.maximum(n - c - drawn, 0) / (n - drawn)
    return 1 - missed


def best_of_k(scores: ArrayLike, k: int) -> NDArray[np.float64]:
    """Expected largest score of k samples, drawn without replacement: pass@k for scores that are not 0 or 1.

    The unbiased estimator: with the n scores in ascending order, sum_i s_i C(i - 1, k - 1) / C(n, k).

    Args:
        scores: (..., n) of each prompt.
        k: 1 to n.

    Returns:
        (...) expectations.

    Raises:
        ValueError: if k is not in 1..n.
    """
    ordered = np.sort(np.asarray(scores, dtype=float), axis=-1)
    n = ordered.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the number of samples, got {k} for {n} samples")
    weights = np.empty(n)
    left = 1.0  # probability that all k are among the i smallest; the i-th is then one of them with probability k / i
    for i in range(n, 0, -1):
        weights[i - 1] = left * k / i
        left *= max(i - k, 0) / i
    return ordered @ weights


def majority_score(answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Score of the most frequent answer of one prompt; the mean over the winners of a tie, 0 without any answer.

    Args:
        answers: n labels; None does not vote.
        scores: n scores; an answer has the mean score of the samples that gave it.
    """
    votes: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(score)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(given) / len(given) for given in votes.values() if len(given) == most]
    return sum(winners) / len(winners) if winners else 0.0


def answer_entropy(answers: Sequence[Hashable | None]) -> float:
    """Entropy in nats of the frequencies of the answers of one prompt; None is not an answer, 0 without any."""
    counts = np.array(list(Counter(answer for answer in answers if answer is not None).values()), dtype=float)
    frequency = counts / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... and n: the k for which pass@k is reported."""
    return sorted({1 << i for i in range(n.bit_length())} | {n})


def sample_metrics(
    prompts: Sequence[Hashable],
    scores: Sequence[float],
    answers: Sequence[Hashable | None] | None = None,
    *,
    correct_from: float = 0.5,
    qualities: Sequence[float] | None = None,
    lengths: Sequence[float | None] | None = None,
    max_length: int | None = None,
) -> dict[str, float]:
    """What N samples of P prompts show, each figure a mean over prompts.

    Args:
        prompts: N labels of prompts, in any order.
        scores: N scores.
        answers: N labels of final answers.
        correct_from: a sample is correct from this score on.
        qualities: N figures of how good each sample is, where more than right or wrong can be said.
        lengths: N response lengths in tokens, None for a sample that was lost.
        max_length: the limit at which responses were cut.

    Returns:
        `avg@n` (mean score), `pass@k` for k = 1, 2, 4, ... n; with answers `maj@n` (score of the most frequent answer),
        `distinct_answers`, `answer_entropy` (nats) and `answered` (share of samples with an answer); with qualities
        `best@k` (expected best quality of k samples); with lengths
        `response_length`, and with max_length `truncated` (share of samples of that length). n is the number of
        samples of the prompt with the fewest.

    Raises:
        ValueError: if there is no sample, or the sequences differ in length.
    """
    if not len(prompts):
        raise ValueError("no samples")
    for name, values in {
        "scores": scores,
        "answers": answers,
        "qualities": qualities,
        "lengths": lengths,
    }.items():
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"{name} has {len(values)} values for {len(prompts)} samples")
    members: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(row)
    groups = list(members.values())
    score = np.asarray(scores, dtype=float)
    size = np.array([len(group) for group in groups])
    correct = np.array([(score[group] >= correct_from).sum() for group in groups])
    n = int(size.min())

    def over_prompts(values: ArrayLike) -> float:
        row_values = np.asarray(values, dtype=float)
        means = [row_values[group][known].mean() for group in groups if (known := ~np.isnan(row_values[group])).any()]
        return float(np.mean(means))

    metrics = {f"avg@{n}": over_prompts(score)}
    for k in powers_of_two(n):
        metrics[f"pass@{k}"] = float(pass_at_k(size, correct, k).mean())
    if answers is not None:
        given = [[answers[row] for row in group] for group in groups]
        metrics[f"maj@{n}"] = float(np.mean([majority_score(a, score[g]) for a, g in zip(given, groups, strict=True)]))
        metrics["distinct_answers"] = float(np.mean([len(set(a) - {None}) for a in given]))
        metrics["answer_entropy"] = float(np.mean([answer_entropy(a) for a in given]))
        metrics["answered"] = over_prompts([answer is not None for answer in answers])
    if qualities is not None:
        quality = np.asarray(qualities, dtype=float)
        for k in powers_of_two(n):
            metrics[f"best@{k}"] = float(np.mean([best_of_k(quality[group], k) for group in groups]))
    length = np.array(lengths if lengths is not None else [], dtype=float)  # None becomes NaN
    if not np.isnan(length).all():
        metrics["response_length"] = over_prompts(length)
        if max_length is not None:
            metrics["truncated"] = over_prompts(np.where(np.isnan(length), np.nan, length >= max_length))
    return metrics
