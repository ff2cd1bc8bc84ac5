"""Maximum independent set: the most vertices of which no two are adjacent."""

from typing import Any

from .base import Instance, Rng
from .graphs import VertexSetTask, graph_of, random_graph


class MaximumIndependentSet(VertexSetTask):
    name = "maximum_independent_set"
    title = "Maximum independent set"
    category = "graph"
    maximise = True
    sizes = {"easy": (6, 8), "medium": (12, 16), "hard": (24, 30), "bench": (40, 50)}
    wanted = "Find a largest set of vertices of a graph in which no two are joined by an edge."

    def generate(self, rng: Rng, level: str) -> Instance:
        number = rng.randint(*self.sizes[level])
        return random_graph(rng, number, lambda a, b: min(0.5, 5 / number))

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 1), (0, 3), (1, 2), (1, 5), (2, 3), (3, 4), (4, 5)]), [0, 2, 4]

    def fault(self, instance: Instance, chosen: set[int]) -> str | None:
        joined = next(((a, b) for a, b in instance["edges"] if a in chosen and b in chosen), None)
        return None if joined is None else f"an edge joins the vertices {joined[0]} and {joined[1]}"

    def constrain(self, instance: Instance, model: Any, chosen: list[Any]) -> None:
        for a, b in instance["edges"]:
            model.add_at_most_one(chosen[a], chosen[b])
