"""Ranks that take real optimizer steps with verl's worker and our `RefreshMixin`, and note each step's gradient.

`train` is for the tests; see engine_ranks.py for how the processes are started.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from .engine_ranks import make_engine, run_module, run_ranks


@dataclass(frozen=True)
class Update:
    """What a worker does with a batch.

    Attributes:
        ranks: each rank's rows, mini-batch after mini-batch.
        mini_batch_size: rows of a mini-batch over all ranks.
        epochs: how often the batch is gone through.
        micro_batch_size: rows of a micro-batch; 0 for dynamic micro-batches of at most `max_tokens`.
        max_tokens: see there.
        actor: verl's ActorConfig.
        refresh: "always", "later" or None, as the controller sets it.
        lr: learning rate; large, so that the policy moves.
        dtype: a key of `engine_ranks.DTYPES`.
    """

    ranks: list[TensorDict]
    mini_batch_size: int
    epochs: int
    micro_batch_size: int
    max_tokens: int
    actor: Any
    refresh: str | None
    lr: float
    dtype: str


@dataclass(frozen=True)
class Step:
    """One optimizer step: all parameters before it by name, their gradients as one vector in sorted order, and how long
    the forward and backward passes before it took."""

    parameters: dict[str, Tensor]
    gradient: Tensor
    seconds: float


def train(updates: list[Update], model: Path, work: Path, timeout: float) -> list[list[Step]]:
    """Carry out updates, each from the model saved at `model`, and return the steps of each.

    Raises:
        RuntimeError: the processes failed or did not finish in `timeout` s.
    """
    return run_module("refresh_ranks", updates, model, work, timeout)


def _worker(engine: Any, update: Update) -> Any:
    """verl's worker around an engine, without Ray."""
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from dmpo.dmpo_losses import dmpo_ppo_loss

    cls = ActorRolloutRefWorker.actor_worker_cls
    assert cls.__name__ == "DMPOTrainingWorker", cls  # what the patch puts there
    worker = object.__new__(cls)
    worker.engine = engine
    worker.model_config = {"use_remove_padding": False}
    worker.engine_config = engine.engine_config
    worker.engine_config.use_dynamic_bsz = not update.micro_batch_size
    for prefix in ("", "infer_"):
        setattr(worker.engine_config, f"{prefix}micro_batch_size_per_gpu", update.micro_batch_size)
        setattr(worker.engine_config, f"{prefix}max_token_len_per_gpu", update.max_tokens)
    worker.device_name = "cpu"
    worker.profiler = DistProfiler(rank=0, config=None)
    worker.flops_counter = None
    worker.loss_fn = partial(dmpo_ppo_loss, config=update.actor)
    return worker


def _carry_out(update: Update, model: str, rank: int) -> list[Step]:
    from verl.utils import tensordict_utils as tu

    engine = make_engine(model, update.dtype, update.lr)
    steps: list[Step] = []
    original: Callable = engine.optimizer_step
    began = 0.0

    def recording_step() -> Any:
        nonlocal began
        seconds = time.perf_counter() - began
        named = sorted(engine.module.named_parameters())
        parameters = {name: p.full_tensor().detach().clone() for name, p in named}
        steps.append(Step(parameters, torch.cat([p.grad.full_tensor().flatten() for _, p in named]), seconds))
        done = original()
        began = time.perf_counter()
        return done

    engine.optimizer_step = recording_step
    data = update.ranks[rank].clone()
    tu.assign_non_tensor(
        data,
        mini_batch_size=update.mini_batch_size,
        global_batch_size=update.mini_batch_size,
        epochs=update.epochs,
        temperature=1.0,
        dataloader_kwargs={"shuffle": False},
    )
    if update.refresh:
        tu.assign_non_tensor(data, dmpo_refresh=update.refresh)
    worker = _worker(engine, update)
    began = time.perf_counter()
    worker.train_mini_batch(data)
    return steps


def _carry_out_all(updates: dict[int, Update], model: str, rank: int) -> dict[int, list[Step]]:
    return {i: _carry_out(update, model, rank) for i, update in updates.items()}


def _main(model: str, work: str) -> None:
    from dmpo import plugin  # noqa: F401

    # isort: split
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401
    import verl.workers.engine_workers  # noqa: F401

    run_ranks(_carry_out_all, model, work)


if __name__ == "__main__":
    # Under this name, so that what the tests saved can be loaded.
    from tests.refresh_ranks import _main as main

    main(*sys.argv[1:])
