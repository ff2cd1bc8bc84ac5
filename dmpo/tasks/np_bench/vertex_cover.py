"""Minimum vertex cover: the fewest vertices that touch every edge."""

from typing import Any

from .base import Instance, Rng
from .graphs import VertexSetTask, graph_of, random_graph


class VertexCover(VertexSetTask):
    name = "vertex_cover"
    title = "Minimum vertex cover"
    category = "graph"
    maximise = False
    sizes = {"easy": (6, 8), "medium": (12, 16), "hard": (24, 30), "bench": (40, 50)}
    wanted = "Find a smallest set of vertices of a graph such that every edge has at least one end in the set."

    def generate(self, rng: Rng, level: str) -> Instance:
        # Few edges lie outside of a planted cover; else the smallest is most of the graph, and all vertices do well.
        number = rng.randint(*self.sizes[level])
        planted = 0.4 * number
        return random_graph(rng, number, lambda a, b: min(0.7, 7 / number) if a < planted else 0.7 / number)

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 1), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (4, 5)]), [0, 2, 4]

    def fault(self, instance: Instance, chosen: set[int]) -> str | None:
        bare = next(((a, b) for a, b in instance["edges"] if a not in chosen and b not in chosen), None)
        return None if bare is None else f"neither end of the edge {bare[0]}-{bare[1]} is chosen"

    def constrain(self, instance: Instance, model: Any, chosen: list[Any]) -> None:
        for a, b in instance["edges"]:
            model.add_bool_or(chosen[a], chosen[b])
