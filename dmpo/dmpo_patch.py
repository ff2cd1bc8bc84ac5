"""Installs DMPO into verl: the trainers, the Hydra group, and every replaced piece of verl in one place.

Public hooks come first: trainers enter verl's registry (`register_trainer`), the loss goes through `set_loss_fn`, the
Hydra group through Hydra's ConfigStore. Three things need more:

- The trainers must be registered in the process that asks for them, after verl imported its own, and importing those
  takes seconds; so they are registered when `verl.trainer.ppo.v1` is imported, by whatever imports it.
- The class of the actor's worker is an attribute of verl's `ActorRolloutRefWorker`, which a worker process imports by
  name; it is set there when `verl.workers.engine_workers` is imported.
- verl has no CPU platform. What must change for one, and only under VERL_PLATFORM=cpu, is listed in cpu/patches.py,
  which is applied through `after_import`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet

logger = logging.getLogger(__name__)

SUPPORTED_VERL = SpecifierSet(">=0.9.0,<0.10", prereleases=True)
TRAINERS_MODULE = "verl.trainer.ppo.v1"
WORKERS_MODULE = "verl.workers.engine_workers"

# What our trainers build on: (module, attribute, parameters it must accept).
_HOOKS = (
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._update_actor", ("batch", "metrics")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._setup", ()),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._balance_batch", ("batch", "metrics")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._validate", ()),
    (
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._val_metrics_update",
        ("data_sources", "sample_uids", "reward_extra_infos_dict", "sample_turns"),
    ),
    ("verl.trainer.ppo.v1.trainer_base", "register_trainer", ("name",)),
    ("verl.workers.engine_workers", "ActorRolloutRefWorker.set_loss_fn", ("loss_fn",)),
    ("verl.workers.engine_workers", "TrainingWorker.train_mini_batch", ("data",)),
    ("verl.workers.engine_workers", "TrainingWorker.train_batch", ("data",)),
    ("verl.workers.utils.losses", "ppo_loss", ("config", "model_output", "data", "dp_group")),
    ("verl.utils.seqlen_balancing", "calculate_workload", ()),
    ("transfer_queue", "kv_batch_get", ("keys", "partition_id", "select_fields")),
    ("transfer_queue", "kv_batch_put", ("keys", "partition_id", "fields")),
)


class UnsupportedVerlError(RuntimeError):
    """The installed verl is not one that DMPO works with."""


def check_verl() -> None:
    """Check version and hooks of the installed verl.

    Raises:
        UnsupportedVerlError: names what is wrong and the versions that work.
    """
    import verl

    if verl.__version__ not in SUPPORTED_VERL:
        raise _unsupported(f"its version is {verl.__version__}")
    for module_name, path, parameters in _HOOKS:
        try:
            target: Any = importlib.import_module(module_name)
            for name in path.split("."):
                target = getattr(target, name)
        except (ImportError, AttributeError) as error:
            raise _unsupported(f"{module_name}.{path} is missing ({error})") from error
        missing = set(parameters) - set(inspect.signature(target).parameters)
        if missing:
            raise _unsupported(f"{module_name}.{path} lacks the parameters {', '.join(sorted(missing))}")


def _unsupported(problem: str) -> UnsupportedVerlError:
    return UnsupportedVerlError(
        f"DMPO does not work with the installed verl: {problem}. It supports verl {SUPPORTED_VERL}; "
        f"install one with `pip install 'verl{SUPPORTED_VERL}'`"
    )


def register_trainers() -> None:
    """Register dmpo_sync, dmpo_colocate_async and dmpo_separate_async with verl; idempotent."""
    from verl.trainer.ppo.v1 import register_trainer

    from . import dmpo_trainer

    register_trainer("dmpo_sync")(dmpo_trainer.DMPOTrainerSync)
    register_trainer("dmpo_colocate_async")(dmpo_trainer.DMPOTrainerColocateAsync)
    register_trainer("dmpo_separate_async")(dmpo_trainer.DMPOTrainerSeparateAsync)


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` right after the module `name` has been executed; at once if it has been already.

    The order of imports then does not matter, and a process that never imports the module pays nothing. Once per name.
    """
    if name in sys.modules:
        action(sys.modules[name])
    elif name not in _actions:
        _actions[name] = action
        if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())


_actions: dict[str, Callable[[ModuleType], None]] = {}


class _AfterImport(MetaPathFinder):
    """Finds the modules that `after_import` waits for as Python does, and appends the action to their execution."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        action = _actions.get(fullname)
        spec = action and PathFinder.find_spec(fullname, path, target)
        if not spec:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act
        return spec


def register_config_group(package: str) -> None:
    """Offer the files of `config/presets` as the Hydra group `dmpo` to every Hydra application of this process.

    `+dmpo=default` on verl's own command line then selects one. The others say what they change of default.yaml. All
    leave out what depends on the name that this package was imported under: the `_target_` of `policy_loss`, and the
    callback that checks the configuration before Ray starts.

    Args:
        package: the import name of this package, `dmpo` or `recipe.dmpo`.
    """
    targets = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"policy_loss": {"_target_": f"{package}.config.DMPOPolicyLossConfig"}}},
            "hydra": {"callbacks": {"dmpo": {"_target_": f"{package}.hydra_callback.ValidateOnStart"}}},
        }
    )
    presets = config_dir() / "presets"
    default = OmegaConf.load(presets / "default.yaml")
    for file in sorted(presets.glob("*.yaml")):
        node = OmegaConf.merge(default, OmegaConf.load(file), targets)
        ConfigStore.instance().store(group="dmpo", name=file.stem, node=node, package="_global_")


def config_dir() -> Path:
    """Folder of our Hydra files: in the package where it is installed, else the repository's `config`."""
    installed = Path(__file__).parent / "hydra_conf"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "config"


def install(package: str) -> None:
    """Make trainers and Hydra group available in this process; idempotent and cheap."""
    register_config_group(package)
    after_import(TRAINERS_MODULE, _register_trainers_or_log)
    after_import(WORKERS_MODULE, _use_our_worker_or_log)


def _register_trainers_or_log(module: ModuleType) -> None:
    try:
        register_trainers()
    except Exception:
        # A run without DMPO must not fail for it. A DMPO run does: verl does not know its trainer then.
        logger.exception("The DMPO trainers are not available with this verl")


def _use_our_worker_or_log(module: ModuleType) -> None:
    """Let actors be verl's `TrainingWorker` with `RefreshMixin`, which does nothing unless a batch asks for it."""
    try:
        from .dmpo_worker import RefreshMixin

        actor, base = module.ActorRolloutRefWorker, module.TrainingWorker
        if actor.actor_worker_cls is base:
            actor.actor_worker_cls = type("DMPOTrainingWorker", (RefreshMixin, base), {})
    except Exception:
        logger.exception("DMPO's refreshed group statistics are not available with this verl")
