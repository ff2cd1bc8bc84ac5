"""Weights from the trainer to rollout servers in processes of their own, over gloo: `checkpoint_engine.backend=gloo`.

verl's trainer for separate devices needs such an engine, and all that verl has want an accelerator.
"""

import json
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine

TIMEOUT = timedelta(minutes=10)


class GlooCheckpointEngine(CheckpointEngine):
    """The actor's first rank broadcasts one tensor after another; see `verl.checkpoint_engine.CheckpointEngine`.

    The ranks have process groups of their own already, so these make one from its parts, anew for each update. Name,
    type and shape of a tensor go through the group's store.

    Args:
        bucket_size: of other engines; a tensor is sent as it is.
        is_master: whether this is the actor's first rank.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.rank = -1
        self.store: TCPStore | None = None
        self.group: ProcessGroupGloo | None = None

    def prepare(self) -> tuple[str, int] | None:
        """Host and port of the store, from the rank that has it."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self.store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The actor's first rank and every rollout rank; the actor's others (-1) have the same weights."""
        size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "size": [size] * len(ranks), "address": [metadata[0]] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, size)))

    def init_process_group(self, rank: int, size: int, address: tuple[str, int]) -> None:
        self.rank = rank
        if rank < 0:
            return
        if self.store is None:
            self.store = TCPStore(*address, is_master=False, timeout=TIMEOUT)
        self.group = ProcessGroupGloo(PrefixStore("gloo", self.store), rank, size, TIMEOUT)

    def finalize(self) -> None:
        self.group = self.store = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Generator[tuple[str, Tensor], None, None], global_steps: int | None = None
    ) -> None:
        count = 0
        for name, weight in weights:  # gathers the ranks' shards: every rank must go through it
            if self.rank == 0:
                head = {"name": name, "dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
                self.store.set(f"tensor{count}", json.dumps(head))
                self._broadcast(weight.detach().cpu().contiguous())
            count += 1
        if self.rank == 0:
            self.store.set(f"tensor{count}", "null")
            # The store lives in this process: it must not go before the last has read it.
            self.group.barrier().wait()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        count = 0
        while head := json.loads(self.store.get(f"tensor{count}")):
            weight = torch.empty(head["shape"], dtype=getattr(torch, head["dtype"]))
            self._broadcast(weight)
            yield head["name"], weight
            count += 1
        self.group.barrier().wait()

    def _broadcast(self, weight: Tensor) -> None:
        # As bytes: gloo knows fewer types than torch.
        self.group.broadcast(weight.view(-1).view(torch.uint8), 0).wait()
