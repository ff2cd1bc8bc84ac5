"""Processes that run verl's own FSDP engine over gloo on a CPU and hand back the gradients that it accumulates.

`take` is for the tests. It starts one fresh process, since verl chooses its platform once and at import, and that
process forks the ranks of each world size, so that importing verl takes its seconds once and not for each rank.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

ROOT = Path(__file__).resolve().parent.parent
COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # a rank that never arrives is an error on the others, not a hang

# verl knows 16- and 32-bit types by these names; "fp64" is ours, see `make_engine`.
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Step:
    """The forward and backward passes of one optimizer step.

    Attributes:
        batch: all rows of the mini-batch, as verl's worker gets them.
        ranks: which rows each rank gets, in order; its length is the world size.
        micro_batch_size: rows of a micro-batch; 0 for dynamic micro-batches of at most `max_tokens`.
        max_tokens: see there.
        actor: verl's ActorConfig.
        loss: a key of `tests.split_losses.LOSSES`.
        dtype: a key of `DTYPES`.
    """

    batch: TensorDict
    ranks: list[list[int]]
    micro_batch_size: int
    max_tokens: int
    actor: Any
    loss: str
    dtype: str


@dataclass(frozen=True)
class Outcome:
    """What a step left behind.

    Attributes:
        gradient: all parameters' gradients, reduced over the ranks, as one vector in the order of sorted names.
        micro_batches: for each rank its micro-batches, each the list of its rows.
        log_prob_dtype: of the log-probabilities that the loss was given.
    """

    gradient: Tensor
    micro_batches: list[list[list[int]]]
    log_prob_dtype: torch.dtype


def take(steps: list[Step], model: Path, work: Path, timeout: float) -> list[Outcome]:
    """Run steps on the model saved at `model`, and return their outcomes in order.

    Raises:
        RuntimeError: the processes failed (the message ends with what they wrote) or did not finish in `timeout` s.
    """
    return run_module("engine_ranks", steps, model, work, timeout)


def run_module(name: str, tasks: list, model: Path, work: Path, timeout: float) -> list:
    """Run a module of the tests that calls `run_ranks` as a process of its own, and return each task's outcome.

    Raises:
        RuntimeError: as for `take`.
    """
    torch.save(tasks, work / "tasks.pt")
    command = [sys.executable, "-m", f"{__package__}.{name}", str(model), str(work)]
    env = os.environ | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    with open(work / "log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"not finished after {timeout} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks too: they are in its process group
                process.wait()
    if code != 0:
        raise RuntimeError(f"{name} failed ({code}):\n{(work / 'log').read_text()[-4000:]}")
    outcomes: dict[int, Any] = {}
    for file in work.glob("outcomes_*.pt"):
        outcomes |= torch.load(file, weights_only=False)
    return [outcomes[i] for i in range(len(tasks))]


def norm_in_own_dtype(self: Qwen2RMSNorm, hidden_states: Tensor) -> Tensor:
    """`Qwen2RMSNorm.forward` without its cast to float32, which would hide everything below 1e-7."""
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def make_engine(
    model: str,
    dtype: str,
    lr: float = 0.0,
    *,
    strategy: str = "fsdp2",
    model_options: dict[str, Any] | None = None,
    engine_options: dict[str, Any] | None = None,
) -> Any:
    """verl's FSDP engine around the saved model, in this process group, with an optimizer that does not clip.

    Args:
        model: folder of the model.
        dtype: of parameters and gradients: a key of `DTYPES` or a name that verl knows.
        lr: learning rate.
        strategy: as in `actor.strategy`.
        model_options, engine_options: fields of verl's HFModelConfig and FSDPEngineConfig that differ from ours.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    # verl trains in 16 or 32 bits. Splits are to be compared beyond the rounding of either, so float64 gets a name.
    known = PrecisionType.to_dtype
    PrecisionType.to_dtype = staticmethod(lambda name: torch.float64 if name == "fp64" else known(name))
    model_fields = {
        "load_tokenizer": False,
        "use_remove_padding": False,
        "enable_gradient_checkpointing": False,
        "override_config": {"attn_implementation": "sdpa"},
    }
    engine_fields = {
        "model_dtype": dtype,
        "mixed_precision": {"param_dtype": dtype, "reduce_dtype": dtype, "buffer_dtype": dtype},
        "use_torch_compile": False,
        "use_remove_padding": False,
    }
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(path=model, **model_fields | (model_options or {})),
        engine_config=FSDPEngineConfig(strategy=strategy, **engine_fields | (engine_options or {})),
        optimizer_config=FSDPOptimizerConfig(lr=lr, weight_decay=0.0, clip_grad=1e9),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    if dtype in DTYPES:
        engine._autocast_dtype = torch.float32  # verl's way to say: no autocast; it does not know that of float64
    PrecisionType.to_dtype = known
    return engine


