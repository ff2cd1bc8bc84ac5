"""What training on the toy task did: accuracy and coverage at each validation, as a table, a picture and sentences."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import toy_task


@dataclass
class Curve:
    """One run's validations.

    Attributes:
        steps: training steps done before each validation, ascending.
        accuracy: share of the samples that are right, in [0, 1].
        coverage: share of a prompt's right answers found among its samples, averaged over the prompts, in [0, 1].
        seconds_per_step: of training, without validation.
        seconds: of the whole run, start-up and validation included; of a resumed run, all attempts.
    """

    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    coverage: list[float] = field(default_factory=list)
    seconds_per_step: float = float("nan")
    seconds: float = float("nan")


def read_validation(file: Path, samples: int) -> tuple[float, float] | None:
    """Accuracy and coverage of one of verl's validation dumps.

    Args:
        file: JSON lines with the fields `gts` (the number) and `output` (the response).
        samples: responses per prompt.

    Returns:
        None unless the dump is whole: one that was being written when a run stopped has fewer rows.
    """
    if not file.exists():
        return None
    responses: dict[int, list[str]] = defaultdict(list)
    for line in file.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return None
        responses[int(row["gts"])].append(row["output"])
    if sorted(responses) != list(toy_task.NUMBERS) or any(len(given) != samples for given in responses.values()):
        return None
    accuracy = np.mean([toy_task.compute_score("", r, str(n)) for n, given in responses.items() for r in given])
    return float(accuracy), float(np.mean([toy_task.coverage(n, given) for n, given in responses.items()]))


def read_curve(folder: Path, samples: int) -> Curve:
    """All whole validation dumps in `folder`, named by their step."""
    curve = Curve()
    for file in sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem)):
        if (result := read_validation(file, samples)) is not None:
            curve.steps.append(int(file.stem))
            curve.accuracy.append(result[0])
            curve.coverage.append(result[1])
    return curve


def table(curves: dict[str, Curve]) -> str:
    """A text table: a row for each validation, accuracy and coverage of each run, and the times below."""
    rows = [["step"], [""]]
    for name in curves:
        rows[0] += [name, ""]
        rows[1] += ["accuracy", "coverage"]
    for step in sorted({step for curve in curves.values() for step in curve.steps}):
        row = [str(step)]
        for curve in curves.values():
            if step in curve.steps:
                at = curve.steps.index(step)
                row += [f"{curve.accuracy[at]:.3f}", f"{curve.coverage[at]:.3f}"]
            else:
                row += ["-", "-"]
        rows.append(row)
    rows.append(["s/step", *(cell for curve in curves.values() for cell in (f"{curve.seconds_per_step:.1f}", ""))])
    rows.append(["minutes", *(cell for curve in curves.values() for cell in (f"{curve.seconds / 60:.1f}", ""))])
    width = max(len(cell) for row in rows for cell in row[1:])
    lines = ["  ".join([row[0].ljust(7), *(cell.rjust(width) for cell in row[1:])]).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([*lines[:2], rule, *lines[2:-2], rule, *lines[-2:]])


def coverage_at(curve: Curve, accuracy: float) -> float | None:
    """Coverage where the run first reaches `accuracy`, interpolated between validations; None if it never does."""
    for i, reached in enumerate(curve.accuracy):
        if reached >= accuracy:
            if i == 0:
                return curve.coverage[0]
            share = (accuracy - curve.accuracy[i - 1]) / (reached - curve.accuracy[i - 1])
            return curve.coverage[i - 1] + share * (curve.coverage[i] - curve.coverage[i - 1])
    return None


def summary(curves: dict[str, Curve], baseline: str) -> str:
    """What was seen at the end of training, and at equal accuracy, of each run against `baseline`."""
    base = curves[baseline]
    lines = []
    for name, curve in curves.items():
        if name == baseline:
            continue
        lines.append(
            f"After {curve.steps[-1]} steps {name} is right in {curve.accuracy[-1]:.1%} of its samples and finds "
            f"{curve.coverage[-1]:.1%} of the right answers; {baseline}: {base.accuracy[-1]:.1%} and "
            f"{base.coverage[-1]:.1%}."
        )
        level = min(max(curve.accuracy), max(base.accuracy))
        here, there = coverage_at(curve, level), coverage_at(base, level)
        if level > max(curve.accuracy[0], base.accuracy[0]):
            lines.append(
                f"Where both are right {level:.1%} of the time, {name} finds {here:.1%}, {baseline} {there:.1%}."
            )
        else:
            lines.append(f"{name} and {baseline} have no accuracy above the start in common to compare coverage at.")
    return "\n".join([*lines, "One seed each: differences of a few points are noise."])


def plot(curves: dict[str, Curve], file: Path, samples: int) -> None:
    """Two panels, accuracy and coverage against training steps, a line for each run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    titles = ("Accuracy: right samples", f"Coverage: right answers found in {samples} samples")
    for axes, title, attribute in zip(panels, titles, ("accuracy", "coverage"), strict=True):
        for (name, curve), marker in zip(curves.items(), "osD^vP*X<>", strict=False):
            axes.plot(curve.steps, getattr(curve, attribute), marker=marker, label=name, linewidth=2)
        axes.set(title=title, xlabel="training step", ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(file, dpi=150)
