"""Fingerprints of the code of verl's that we replace, override or lean on, as it is in the versions that were read.

A failure here says that verl changed a function. Read what changed, see that ours still fits, and add the fingerprint.
"""

import hashlib
import importlib
import inspect

import pytest
import verl

READ = {
    # Overridden by DMPOTrainerMixin.
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._setup": ("f6b19038da99", "248aee497276"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._update_actor": ("d7009bd8a69d",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._validate": ("aef5653fc374", "f1d58a70e91d"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._val_metrics_update": ("895efd293253", "8cecd418b501"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint": ("7e44c7bdf605", "8c2435b577e5"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint": ("0264a1b4164f", "bb446d77c48a"),
    # Decides what reaches `_update_actor`.
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._balance_batch": ("f9b6e887d750",),
    # Overridden by RefreshMixin, which infers as `infer_batch` does.
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch": ("6aaa8b26d190", "02b50b03fe7d"),
    "verl.workers.engine_workers:TrainingWorker.train_batch": ("9107065b72b6",),
    "verl.workers.engine_workers:TrainingWorker.infer_batch": ("57bba17563c3",),
    # Wrapped by `dmpo_ppo_loss`, and the aggregation that our factor `dp_size` follows.
    "verl.workers.engine_workers:ActorRolloutRefWorker.set_loss_fn": ("a655a9cfc08a",),
    "verl.workers.utils.losses:ppo_loss": ("d7c0f8772b44",),
    "verl.trainer.ppo.core_algos:agg_loss": ("fd052ff7eb53",),
    # Replaced on the CPU platform.
    "verl.utils.distributed:initialize_global_process_group_ray": ("761a94d1a2e0",),
    "verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu": ("ecdb335bb1d3",),
    "verl.utils.torch_functional:logprobs_from_logits_v2": ("1074be97faf3",),
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.__init__": ("c3a07f992a84", "0c37a4862999"),
}
"""Function -> the first 12 digits of its source's SHA-256, one for each form it has had since verl 0.9.0."""


def fingerprint(path: str) -> str:
    module, _, names = path.partition(":")
    function = importlib.import_module(module)
    for name in names.split("."):
        function = getattr(function, name)
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]


@pytest.mark.parametrize("path", READ)
def test_verls_code_is_what_ours_was_written_for(path):
    assert fingerprint(path) in READ[path], f"verl {verl.__version__} changed {path}: read it before adding {path!r}"
