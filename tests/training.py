"""Real trainings for the tests: a random tiny model, the toy task, and a process that trains on the CPU platform."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from dmpo.cpu import toy_model, toy_task
from dmpo.cpu.training_run import quoted

ROOT = Path(__file__).parent.parent
CPU = "dmpo.main_dmpo --config-name=dmpo_cpu"
MINUTES = 8
PROMPTS, N = 16, 8

_MARK = "DMPO_TEST_TRAINING"


def make_folder(path: Path) -> Path:
    """A random tiny model, data, and the agent loops of the tests."""
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokenizer = toy_model.build_tokenizer()
    toy_model.build_model(tokenizer).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    toy_task.write_parquet(path / "train.parquet", repeat=2)
    toy_task.write_parquet(path / "val.parquet")
    (path / "agent.yaml").write_text(
        "- name: fixed\n  _target_: tests.fixed_rollouts.FixedRollouts\n"
        "- name: seeded\n  _target_: tests.seeded_rollouts.SeededRollouts\n"
        "- name: endless\n  _target_: tests.seeded_rollouts.EndlessRollouts\n"
    )
    return path


def start(
    folder: Path, name: str, entry_point: str, *overrides: str, env: dict[str, str] | None = None, **popen
) -> subprocess.Popen:
    """Start a training in a session of its own; its metrics go to `{name}.jsonl`, its checkpoints to `{name}/`."""
    command = [
        *(sys.executable, "-m", *entry_point.split()),
        f"actor_rollout_ref.model.path={quoted(folder / 'model')}",
        f"data.train_files={quoted(folder / 'train.parquet')}",
        f"data.val_files={quoted(folder / 'val.parquet')}",
        f"reward.custom_reward_function.path={quoted(ROOT / 'dmpo' / 'cpu' / 'toy_task.py')}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={quoted(folder / 'agent.yaml')}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=fixed",
        "data.shuffle=False",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.logger=[console,file]",
        "trainer.total_epochs=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={quoted(folder / name)}",
        f"hydra.run.dir={quoted(folder / 'hydra')}",
        *overrides,
    ]
    settings = {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / f"{name}.jsonl"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        _MARK: str(folder / name),
    }
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | popen
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | settings | (env or {}), text=True, start_new_session=True, **options
    )


def train(
    folder: Path,
    name: str,
    entry_point: str,
    *overrides: str,
    env: dict[str, str] | None = None,
    minutes: float = MINUTES,
) -> tuple[int, str, list[dict]]:
    """Run a training to its end; returns exit status, output, and the metrics of each step."""
    for _ in range(3):
        process = start(folder, name, entry_point, *overrides, env=env)
        try:
            output, _ = process.communicate(timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            kill(folder, name)
            output, _ = process.communicate()
            pytest.fail(f"{name} took longer than {minutes} minutes; its last output:\n{output[-5000:]}")
        # Ray gives a node 30 seconds to come up, which is not always enough on a busy machine.
        if "The current node timed out during startup" not in output:
            break
    return process.returncode, output, read_metrics(folder, name)


def read_metrics(folder: Path, name: str) -> list[dict]:
    """The metrics of each step that a training has finished."""
    file = folder / f"{name}.jsonl"
    return [json.loads(line)["data"] for line in file.read_text().splitlines()] if file.exists() else []


def trained(result: tuple[int, str, list[dict]], steps: int) -> list[dict]:
    """The metrics of a training that must have ended well after `steps` steps."""
    status, output, metrics = result
    assert status == 0 and len(metrics) == steps, output[-5000:]
    return metrics


def processes(folder: Path, name: str) -> Iterator[psutil.Process]:
    """All living processes of a training, Ray's and vLLM's included."""
    mark = f"{_MARK}={folder / name}\0".encode()
    for process in psutil.process_iter():
        # Not `process.environ()`: it reads to the first gap, and Ray's processes leave one when they change title.
        with contextlib.suppress(OSError, psutil.Error):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def ends_by_itself(folder: Path, name: str, seconds: float = 60) -> None:
    """Wait until nothing is left of a training whose driver has ended.

    Two small helpers of Ray's aside: where the driver was killed they look for their node for a minute or so.
    """
    end = time.monotonic() + seconds
    helpers = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    while left := [process for process in processes(folder, name) if process.name() not in helpers]:
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.5)


def kill(folder: Path, name: str) -> None:
    """SIGKILL to every process of a training, until there is none."""
    while running := list(processes(folder, name)):
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(running, timeout=10)
