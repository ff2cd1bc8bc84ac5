"""Token balance and time of dealing whole groups to mini-batches and ranks, beside verl's own balancing.

verl balances single rollouts over the ranks of the whole batch and then slices each rank's chunk into mini-batches;
ours deals whole prompts to mini-batches and balances the ranks inside each. Lengths are lognormal, cut at 8,192
response tokens, with 150 prompt tokens. Columns: max over mean of a mini-batch's tokens per rank, averaged over
mini-batches; the sum over mini-batches of the slowest rank's tokens, ours over verl's; share of rollouts whose group is
whole in its mini-batch; and seconds on this machine (compare within one run; verl's function gets a tensor, as from its
trainer).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from dmpo.dealing import deal


def measure(prompts: int, n: int, mini_batches: int, ranks: int, median: float, sigma: float, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    length = np.minimum(rng.lognormal(np.log(median), sigma, prompts * n), 8192).astype(int) + 150
    group = rng.permutation(np.repeat(np.arange(prompts), n))
    workload = calculate_workload(torch.from_numpy(length))
    start = time.perf_counter()
    ours = deal(group, workload.numpy(), mini_batches, ranks).order
    our_time = time.perf_counter() - start
    start = time.perf_counter()
    theirs = np.concatenate(get_seqlen_balanced_partitions(workload, ranks, equal_size=True))
    their_time = time.perf_counter() - start

    def figures(order: np.ndarray) -> tuple[float, int, float]:
        cell = order.reshape(ranks, mini_batches, -1)
        tokens = length[cell].sum(-1)
        whole = 0
        for m in range(mini_batches):
            _, counts = np.unique(group[cell[:, m]], return_counts=True)
            whole += counts[counts == n].sum()
        return (tokens.max(0) / tokens.mean(0)).mean(), tokens.max(0).sum(), whole / len(group)

    (a, slow_a, whole_a), (b, slow_b, whole_b) = figures(ours), figures(theirs)
    return [a, b, slow_a / slow_b, whole_a, whole_b, our_time, their_time]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="batches per row of the table (default 3)")
    parser.add_argument("--large", action="store_true", help="add batches of 16,384 rollouts (verl takes seconds each)")
    args = parser.parse_args()
    shapes = [(128, 8, 4, 8), (128, 8, 1, 8), (128, 8, 8, 8), (512, 8, 4, 64), (32, 8, 8, 8)]
    if args.large:
        shapes += [(2048, 8, 4, 8), (2048, 8, 16, 64)]
    print(
        "| prompts x n | mini-batches | ranks | lengths | max/mean | verl | slowest ours/verl | whole groups | verl |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    seconds = []
    for prompts, n, mini_batches, ranks in shapes:
        for name, median, sigma in (
            ("short", 800, 0.6),
            ("medium", 2500, 0.6),
            ("long", 5000, 0.6),
            ("wide", 800, 1.0),
        ):
            runs = [measure(prompts, n, mini_batches, ranks, median, sigma, seed) for seed in range(args.seeds)]
            a, b, slow, whole_a, whole_b, our_time, their_time = np.mean(runs, 0)
            seconds.append((prompts * n, our_time, their_time))
            print(
                f"| {prompts} x {n} | {mini_batches} | {ranks} | {name} ({median}, sigma {sigma}) "
                f"| {a:.3f} | {b:.3f} | {slow:.3f} | {whole_a:.0%} | {whole_b:.0%} |"
            )
    print("\n| rollouts | seconds ours | verl |\n|---|---|---|")
    for rows in sorted({rows for rows, _, _ in seconds}):
        ours, theirs = np.median([(a, b) for r, a, b in seconds if r == rows], 0)
        print(f"| {rows:,} | {ours:.4f} | {theirs:.3f} |")


if __name__ == "__main__":
    main()