def _take_one(engine: Any, step: Step, rank: int) -> Outcome:
    """One optimizer step up to the optimizer."""
    from verl.utils import tensordict_utils as tu

    from .split_losses import LOSSES

    data = tu.index_select_tensor_dict(step.batch, step.ranks[rank])
    tu.assign_non_tensor(
        data,
        use_remove_padding=False,
        use_dynamic_bsz=not step.micro_batch_size,
        micro_batch_size_per_gpu=step.micro_batch_size,
        max_token_len_per_gpu=step.max_tokens,
        global_batch_size=len(step.batch),
        temperature=1.0,
    )
    loss, rows, dtypes = partial(LOSSES[step.loss], step.actor), [], []

    def recording_loss(model_output: dict, data: TensorDict, dp_group: Any = None) -> tuple:
        rows.append(data["row"].tolist())
        dtypes.append(model_output["log_probs"].dtype)
        return loss(model_output, data, dp_group)

    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, recording_loss)
        shards = {name: p.grad.to_local() for name, p in sorted(engine.module.named_parameters())}
    every: list[Any] = [None] * len(step.ranks)
    torch.distributed.all_gather_object(every, (shards, rows))
    assert len(set(dtypes)) == 1, dtypes
    # One collective instead of one `full_tensor` per parameter; FSDP2 cuts parameters along their first dimension.
    gradient = torch.cat([torch.cat([parts[name] for parts, _ in every]).flatten() for name in shards])
    return Outcome(gradient, [rows for _, rows in every], dtypes[0])


def run_ranks(work_on: Callable[[dict[int, Any], str, int], dict[int, Any]], model: str, work: str) -> None:
    """Carry out the tasks that `run_module` left in `work`, in as many processes as each has ranks.

    Args:
        work_on: gets tasks by number, the model's path and its rank; what it returns on rank 0 are their outcomes.
        model, work: what the module was called with.
    """
    tasks = torch.load(f"{work}/tasks.pt", weights_only=False)
    for world_size in sorted({len(task.ranks) for task in tasks}):
        mine = {i: task for i, task in enumerate(tasks) if len(task.ranks) == world_size}
        torch.multiprocessing.start_processes(
            _rank, (world_size, work_on, mine, model, work), nprocs=world_size, start_method="fork"
        )


def _rank(rank: int, world_size: int, work_on: Callable, tasks: dict[int, Any], model: str, work: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{work}/store_{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    Qwen2RMSNorm.forward = norm_in_own_dtype
    outcomes = work_on(tasks, model, rank)
    if rank == 0:
        torch.save(outcomes, f"{work}/outcomes_{world_size}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _take_all(steps: dict[int, Step], model: str, rank: int) -> dict[int, Outcome]:
    engines = {dtype: make_engine(model, dtype) for dtype in sorted({step.dtype for step in steps.values()})}
    return {i: _take_one(engines[step.dtype], step, rank) for i, step in steps.items()}


def _main(model: str, work: str) -> None:
    import dmpo.cpu

    dmpo.cpu.install()
    # Imported before the fork, for all ranks: what verl imports as it goes, too.
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401
    from transformers import AutoConfig
    from verl.utils.model import get_hf_auto_model_class

    from . import split_losses  # noqa: F401

    get_hf_auto_model_class(AutoConfig.from_pretrained(model))
    run_ranks(_take_all, model, work)


if __name__ == "__main__":
    # Under this name, so that what the tests saved can be loaded.
    from tests.engine_ranks import _main as main

    main(*sys.argv[1:])
