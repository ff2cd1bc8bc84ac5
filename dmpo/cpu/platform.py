"""The platform "cpu" of verl: one logical device per worker, gloo between workers, weights through shared memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform import PlatformBase

from . import device, patches


class PlatformCPU(PlatformBase):
    """See `verl.plugin.platform.PlatformBase` for what each method answers.

    verl creates the platform once per process, at the first question about devices: before any function that
    `patches` replaces can run.
    """

    def __init__(self) -> None:
        patches.apply()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        # verl passes this on as a torch device, where a bare index would mean an accelerator.
        return "cpu"

    def device_count(self) -> int:
        return device.device_count()

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        # verl counts the accelerators of a cluster by this name. Ray hands out as many as `ray_init.num_gpus` says,
        # whether they exist or not, so with it a "GPU" is simply a slot for one worker.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
