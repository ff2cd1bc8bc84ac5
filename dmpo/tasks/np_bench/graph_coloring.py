"""Graph colouring: the fewest colours such that no edge joins two vertices of the same colour."""

from typing import Any

from .base import Instance, Reference, Rng, distinct_in_range
from .graphs import GraphTask, graph_of, neighbours, random_graph
from .solvers import CpSat


class GraphColoring(GraphTask):
    name = "graph_coloring"
    title = "Graph colouring"
    category = "graph"
    maximise = False
    sizes = {"easy": (6, 8), "medium": (12, 16), "hard": (22, 28), "bench": (32, 40)}
    wanted = (
        "Give each vertex of a graph a colour such that no edge joins two vertices of the same colour. Use as few "
        "colours as possible."
    )
    answer_format = "the colours of the vertices 0, 1, 2, ... in this order, as a list of numbers"

    def generate(self, rng: Rng, level: str) -> Instance:
        return random_graph(rng, rng.randint(*self.sizes[level]), lambda a, b: 0.45)

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 1), (0, 3), (0, 4), (1, 2), (1, 4), (2, 5), (3, 4), (3, 5)]), [0, 1, 0, 1, 2, 2]

    def check(self, instance: Instance, answer: Any) -> int | str:
        number = instance["vertices"]
        if not isinstance(answer, list) or not answer:
            return "a list of colours is wanted"
        if all(isinstance(item, list) for item in answer):  # pairs of a vertex and its colour
            if not all(len(item) == 2 and all(isinstance(part, int) for part in item) for item in answer):
                return "a list with the colour of each vertex, or pairs of a vertex and its colour, are wanted"
            named = [vertex for vertex, _ in answer]
            if problem := distinct_in_range(named, number, "vertex"):
                return problem
        elif not all(isinstance(item, int) for item in answer):
            return "a list of the vertices' colours is wanted"
        if len(answer) != number:
            return f"there are {len(answer)} colours for {number} vertices"
        colours = _colours(answer)
        for a, b in instance["edges"]:
            if colours[a] == colours[b]:
                return f"an edge joins the vertices {a} and {b}, and both have the colour {colours[a]}"
        return len(set(colours))

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        near = neighbours(instance)
        vertices = range(len(near))
        order = sorted(vertices, key=lambda vertex: -len(near[vertex]))
        clique: list[int] = []
        greedy: dict[int, int] = {}
        for vertex in order:
            if near[vertex].issuperset(clique):
                clique.append(vertex)
            taken = {greedy.get(other) for other in near[vertex]}
            greedy[vertex] = next(colour for colour in vertices if colour not in taken)
        colours = range(max(greedy.values()) + 1)
        solver = CpSat()
        has = [[solver.model.new_bool_var(f"{vertex} has {colour}") for colour in colours] for vertex in vertices]
        used = [solver.model.new_bool_var(f"{colour} is used") for colour in colours]
        for row in has:
            solver.model.add_exactly_one(row)
        for a, b in instance["edges"]:
            for colour in colours:
                solver.model.add_bool_or(~has[a][colour], ~has[b][colour])
        for row in has:
            for colour in colours:
                solver.model.add_implication(row[colour], used[colour])
        # Colours are interchangeable: a clique takes the first ones, and those that are used come before the others.
        for colour, vertex in enumerate(clique):
            solver.model.add(has[vertex][colour] == 1)
        for colour in colours[1:]:
            solver.model.add_implication(used[colour], used[colour - 1])
        solver.model.minimize(sum(used))
        solver.run(time_limit)
        return solver.reference(self, instance, [[solver.value(item) for item in row].index(1) for row in has])

    def canonical(self, instance: Instance, answer: Any) -> str:
        colours = _colours(answer)
        first = list(dict.fromkeys(colours))
        return str([first.index(colour) for colour in colours])

    def trivial(self, instance: Instance) -> Any:
        return list(range(instance["vertices"]))

    def highlights(self, instance: Instance, answer: Any) -> tuple[dict[int, int], set[tuple[int, int]]]:
        colours = _colours(answer)
        first = list(dict.fromkeys(colours))
        return {vertex: first.index(colour) for vertex, colour in enumerate(colours)}, set()


def _colours(answer: list) -> list[int]:
    """The colours in the order of the vertices, of a list of them or of pairs."""
    return [colour for _, colour in sorted(answer)] if isinstance(answer[0], list) else answer
