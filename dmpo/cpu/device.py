"""The functions of `torch.cuda` that verl calls, for a CPU: what `verl.utils.device.get_torch_device()` returns.

`torch.cpu` itself lacks most of them. Memory figures are the process's resident memory and the machine's RAM, in
bytes. Work on a CPU is synchronous and has no allocator cache, so those functions have nothing to do.
"""

import resource
from typing import Any

import psutil
import torch
from torch.cpu import Stream, current_stream, stream

__all__ = ["Stream", "current_stream", "stream"]


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def get_device_name(device: Any = None) -> str:
    return "CPU"


def set_device(device: Any) -> None: ...


def synchronize(device: Any = None) -> None: ...


def empty_cache() -> None: ...


def ipc_collect() -> None: ...


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None: ...


def reset_peak_memory_stats(device: Any = None) -> None: ...


def memory_allocated(device: Any = None) -> int:
    """Resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def max_memory_allocated(device: Any = None) -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Available and total memory of the machine in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)
