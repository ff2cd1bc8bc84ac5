"""The quickstart: GRPO and DMPO from the same start, through verl on a CPU, on a task with many right answers.

`bash scripts/quickstart.sh --help`, or `python -m dmpo.cpu.quickstart --help` where everything is installed.
"""

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import toy_report, toy_task, training_run
from .arguments import BASELINE, parse

SAMPLES = 64
"""Responses to each prompt at a validation."""
INTERVAL = 12
"""Training steps between validations."""


def make_start(folder: Path, seed: int) -> Path:
    """Data and warm-started model in `folder`, unless they are there; returns the model's folder."""
    model = folder / "model"
    if not (folder / "prompts.parquet").exists():
        toy_task.write_parquet(folder / "prompts.parquet")
    if not model.exists():
        from . import toy_model

        with training_run.complete_or_absent(model) as partial:
            toy_model.warm_start(partial, seed)
    return model


def overrides(mode: str, start: Path, folder: Path, steps: int, seed: int) -> list[str]:
    """What a run of `mode` sets on top of `config/dmpo_cpu.yaml`."""
    done = training_run.checkpointed_step(folder)
    validation = folder / "validation"
    # A run that was stopped between a checkpoint and the validation that goes with it makes up for it.
    validate = toy_report.read_validation(validation / f"{done}.jsonl", SAMPLES) is None
    prompts = start / "prompts.parquet"
    loss = [f"actor_rollout_ref.actor.policy_loss.loss_mode={'vanilla' if mode == BASELINE else mode}"]
    if mode != BASELINE:
        loss += [
            "actor_rollout_ref.actor.policy_loss.dmpo_beta=1",
            "actor_rollout_ref.actor.policy_loss.dmpo_policy_temperature=0.25",
            "actor_rollout_ref.actor.policy_loss.dmpo_target=reward",
        ]
    return [
        *loss,
        f"actor_rollout_ref.model.path={training_run.quoted(start / 'model')}",
        f"data.train_files={training_run.quoted(prompts)}",
        f"data.val_files={training_run.quoted(prompts)}",
        f"data.train_batch_size={len(toy_task.NUMBERS)}",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        f"data.seed={seed}",
        f"reward.custom_reward_function.path={training_run.quoted(toy_task.__file__)}",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.seed={seed}",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4",
        f"actor_rollout_ref.rollout.val_kwargs.n={SAMPLES}",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        f"trainer.validation_data_dir={training_run.quoted(validation)}",
        f"trainer.val_before_train={str(validate).lower()}",
        f"trainer.val_only={str(done >= steps).lower()}",
        f"trainer.test_freq={INTERVAL}",
        f"trainer.save_freq={INTERVAL // 3}",
        "trainer.max_actor_ckpt_to_keep=1",
        f"trainer.total_epochs={steps}",
        "trainer.project_name=quickstart",
        f"trainer.experiment_name={mode}",
    ]


def train(folder: Path, steps: int, overrides: Callable[[], list[str]], title: str) -> None:
    """Train to the last validation, unless that is there, and keep the time that all attempts took."""
    clock = folder / "seconds"
    if toy_report.read_validation(folder / "validation" / f"{steps}.jsonl", SAMPLES) is not None:
        print(f"{title}: done before, {folder}")
        return
    before = float(clock.read_text()) if clock.exists() else 0.0
    began = time.monotonic()
    try:
        training_run.train(folder, steps, overrides(), title)
    finally:
        clock.write_text(str(before + time.monotonic() - began))


def run(mode: str, start: Path, folder: Path, steps: int, seed: int, title: str) -> toy_report.Curve:
    """Train with `mode` to its last validation, unless that is there, and read the run's results."""
    train(folder, steps, lambda: overrides(mode, start, folder, steps, seed), title)
    curve = toy_report.read_curve(folder / "validation", SAMPLES)
    curve.seconds_per_step = training_run.seconds_per_step(folder)
    curve.seconds = float((folder / "seconds").read_text())
    return curve


def main() -> None:
    options = parse()
    training_run.end_like_ctrl_c()
    began = time.monotonic()
    start = options.output / f"start-seed{options.seed}"
    folder = options.output / f"steps{options.steps}-seed{options.seed}"
    runs = [BASELINE, *options.mode]
    try:
        model = make_start(start, options.seed)
        print(f"start: {model}")
        curves = {}
        for index, mode in enumerate(runs, 1):
            title = f"run {index} of {len(runs)}, {mode}"
            first = folder / mode / "validation" / "0.jsonl"
            if mode != BASELINE and not first.exists():
                # Before training every run is the same model: it is validated once.
                first.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / BASELINE / "validation" / "0.jsonl", first)
            curves[mode] = run(mode, start, folder / mode, options.steps, options.seed, title)
    except KeyboardInterrupt:
        sys.exit("\nquickstart: stopped; run the same command again to go on from here")
    except (training_run.TrainingFailed, RuntimeError) as error:
        sys.exit(f"{error}\nquickstart: failed; run the same command again to go on from the last checkpoint")

    results = {
        "task": toy_task.DATA_SOURCE,
        "steps": options.steps,
        "seed": options.seed,
        "samples_per_prompt": SAMPLES,
        "runs": {mode: dataclasses.asdict(curve) for mode, curve in curves.items()},
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    toy_report.plot(curves, folder / "curves.png", SAMPLES)
    print(f"\n{toy_report.table(curves)}\n\n{toy_report.summary(curves, BASELINE)}")
    print(f"\n{folder / 'curves.png'}\n{folder / 'results.json'}\nin {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
