"""The same settings through verl on a CPU: Ray, FSDP2 and vLLM, the quickstart's task and start."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dmpo.cpu import quickstart, toy_report, toy_task
from dmpo.report import metrics

from .settings import Setting
from .tasks import KS, effective

STEPS = 60


def overrides(setting: Setting, start: Path, folder: Path, steps: int, seed: int) -> list[str]:
    """What a run of the setting sets on top of `config/dmpo_cpu.yaml`."""
    actor = "actor_rollout_ref.actor"
    found = quickstart.overrides(quickstart.BASELINE, start, folder, steps, seed)
    found += [
        f"{actor}.entropy_coeff={setting.entropy}",
        f"{actor}.clip_ratio_high={setting.clip_high}",
        f"{actor}.ppo_epochs={setting.epochs}",
        f"actor_rollout_ref.rollout.n={setting.group_size}",
        f"data.train_batch_size={128 // setting.group_size}",
    ]
    if setting.divergence is not None:
        loss = f"{actor}.policy_loss"
        found += [
            f"{loss}.loss_mode={'grpo_dmpo' if setting.base else 'pure_dmpo'}",
            f"{loss}.dmpo_divergence={setting.divergence}",
            f"{loss}.dmpo_zero_signal={setting.zero_signal}",
            f"{loss}.dmpo_beta={setting.beta}",
            f"{loss}.dmpo_temperature={setting.alpha}",
            f"{loss}.dmpo_policy_temperature={setting.tau}",
            f"{loss}.dmpo_target={setting.target}",
            f"{loss}.dmpo_length_norm={setting.length_norm}",
            f"{loss}.dmpo_start_step={setting.start_step}",
            f"{loss}.dmpo_warmup_steps={setting.warmup}",
        ]
    return found


def run(setting: Setting, output: Path, seed: int, title: str, steps: int = STEPS) -> dict[str, Any]:
    """Train to the last validation, or go on from the last checkpoint, and measure every validation."""
    start = output / "start" / f"two_digits-seed{seed}"
    quickstart.make_start(start, seed)
    name = "".join(c if c.isalnum() else "_" for c in setting.name)
    folder = output / "verl" / f"{name}-seed{seed}"
    with _groups_cut(setting.cut, seed):
        quickstart.train(folder, steps, lambda: overrides(setting, start, folder, steps, seed), title)
    return {
        "task": "two_digits",
        "name": setting.name,
        "family": setting.family,
        "identity": setting.identity(),
        "seed": seed,
        "steps": steps,
        "seconds": float((folder / "seconds").read_text()),
        "curve": [
            {"step": step, **measure(folder / "validation" / f"{step}.jsonl")}
            for step in toy_report.read_curve(folder / "validation", quickstart.SAMPLES).steps
        ],
    }


def measure(file: Path) -> dict[str, float]:
    """As `TwoDigits.measure`, from the 64 samples of each prompt in one of verl's validation dumps."""
    responses: dict[int, list[str]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        responses.setdefault(int(row["gts"]), []).append(row["output"])
    figures = []
    for number, given in responses.items():
        right = toy_task.answers(number)
        labels = [label if (label := toy_task.parse(text)) in right else None for text in given]
        correct = sum(label is not None for label in labels)
        found = len(set(labels) - {None})
        figures.append(
            {
                "accuracy": correct / len(given),
                "coverage": found / len(right),
                "effective": effective(labels) / len(right),
                "distinct_correct": found,
                **{f"pass@{k}": float(metrics.pass_at_k(len(given), correct, k)) for k in KS},
            }
        )
    return {name: float(np.mean([figure[name] for figure in figures])) for name in figures[0]}


@contextlib.contextmanager
def _groups_cut(cut: bool, seed: int) -> Iterator[None]:
    """Environment in which a run that verl starts has its groups cut, if `cut`."""
    before = dict(os.environ)
    if cut:
        os.environ["VERL_USE_EXTERNAL_MODULES"] = f"{__package__}.cut_in_verl"
        os.environ["EXPERIMENT_SEED"] = str(seed)
        scripts = str(Path(__file__).resolve().parents[1])
        os.environ["PYTHONPATH"] = os.pathsep.join([scripts, *filter(None, [before.get("PYTHONPATH")])])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
