"""Maximum clique: the most vertices that are all adjacent to each other."""

from itertools import combinations
from typing import Any

from .base import Instance, Rng
from .graphs import VertexSetTask, graph_of, neighbours, random_graph


class MaximumClique(VertexSetTask):
    name = "maximum_clique"
    title = "Maximum clique"
    category = "graph"
    maximise = True
    sizes = {"easy": (6, 8), "medium": (9, 12), "hard": (13, 15), "bench": (16, 20)}
    wanted = "Find a largest set of vertices of a graph in which every two are joined by an edge."

    def generate(self, rng: Rng, level: str) -> Instance:
        return random_graph(rng, rng.randint(*self.sizes[level]), lambda a, b: 0.6)

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 2), (0, 3), (1, 2), (1, 4), (1, 5), (2, 4), (2, 5), (3, 5), (4, 5)]), [1, 2, 4, 5]

    def fault(self, instance: Instance, chosen: set[int]) -> str | None:
        near = neighbours(instance)
        apart = next(((a, b) for a, b in combinations(sorted(chosen), 2) if b not in near[a]), None)
        return None if apart is None else f"no edge joins the vertices {apart[0]} and {apart[1]}"

    def constrain(self, instance: Instance, model: Any, chosen: list[Any]) -> None:
        near = neighbours(instance)
        for a, b in combinations(range(instance["vertices"]), 2):
            if b not in near[a]:
                model.add_at_most_one(chosen[a], chosen[b])

    def highlights(self, instance: Instance, answer: Any) -> tuple[dict[int, int], set[tuple[int, int]]]:
        return dict.fromkeys(answer, 0), set(combinations(sorted(answer), 2))
