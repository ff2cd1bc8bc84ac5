"""The mathematics pipeline on a CPU: the data preparation, reward and validation of the GPU runs, with small models.

`bash scripts/run_math_cpu.sh --help`, or `python -m dmpo.cpu.math_run --help` where everything is installed.
"""

import json
import sys
import time
from pathlib import Path

from ..report.text import columns
from ..tasks.math import prepare, word_problems
from . import training_run
from .arguments import parse_math

SAMPLES = 8
"""Responses to each problem at a validation."""
VALIDATION_PROBLEMS = 32
DATA_SOURCE = "word_problems"
_ROOT = __package__.rpartition(".")[0]

# Per model: prompts a step, tokens of the longest response, learning rate, steps between validations, MB of the largest
# tensor.
_SIZES = {"tiny": (16, 24, 3e-4, 10, 4), "smollm2": (8, 32, 1e-5, 5, 256)}


def make_start(folder: Path, model: str, seed: int) -> None:
    """Problems, verl's parquet files and the warm-started model in `folder`, unless they are there."""
    problems = folder / "problems"
    word_problems.write(problems, VALIDATION_PROBLEMS, seed)
    if not (folder / "data" / "manifest.json").exists():
        from .math_model import TEMPLATE

        prepare.main(
            [
                *("--out", str(folder / "data"), "--template", TEMPLATE, "--seed", str(seed)),
                *("--train", DATA_SOURCE, "--from", f"{DATA_SOURCE}={problems / 'train.jsonl'}"),
                *("--eval", f"{DATA_SOURCE}_new", "--from", f"{DATA_SOURCE}_new={problems / 'validation.jsonl'}"),
            ]
        )
    if not (folder / "model").exists():
        from . import math_model

        with training_run.complete_or_absent(folder / "model") as partial:
            math_model.warm_start(partial, model, word_problems.problems(seed)[VALIDATION_PROBLEMS:], seed)


def overrides(mode: str, model: str, start: Path, folder: Path, steps: int, seed: int) -> list[str]:
    """What a run of `mode` sets on top of `config/dmpo_cpu.yaml`."""
    prompts, response, rate, interval, megabytes = _SIZES[model]
    validated = bool(figures(folder, training_run.checkpointed_step(folder)))
    return [
        *training_run.task_overrides(
            mode, start, folder, steps=steps, interval=interval, samples=SAMPLES, seed=seed, validated=validated
        ),
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=128",
        f"data.max_response_length={response}",
        f"reward.custom_reward_function.path=pkg://{_ROOT}.tasks.math.reward",
        f"actor_rollout_ref.actor.optim.lr={rate}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={prompts * 8 // 4}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={prompts * 8 // 4}",
        f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={megabytes}",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.project_name=math_cpu",
    ]


def figures(folder: Path, step: int) -> dict[str, float]:
    """`val-samples/*` of the run in `folder` after `step` steps, by their last part; empty if there are none."""
    logged = training_run.metrics(folder).get(step, {})
    return {name.rpartition("/")[2]: value for name, value in logged.items() if name.startswith("val-samples/")}


def curve(folder: Path) -> dict[int, dict[str, float]]:
    """All validations of the run in `folder` by step."""
    return {step: found for step in sorted(training_run.metrics(folder)) if (found := figures(folder, step))}


COLUMNS = (
    f"avg@{SAMPLES}",
    *(f"pass@{k}" for k in (2, 4, SAMPLES)),
    f"maj@{SAMPLES}",
    "distinct_answers",
    "answer_entropy",
    "answered",
    "response_length",
    "truncated",
)


def table(curves: dict[str, dict[int, dict[str, float]]]) -> str:
    """A text table with a row for each validation."""
    rows = [["run", "step", *COLUMNS]]
    for mode, found in curves.items():
        rows += [[mode, str(step), *(f"{values[name]:.3f}" for name in COLUMNS)] for step, values in found.items()]
    return columns(rows)


def plot(curves: dict[str, dict[int, dict[str, float]]], file: Path) -> None:
    """Right samples, problems solved in 8 samples, and distinct answers against training steps, a line for each run."""
    from matplotlib.figure import Figure

    panels = {
        f"avg@{SAMPLES}: right samples": f"avg@{SAMPLES}",
        f"pass@{SAMPLES}: problems solved": f"pass@{SAMPLES}",
        f"Distinct answers in {SAMPLES} samples": "distinct_answers",
    }
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (title, name) in zip(figure.subplots(1, len(panels), sharex=True), panels.items(), strict=True):
        for (mode, found), marker in zip(curves.items(), "osD^vP*X<>", strict=False):
            axes.plot(list(found), [values[name] for values in found.values()], marker=marker, label=mode, linewidth=2)
        axes.set(title=title, xlabel="training step", ylim=(0, SAMPLES if name == "distinct_answers" else 1))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    options = parse_math()
    training_run.end_like_ctrl_c()
    began = time.monotonic()
    start = options.output / f"{options.model}-seed{options.seed}"
    folder = start / f"steps{options.steps}"
    curves, seconds = {}, {}
    try:
        make_start(start, options.model, options.seed)
        for index, mode in enumerate(options.mode, 1):
            title = f"run {index} of {len(options.mode)}, {mode}"
            run = folder / mode
            if figures(run, options.steps):
                print(f"{title}: done before, {run}")
            else:
                chosen = overrides(mode, options.model, start, run, options.steps, options.seed)
                training_run.train(run, options.steps, chosen, title)
            curves[mode] = curve(run)
            seconds[mode] = training_run.seconds_per_step(run)
    except KeyboardInterrupt:
        sys.exit("\nrun_math_cpu: stopped; run the same command again to go on from here")
    except (training_run.TrainingFailed, RuntimeError) as error:
        sys.exit(f"{error}\nrun_math_cpu: failed; run the same command again to go on from the last checkpoint")

    results = {"model": options.model, "seed": options.seed, "validations": curves, "seconds_per_step": seconds}
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    plot(curves, folder / "curves.png")
    print(f"\n{table(curves)}\n")
    for mode, median in seconds.items():
        print(f"{mode}: {median:.1f} s a step (median)")
    print(f"\n{folder / 'curves.png'}\n{folder / 'results.json'}\nin {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
