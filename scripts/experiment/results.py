"""Tables and pictures of the runs that are done."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from dmpo.cpu.toy_report import Curve, coverage_at

from . import settings

Runs = dict[str, list[dict[str, Any]]]
"""By the name of the setting, its runs by seed."""
# Okabe and Ito's colours, which most colour-blind people tell apart.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
GRPO = settings.GRPO.name
MAIN = (GRPO, "entropy 0.1", "published, cut", settings.PUBLISHED.name, settings.OURS.name)
"""Settings whose curves are drawn."""
_DIGITS = (("accuracy", "coverage", "effective", "pass@4"), (0.5, 0.6, 0.7, 0.8), "coverage")
FIGURES = {
    "two_digits": _DIGITS,
    "two_digits_long": _DIGITS,
    "maximum_cut": (("accuracy", "quality", "distinct_correct", "best@16"), (0.8, 0.9, 0.95), "distinct_correct"),
}
"""Of each task: what is listed, at which accuracies settings are compared, and by what."""
TITLES = {
    "accuracy": "Accuracy",
    "coverage": "Coverage: right answers found in 64",
    "effective": "Effective share of right answers",
    "pass@4": "pass@4",
    "quality": "Quality ratio",
    "distinct_correct": "Distinct valid solutions in 16",
    "best@16": "Quality, best of 16",
}


def by_setting(runs: Sequence[dict[str, Any]], task: str, steps: int) -> Runs:
    """Runs of a task and length, every setting with its seeds in order."""
    found: Runs = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["seed"]):
        if run["task"] == task and run["steps"] == steps:
            found[run["name"]].append(run)
    return dict(found)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval over seeds (Student's t); NaN of one value."""
    x = np.asarray(values, dtype=float)
    if len(x) < 2:
        return float(x.mean()) if len(x) else math.nan, math.nan
    return float(x.mean()), float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± half-width, without leading zeros."""
    mean, half = interval(values)
    text = f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}"
    return text.replace("0.", ".")


def at_accuracy(run: dict[str, Any], figure: str, level: float) -> float | None:
    """A figure where the run first reaches an accuracy, interpolated between measurements; None if it never does."""
    curve = run["curve"]
    found = Curve([p["step"] for p in curve], [p["accuracy"] for p in curve], [p[figure] for p in curve])
    return coverage_at(found, level)


def end_table(runs: Runs, figures: Sequence[str], levels: Sequence[float], figure: str) -> str:
    """A row for each setting: the figures after the last step, and one of them at equal accuracy.

    At an accuracy that not every seed reaches, the number of those that do stands behind it.
    """
    lines = [
        f"| setting | seeds | {' | '.join(figures)} | {' | '.join(f'{figure} at {level:g}' for level in levels)} |",
        "|---" * (2 + len(figures) + len(levels)) + "|",
    ]
    for name, found in runs.items():
        cells = [shown([run["curve"][-1][f] for run in found]) for f in figures]
        for level in levels:
            there = [value for run in found if (value := at_accuracy(run, figure, level)) is not None]
            cells.append(shown(there) if there else "-")
            if there and len(there) < len(found):
                cells[-1] += f" ({len(there)})"
        lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def against(runs: Runs, baseline: str, figure: str) -> str:
    """Difference to the baseline at the highest accuracy that both reach with a seed, paired by seed."""
    lines = [
        f"| setting | pairs | equal accuracy (mean) | {figure} | {baseline}'s | difference | better / worse |",
        "|---|---|---|---|---|---|---|",
    ]
    base = {run["seed"]: run for run in runs[baseline]}
    for name, found in runs.items():
        pairs = []
        for run in found:
            other = base.get(run["seed"])
            if name == baseline or other is None:
                continue
            level = min(max(p["accuracy"] for p in r["curve"]) for r in (run, other))
            pairs.append((level, at_accuracy(run, figure, level), at_accuracy(other, figure, level)))
        if pairs:
            level, ours, theirs = np.array(pairs, dtype=float).T
            gain = ours - theirs
            cells = [shown(level), shown(ours), shown(theirs), shown(gain)]
            lines.append(f"| {name} | {len(pairs)} | {' | '.join(cells)} | {(gain > 0).sum()} / {(gain < 0).sum()} |")
    return "\n".join(lines)


def plot_curves(runs: Runs, panels: dict[str, str], file: Path) -> None:
    """Figures against training steps: means over seeds, bands of 95 % confidence.

    Args:
        runs: one line each.
        panels: figure by title.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(4.2 * len(panels), 4.4), layout="constrained")
    axes = picture.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, figure) in zip(axes, panels.items(), strict=True):
        for (name, found), colour in zip(runs.items(), COLOURS, strict=False):
            steps = [point["step"] for point in found[0]["curve"]]
            values = [interval([run["curve"][i][figure] for run in found]) for i in range(len(steps))]
            mean, half = np.nan_to_num(np.array(values)).T
            axis.plot(steps, mean, color=colour, label=name, linewidth=2)
            axis.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
        axis.set(title=title, xlabel="training step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    picture.savefig(file, dpi=110)


def plot_trade_off(runs: Runs, figure: str, label: str, lines: Sequence[str], file: Path) -> None:
    """Accuracy against a figure: every setting a point after its last step, some also as a line from the start on."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 6.2), layout="constrained")
    axis = picture.subplots()
    families = list(dict.fromkeys(found[0]["family"] for found in runs.values()))
    for index, family in enumerate(families):
        members = {name: found for name, found in runs.items() if found[0]["family"] == family}
        points = [
            [np.mean([run["curve"][-1][f] for run in found]) for f in ("accuracy", figure)]
            for found in members.values()
        ]
        colour, marker = COLOURS[index % len(COLOURS)], "osD^vPX*"[index // len(COLOURS) * 3 + index % 3]
        axis.scatter(*np.array(points).T, color=colour, marker=marker, s=42, label=family, zorder=3, alpha=0.85)
    for name, style in zip(lines, ("-", "--", ":", "-."), strict=False):
        if name in runs:
            found = runs[name]
            path = [
                [np.mean([run["curve"][i][f] for run in found]) for f in ("accuracy", figure)]
                for i in range(len(found[0]["curve"]))
            ]
            colour = COLOURS[families.index(found[0]["family"]) % len(COLOURS)]
            axis.plot(*np.array(path).T, style, color=colour, linewidth=1.5, label=f"{name}, as it trains")
    axis.set(xlabel="accuracy", ylabel=label)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    picture.legend(loc="outside right upper", frameon=False)
    picture.savefig(file, dpi=110)
