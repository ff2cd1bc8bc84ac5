"""Minimum feedback vertex set: the fewest vertices without which a graph has no cycle."""

from typing import Any

from .base import Instance, Rng
from .graphs import VertexSetTask, graph_of, random_graph


class FeedbackVertexSet(VertexSetTask):
    name = "feedback_vertex_set"
    title = "Minimum feedback vertex set"
    category = "graph"
    maximise = False
    sizes = {"easy": (6, 8), "medium": (12, 16), "hard": (22, 26), "bench": (30, 40)}
    wanted = "Find a smallest set of vertices of a graph such that the graph without them has no cycle."

    def generate(self, rng: Rng, level: str) -> Instance:
        number = rng.randint(*self.sizes[level])
        return random_graph(rng, number, lambda a, b: min(0.5, 4.5 / number))

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 1), (0, 4), (1, 4), (2, 3), (2, 4), (2, 5), (3, 5), (3, 4)]), [4, 2]

    def fault(self, instance: Instance, chosen: set[int]) -> str | None:
        # Kruskal's forest of what is left: an edge within a tree closes a cycle.
        tree = list(range(instance["vertices"]))
        for a, b in instance["edges"]:
            if a in chosen or b in chosen:
                continue
            if tree[a] == tree[b]:
                return f"a cycle through the edge {a}-{b} is left"
            tree = [tree[a] if root == tree[b] else root for root in tree]
        return None

    def constrain(self, instance: Instance, model: Any, chosen: list[Any]) -> None:
        # What is left is a forest: all of its edges can be directed so that no vertex has two parents, and that heights
        # grow along them.
        vertices = range(instance["vertices"])
        height = [model.new_int_var(0, len(vertices) - 1, f"height {vertex}") for vertex in vertices]
        parents: list[list[Any]] = [[] for _ in vertices]
        for a, b in instance["edges"]:
            down, up = model.new_bool_var(f"{a}->{b}"), model.new_bool_var(f"{b}->{a}")
            model.add_bool_or(chosen[a], chosen[b], down, up)
            model.add(height[b] > height[a]).only_enforce_if(down)
            model.add(height[a] > height[b]).only_enforce_if(up)
            parents[b].append(down)
            parents[a].append(up)
        for vertex in vertices:
            model.add_at_most_one(chosen[vertex], *parents[vertex])
