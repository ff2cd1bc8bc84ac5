"""Evaluate responses to the NP-hard tasks: `python -m dmpo.tasks.np_bench.evaluate --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...report.metrics import best_of_k, pass_at_k, powers_of_two
from ...report.text import columns
from . import CATEGORIES, TASKS, content_hash
from .reward import compute_score

RESPONSE = ("output", "response")
TRUTH = ("gts", "ground_truth")
"""Names of the columns, the first as verl's validation dumps have them."""


class Malformed(Exception):
    """A line that is no response; the message says why."""


def read(lines: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """Task, ground truth and response of each line.

    Raises:
        Malformed: names the line.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            truth = next(row[name] for name in TRUTH if name in row)
            response = next(row[name] for name in RESPONSE if name in row)
            content = json.loads(truth)
            task, _ = content["task"], [content[name] for name in ("instance", "reference", "trivial")]
        except (ValueError, KeyError, TypeError) as error:
            raise Malformed(f"line {number}: {type(error).__name__}: {error}") from error
        except StopIteration:
            raise Malformed(
                f"line {number} needs a response ({' or '.join(RESPONSE)}) and a ground truth ({' or '.join(TRUTH)})"
            ) from None
        if task not in TASKS:
            raise Malformed(f"line {number}: there is no task {task!r}")
        yield task, truth, response


def evaluate(samples: Iterable[tuple[str, str, Any]]) -> dict[str, dict[str, float]]:
    """Figures by task, by category and of all categories ("overall": the mean of theirs).

    Of a task, each a mean over its instances with n samples (that of the instance with the fewest; k = 1, 2, 4, ... n):
    `SR@k`, the probability that k samples contain a valid answer; `QR@k`, the expected quality of the best of k, 0 for
    an answer that is not valid and 1 at most, both unbiased; `above_trivial@k`, the same of the quality above that of
    the trivial answer; `distinct@n`, distinct valid solutions among n; `instances`, `samples`.

    Args:
        samples: task, ground truth and response of each sample, in any order.

    Raises:
        ValueError: there is none.
    """
    groups: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    instances: dict[str, str] = {}
    for task, truth, response in samples:
        if truth not in instances:
            instances[truth] = content_hash(json.loads(truth)["instance"])
        groups[task][instances[truth]].append(compute_score("", response, truth))
    if not groups:
        raise ValueError("there is no response")
    # One n for all tasks, or their averages would mix different k.
    n = min(len(rows) for task in groups.values() for rows in task.values())
    result = {task: _of_task(list(groups[task].values()), n) for task in TASKS if task in groups}
    by_category = {}
    for category in CATEGORIES:
        if members := [figures for task, figures in result.items() if TASKS[task].category == category]:
            by_category[f"[{category}]"] = _mean(members)
    return result | by_category | {"overall": _mean(list(by_category.values()))}


def _of_task(instances: list[list[dict[str, Any]]], n: int) -> dict[str, float]:
    figures: dict[str, float] = {
        "instances": len(instances),
        "samples": sum(map(len, instances)),
    }
    valid = [sum(row["valid"] for row in rows) for rows in instances]
    for k in powers_of_two(n):
        figures[f"SR@{k}"] = float(np.mean(pass_at_k([len(rows) for rows in instances], valid, k)))
        for name, column in (("QR", "ratio"), ("above_trivial", "above_trivial")):
            best = [float(best_of_k([min(row[column], 1.0) for row in rows], k)) for rows in instances]
            figures[f"{name}@{k}"] = float(np.mean(best))
    figures[f"distinct@{n}"] = float(np.mean([_distinct(rows, n) for rows in instances]))
    return figures


def _distinct(rows: list[dict[str, Any]], n: int) -> float:
    """Expected number of distinct valid solutions in n of the samples (rarefaction)."""
    solutions = [row["answer"] for row in rows if row["valid"]]
    counts = [solutions.count(solution) for solution in set(solutions)]
    return float(pass_at_k(len(rows), counts, n).sum()) if counts else 0.0


def _mean(members: list[dict[str, float]]) -> dict[str, float]:
    means = {name: float(np.mean([figures[name] for figures in members])) for name in members[0]}
    return means | {name: sum(figures[name] for figures in members) for name in ("instances", "samples")}


def table(result: dict[str, dict[str, float]]) -> str:
    names = list(result["overall"])
    lines = [["", *names]]
    for row, figures in result.items():
        counts = [str(int(figures[name])) for name in ("instances", "samples")]
        lines.append([row, *counts, *(f"{figures[name]:.3f}" for name in names[2:])])
    return columns(lines, left=1)


def plot(result: dict[str, dict[str, float]], path: Path) -> None:
    """Valid, and quality, at one sample and at the most, of each task, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [name for name in result if name in TASKS]
    n = max(int(name.removeprefix("SR@")) for name in result["overall"] if name.startswith("SR@"))
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(tasks) + 1.8), layout="constrained")
    places = np.arange(len(tasks))[::-1]
    for offset, name, colour in ((0.2, "SR", "tab:blue"), (-0.2, "QR", "tab:orange")):
        label = {"SR": "valid", "QR": "quality"}[name]
        if n > 1:
            most = [result[task][f"{name}@{n}"] for task in tasks]
            axes.barh(places + offset, most, 0.36, color=colour, alpha=0.35, label=f"{label}, best of {n}")
        one = [result[task][f"{name}@1"] for task in tasks]
        axes.barh(places + offset, one, 0.36, color=colour, label=f"{label}, one sample")
    axes.set_yticks(places, [TASKS[task].title for task in tasks])
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of valid answers (SR), quality ratio (QR)")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dmpo.tasks.np_bench.evaluate",
        description="Success rate and quality of responses, by task, by category and overall. Prints a table, and "
        "writes the same as JSON and as a picture beside the responses.",
    )
    parser.add_argument(
        "responses",
        type=Path,
        help="JSON Lines with a response (output or response) and the data's ground truth (gts or ground_truth) in "
        "each line, all samples of all instances; verl's validation dumps (trainer.validation_data_dir) are such files",
    )
    parser.add_argument("--out", type=Path, help="where to write, without suffix (default: RESPONSES without its own)")
    options = parser.parse_args(arguments)
    out = options.out or options.responses.with_suffix("")
    try:
        from tqdm import tqdm

        with options.responses.open() as file:
            result = evaluate(read(tqdm(file, desc="responses", unit=" lines", mininterval=1)))
    except (OSError, Malformed, ValueError) as error:
        sys.exit(f"evaluate: {options.responses}: {error}")
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, out.with_suffix(".png"))
    print(f"\n{table(result)}\n\n{out.with_suffix('.json')}\n{out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
