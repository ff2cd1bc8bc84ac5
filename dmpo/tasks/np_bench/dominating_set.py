"""Minimum dominating set: the fewest vertices that are adjacent to all the others."""

from typing import Any

from .base import Instance, Rng
from .graphs import VertexSetTask, graph_of, neighbours, random_graph


class DominatingSet(VertexSetTask):
    name = "dominating_set"
    title = "Minimum dominating set"
    category = "graph"
    maximise = False
    sizes = {"easy": (6, 8), "medium": (12, 16), "hard": (24, 30), "bench": (40, 50)}
    wanted = "Find a smallest set of vertices of a graph such that every other vertex has a neighbour in the set."

    def generate(self, rng: Rng, level: str) -> Instance:
        number = rng.randint(*self.sizes[level])
        return random_graph(rng, number, lambda a, b: min(0.4, 4.5 / number))

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 1), (0, 4), (1, 4), (2, 3), (2, 4), (3, 5), (2, 5)]), [2, 4]

    def fault(self, instance: Instance, chosen: set[int]) -> str | None:
        for vertex, near in enumerate(neighbours(instance)):
            if vertex not in chosen and not near & chosen:
                return f"vertex {vertex} is not chosen and has no neighbour that is"
        return None

    def constrain(self, instance: Instance, model: Any, chosen: list[Any]) -> None:
        for vertex, near in enumerate(neighbours(instance)):
            model.add_bool_or(chosen[vertex], *(chosen[other] for other in sorted(near)))
