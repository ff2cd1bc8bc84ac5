"""Runs verl in a process of its own: progress on the terminal, one log, resumption, nothing left running behind it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from .arguments import BASELINE

# Set in the environment of a run and inherited by all that it starts, Ray's and vLLM's processes included.
_MARK = "DMPO_TRAINING_RUN"


class TrainingFailed(RuntimeError):
    """verl ended with an error; the message has the end of its log and says where all of it is."""


def quoted(path: Path | str) -> str:
    """A path as Hydra's override grammar wants it, whatever characters it has."""
    return "'" + str(path).replace("'", r"\'") + "'"


def checkpointed_step(folder: Path) -> int:
    """The step of the last checkpoint of the run in `folder`, 0 without one."""
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """verl's metrics of the run in `folder` by step; where an attempt repeats steps of an earlier one, its own."""
    steps: dict[int, dict[str, Any]] = {}
    for file in sorted(folder.glob("metrics-*.jsonl"), key=_first_step):
        steps.update(_read_metrics(file))
    return steps


def seconds_per_step(folder: Path) -> float:
    """Median time of the run's training steps, without validation."""
    times = sorted(data["timing_s/step"] for data in metrics(folder).values() if "timing_s/step" in data)
    return times[len(times) // 2]


def end_like_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP interrupt this process as Ctrl-C does, so that a run is ended in order."""

    def interrupt(*_: Any) -> None:
        # Not by raising SIGINT, which a process that a script put into the background ignores.
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


@contextlib.contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """A path to make `folder` at; an interruption leaves only this one behind, and the next attempt removes it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    partial.rename(folder)


def _first_step(file: Path) -> int:
    return int(file.stem.split("-")[1])


def _read_metrics(file: Path) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written, or never was to its end
            entry = json.loads(line)
            steps.setdefault(entry["step"], {}).update(entry["data"])
    return steps


def task_overrides(
    mode: str, start: Path, folder: Path, *, steps: int, interval: int, samples: int, seed: int, validated: bool
) -> list[str]:
    """What the runs of `mode` on every task set on top of `config/dmpo_cpu.yaml`.

    Args:
        mode: a DMPO loss mode, trained with our recommendation, or `BASELINE`.
        start: folder with `model` and `data`.
        folder: of the run.
        steps: training steps in all.
        interval: steps between validations, and checkpoints.
        samples: responses to each prompt at a validation.
        seed: of data and rollouts.
        validated: whether the last checkpoint has had its validation.
    """
    policy_loss = "actor_rollout_ref.actor.policy_loss"
    loss = ["dmpo=recommended", f"{policy_loss}.loss_mode={mode}"]
    if mode == BASELINE:
        loss = [f"{policy_loss}.loss_mode=vanilla"]
    return [
        *loss,
        f"actor_rollout_ref.model.path={quoted(start / 'model')}",
        f"data.train_files={quoted(start / 'data' / 'train.parquet')}",
        f"data.val_files={quoted(start / 'data' / 'validation.parquet')}",
        f"data.seed={seed}",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"actor_rollout_ref.rollout.val_kwargs.n={samples}",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        f"trainer.rollout_data_dir={quoted(folder / 'rollouts')}",
        f"trainer.validation_data_dir={quoted(folder / 'validation')}",
        f"trainer.val_before_train={str(not validated).lower()}",
        f"trainer.val_only={str(checkpointed_step(folder) >= steps).lower()}",
        f"trainer.test_freq={interval}",
        f"trainer.save_freq={interval}",
        f"trainer.total_epochs={steps}",
        f"trainer.experiment_name={mode}",
    ]


def train(folder: Path, steps: int, overrides: list[str], title: str) -> None:
    """Train to step `steps`, from the last checkpoint in `folder` if there is one.

    Args:
        folder: of this run alone: checkpoints, log.txt, metrics-*.jsonl and Hydra's files.
        steps: training steps in all.
        overrides: Hydra overrides on top of `dmpo_cpu`.
        title: shown with the progress.

    Raises:
        TrainingFailed: verl ended with an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = checkpointed_step(folder)
    # verl empties the file that it logs to, so each attempt gets its own.
    metrics_file = folder / f"metrics-{start}.jsonl"
    metrics_file.unlink(missing_ok=True)
    log = folder / "log.txt"
    root = __package__.rpartition(".")[0]  # "dmpo", or "recipe.dmpo" where it is mounted
    command = [
        *(sys.executable, "-m", f"{root}.main_dmpo", "--config-name", "dmpo_cpu"),
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={quoted(folder / 'checkpoints')}",
        "trainer.logger=[console,file]",
        f"hydra.run.dir={quoted(folder / 'hydra')}",
        *overrides,
    ]
    env = os.environ | {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(metrics_file), _MARK: str(folder)}

    with log.open("ab") as output, _progress(title, steps, start) as show:
        # In a session of its own, so that Ctrl-C reaches us alone and we can end the run in order.
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(0.5)
                show(_read_metrics(metrics_file))
        finally:
            stop(folder)
            process.wait()
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise TrainingFailed(f"{tail}\n\nverl ended with exit code {process.returncode}; all of its output: {log}")


def stop(folder: Path, patience: float = 10.0) -> None:
    """End every process of the run in `folder`; those that do not end within `patience` seconds are killed."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave the rest running
    try:
        for _ in range(5):  # what is ending may still start something
            running = _processes(folder)
            if not running:
                break
            for process in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
            for process in psutil.wait_procs(running, timeout=patience)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    finally:
        signal.signal(signal.SIGINT, interrupt)


def _processes(folder: Path) -> list[psutil.Process]:
    """All living processes that the run in `folder` started, directly or not."""
    mark = f"{_MARK}={folder}\0".encode()
    found = []
    for process in psutil.process_iter():
        # Not `process.environ()`: it reads to the first gap, and Ray's processes leave one when they change title.
        with contextlib.suppress(OSError, psutil.Error):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def _progress(title: str, steps: int, start: int) -> Iterator[Callable[[dict[int, dict[str, Any]]], None]]:
    """A bar over the training steps, and the function that moves it on, given verl's metrics by step."""
    terminal = sys.stderr.isatty()
    layout = "{desc}: {n_fmt}/{total_fmt} steps |{bar:20}| {elapsed}{postfix}"
    # Into a file, a line every half minute is enough.
    with tqdm(total=steps, initial=start, desc=title, mininterval=0.1 if terminal else 30, bar_format=layout) as bar:
        bar.set_postfix_str("starting Ray and vLLM, about a minute")
        first: tuple[float, int] | None = None

        def show(done: dict[int, dict[str, Any]]) -> None:
            nonlocal first
            last = max(done, default=start)
            if last > bar.n:
                now = time.monotonic()
                first = first or (now, last)
                status = f"reward {done[last].get('critic/score/mean', float('nan')):.2f}"
                if last > first[1]:
                    left = (now - first[0]) / (last - first[1]) * (steps - last)
                    status += f", {left / 60:.0f} min left" if left > 90 else f", {left:.0f} s left"
                bar.set_postfix_str(status, refresh=False)
                bar.update(last - bar.n)
            elif terminal:
                bar.refresh()  # the clock

        yield show
