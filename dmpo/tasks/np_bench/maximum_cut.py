"""Maximum cut: two sides with the most edges between them."""

from typing import Any

from .base import Instance, Reference, Rng
from .graphs import CutTask, cut_size, graph_of, random_graph
from .solvers import CpSat


class MaximumCut(CutTask):
    name = "maximum_cut"
    title = "Maximum cut"
    maximise = True
    balanced = False
    sizes = {"easy": (6, 8), "medium": (12, 16), "hard": (22, 26), "bench": (30, 40)}
    wanted = (
        "Divide the vertices of a graph into two sides, neither of them empty, with as many edges as possible between "
        "the sides."
    )

    def generate(self, rng: Rng, level: str) -> Instance:
        # Most edges lie between two planted sides, and the split by number is no lucky one; else any split does well.
        number = rng.randint(*self.sizes[level])
        side = rng.randint(number // 3, number // 2)
        across, within = min(0.7, 9 / number), min(0.15, 2.5 / number)
        while True:
            graph = random_graph(rng, number, lambda a, b: across if a < side <= b else within)
            if cut_size(graph, self.trivial(graph)) <= 0.65 * len(graph["edges"]):
                return graph

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 1), (0, 3), (0, 5), (1, 2), (1, 4), (2, 5), (3, 4), (3, 5)]), [0, 2, 4]

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        solver = CpSat()
        sides = [solver.model.new_bool_var(str(vertex)) for vertex in range(instance["vertices"])]
        solver.model.add(sides[0] == 1)
        cut = []
        for a, b in instance["edges"]:
            cut.append(between := solver.model.new_bool_var(f"{a}-{b}"))
            solver.model.add_bool_or(sides[a], sides[b], ~between)
            solver.model.add_bool_or(~sides[a], ~sides[b], ~between)
        solver.model.maximize(sum(cut))
        solver.run(time_limit)
        return solver.reference(self, instance, [v for v, side in enumerate(sides) if solver.value(side)])
