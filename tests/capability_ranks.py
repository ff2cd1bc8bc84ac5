"""Ranks that take one real optimizer step of verl's worker with a feature of its engine on; see engine_ranks.py.

What replaces something of verl's, because a CPU lacks it, is listed in `_PATCHES`.
"""

import __future__

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from .engine_ranks import make_engine, run_module, run_ranks
from .refresh_ranks import Update, _worker

MAX_TOKENS = 60  # in a micro-batch


@dataclass(frozen=True)
class Task:
    """One optimizer step.

    Attributes:
        ranks: each rank's rows; ranks that share a sequence get the same.
        actor: verl's ActorConfig.
        model: folder of the model; None for that of all tasks.
        dtype, strategy, model_options, engine_options: see `engine_ranks.make_engine`.
        meta: further non-tensor items of the batch.
        patches: keys of `_PATCHES`.
        lr: learning rate.
        adapter_off: note the log-probabilities without the LoRA adapter, verl's reference policy then.
    """

    ranks: list[TensorDict]
    actor: Any
    model: str | None = None
    dtype: str = "fp64"
    strategy: str = "fsdp2"
    model_options: dict[str, Any] = field(default_factory=dict)
    engine_options: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    lr: float = 0.0
    adapter_off: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a step left behind on rank 0.

    Attributes:
        gradient: of each trained parameter by name, reduced over the ranks and without the loss scale.
        moved: largest change of a parameter in the step.
        log_prob_dtype: of the log-probabilities that the loss was given.
        metrics: the worker's, of the step.
        scale: the loss scale before and after the step.
        tokens: (rows, tokens) of each pass through the first layer's MLP.
        reference: (B, T) see `Task.adapter_off`, of rank 0's rows.
    """

    gradient: dict[str, Tensor]
    moved: float
    log_prob_dtype: torch.dtype
    metrics: dict[str, Any]
    scale: tuple[float, float]
    tokens: list[tuple[int, int]]
    reference: Tensor | None


def take(tasks: list[Task], model: Path, work: Path, timeout: float) -> list[Outcome]:
    """Carry out tasks, each from its model or that saved at `model`, and return their outcomes in order.

    Raises:
        RuntimeError: the processes failed or did not finish in `timeout` s.
    """
    return run_module("capability_ranks", tasks, model, work, timeout)


def _take_one(task: Task, model: str, rank: int) -> Outcome:
    from verl.utils import tensordict_utils as tu

    engine = make_engine(
        task.model or model,
        task.dtype,
        task.lr,
        strategy=task.strategy,
        model_options=task.model_options,
        engine_options=task.engine_options,
    )
    rows = len(task.ranks[rank]) * engine.get_data_parallel_size()
    worker = _worker(
        engine,
        Update(
            ranks=task.ranks,
            mini_batch_size=rows,
            epochs=1,
            micro_batch_size=0,
            max_tokens=MAX_TOKENS,
            actor=task.actor,
            refresh="always",
            lr=task.lr,
            dtype=task.dtype,
        ),
    )
    worker.model_config = task.model_options
    worker.engine_config.use_fused_kernels = task.model_options.get("use_fused_kernels", False)
    data = task.ranks[rank].clone()
    tu.assign_non_tensor(
        data,
        mini_batch_size=rows,
        global_batch_size=rows,
        temperature=1.0,
        dataloader_kwargs={"shuffle": False},
        dmpo_refresh="always",
        **task.meta,
    )
    seen: dict[str, Any] = {"tokens": []}
    step, loss_fn = engine.optimizer_step, worker.loss_fn

    def recording_loss(*, model_output: dict, **inputs: Any) -> tuple:
        seen["dtype"] = model_output["log_probs"].dtype
        return loss_fn(model_output=model_output, **inputs)

    recording_loss.keywords = loss_fn.keywords

    def scale() -> float:
        return engine.scaler.get_scale() if engine.scaler else 1.0

    def recording_step() -> float:
        before, scale_before = _full(engine, lambda p: p), scale()
        seen["gradient"] = {name: grad / scale_before for name, grad in _full(engine, lambda p: p.grad).items()}
        norm = step()
        after = _full(engine, lambda p: p)
        seen["moved"] = max((after[name] - before[name]).abs().max().item() for name in before)
        seen["scale"] = scale_before, scale()
        return norm

    def note_tokens(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        seen["tokens"].append(tuple(inputs[0].shape[:2]))

    engine.optimizer_step, worker.loss_fn = recording_step, recording_loss
    mlp = next(module for name, module in engine.module.named_modules() if name.endswith(".mlp"))
    mlp.register_forward_pre_hook(note_tokens)
    output = worker.train_mini_batch(data)
    return Outcome(
        gradient=seen["gradient"],
        moved=seen["moved"],
        log_prob_dtype=seen["dtype"],
        metrics=tu.get(output, "metrics") if output is not None else {},
        scale=seen["scale"],
        tokens=seen["tokens"],
        reference=_without_adapter(worker, task.ranks[rank]) if task.adapter_off else None,
    )


def _without_adapter(worker: Any, rows: TensorDict) -> Tensor:
    """(B, T) log-probabilities of the responses as verl's trainer asks for those of the reference policy."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    data = rows.clone()
    tu.assign_non_tensor(data, no_lora_adapter=True, compute_loss=False, calculate_entropy=False, temperature=1.0)
    with worker.engine.eval_mode():
        output = worker.infer_batch(data)
    return no_padding_2_padding(output["log_probs"], rows)


def _full(engine: Any, of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """A tensor of each trained parameter by name, put together from the ranks."""

    def collect() -> dict[str, Tensor]:
        found = {}
        for name, parameter in engine.module.named_parameters():
            value = of(parameter) if parameter.requires_grad else None
            if value is not None:
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[name.replace("_fsdp_wrapped_module.", "")] = value.detach().clone()
        return found

    if isinstance(engine.module, FSDP1):
        with FSDP1.summon_full_params(engine.module, with_grads=True):
            return collect()
    return collect()


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; returns what sets it back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _flash_kernel() -> list[Callable[[], None]]:
    """FlashAttention's kernel for packed sequences by torch, behind transformers' and verl's own code around it."""
    import verl.models.transformers.monkey_patch as verl_patch
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def kernel(query: Tensor, key: Tensor, value: Tensor, mask: None, length: int, **kwargs: Any) -> Tensor:
        """(1, T, heads, dim); each sequence of the packed ones starts at position 0."""
        sequence = (kwargs["position_ids"] == 0).cumsum(-1)
        visible = (sequence[..., :, None] == sequence[..., None, :]).tril()
        output = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            attn_mask=visible[:, None],
            scale=kwargs["softmax_scale"],
            enable_gqa=True,
        )
        return output.transpose(1, 2)

    ALL_ATTENTION_FUNCTIONS.register("packed_by_torch", flash_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("packed_by_torch", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    return [_set(verl_patch, "_flash_attention_forward", kernel)]


def _scaler(init_scale: float) -> list[Callable[[], None]]:
    """verl's loss scaler, which is off without CUDA, on the CPU."""
    from torch.distributed.fsdp import sharded_grad_scaler

    scaler = partial(sharded_grad_scaler.ShardedGradScaler, device="cpu", init_scale=init_scale)
    return [_set(sharded_grad_scaler, "ShardedGradScaler", scaler)]


def _fsdp1() -> list[Callable[[], None]]:
    """verl's FSDP1 engine, which asks for an accelerator's index and for weights that lie there."""
    import verl.workers.engine.fsdp.transformer_impl as impl
    from verl.workers.engine import EngineRegistry

    if "cpu" not in EngineRegistry._engines["language_model"]["fsdp"]:
        register = EngineRegistry.register(model_type="language_model", backend="fsdp", device="cpu")
        register(impl.FSDPEngineWithLMHead)

    class OnCPU(FSDP1):
        def __init__(self, module: torch.nn.Module, **options: Any) -> None:
            super().__init__(module, **options | {"device_id": torch.device("cpu"), "sync_module_states": False})

    # Every rank loads the weights, since none are sent.
    return [_set(impl, "FSDP", OnCPU), _set(impl, "get_init_weight_context_manager", lambda **_: nullcontext)]


def _veomni() -> list[Callable[[], None]]:
    """The loop over micro-batches of verl's VeOmni engine, on the FSDP2 engine that it derives from."""
    import verl.workers.engine.fsdp.transformer_impl as impl

    state = SimpleNamespace(get_parallel_state=lambda: SimpleNamespace(ulysses_size=1))
    loop = verl_function("veomni", "VeOmniEngine.forward_backward_batch", parallel_state=state)

    def forward_backward_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.enable_routing_replay = False
        self.model_fwd_context = self.model_bwd_context = nullcontext()  # verl 0.9.0 has them
        return loop(self, *args, **kwargs)

    return [_set(impl.FSDPEngine, "forward_backward_batch", forward_backward_batch)]


def _torchtitan() -> list[Callable[[], None]]:
    """The loop over micro-batches of verl's torchtitan engine and its division of gradients, on the FSDP2 engine.

    torchtitan switches FSDP2's division of gradients off, and verl's engine on again.
    """
    import verl.workers.engine.fsdp.transformer_impl as impl
    from torch.distributed.fsdp import FSDPModule

    loop = verl_function("torchtitan", "TorchTitanEngine.forward_backward_batch")
    divide = verl_function("torchtitan", "enable_fsdp_gradient_division", file="utils", FSDPModule=FSDPModule)
    initialize = impl.FSDPEngine.initialize

    def initialize_as_torchtitan(self: Any) -> None:
        initialize(self)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        divide(self.module, self.get_data_parallel_size())
        self.trainer = SimpleNamespace(train_context=nullcontext)
        self.engine_config.tensor_parallel_size = 1

    return [
        _set(impl.FSDPEngine, "initialize", initialize_as_torchtitan),
        _set(impl.FSDPEngine, "forward_backward_batch", loop),
    ]


def verl_function(engine: str, name: str, file: str = "transformer_impl", **names: Any) -> Callable:
    """A function of one of verl's engines whose module does not import here, compiled from verl's own source.

    Args:
        engine: folder in verl/workers/engine.
        name: `function` or `Class.function`.
        file: module in that folder.
        names: globals of the function that are not listed below.
    """
    import verl
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine import utils

    path = Path(verl.__file__).parent / "workers" / "engine" / engine / f"{file}.py"
    body: list[Any] = ast.parse(path.read_text()).body
    for part in name.split("."):
        node = next(node for node in body if getattr(node, "name", None) == part)
        body = node.body
    scope = vars(utils) | {"torch": torch, "tu": tu, "nullcontext": nullcontext, "get_device_id": lambda: "cpu"} | names
    exec(compile(ast.Module([node], []), path, "exec", flags=__future__.annotations.compiler_flag), scope)
    return scope[node.name]


_PATCHES: dict[str, Callable[[], list[Callable[[], None]]]] = {
    "flash kernel": _flash_kernel,
    "fp16 scaler": partial(_scaler, 2.0**10),
    "fp16 scaler that overflows": partial(_scaler, 2.0**60),
    "fsdp1": _fsdp1,
    "veomni": _veomni,
    "torchtitan": _torchtitan,
}


@contextmanager
def _patched(names: tuple[str, ...]) -> Iterator[None]:
    """Apply patches, and undo what verl itself changes in classes for a feature."""
    from transformers import Qwen2ForCausalLM
    from transformers.integrations import flash_attention

    forward, attention = Qwen2ForCausalLM.forward, flash_attention._flash_attention_forward
    undo = [action for name in names for action in _PATCHES[name]()]
    try:
        yield
    finally:
        Qwen2ForCausalLM.forward, flash_attention._flash_attention_forward = forward, attention
        for action in undo:
            action()


def _take_all(tasks: dict[int, Task], model: str, rank: int) -> dict[int, Outcome]:
    outcomes = {}
    for i, task in tasks.items():
        with _patched(task.patches):
            outcomes[i] = _take_one(task, model, rank)
    return outcomes


def _main(model: str, work: str) -> None:
    from dmpo import plugin  # noqa: F401

    # isort: split
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401
    import verl.workers.engine_workers  # noqa: F401

    run_ranks(_take_all, model, work)


if __name__ == "__main__":
    # Under this name, so that what the tests saved can be loaded.
    from tests.capability_ranks import _main as main

    main(*sys.argv[1:])
