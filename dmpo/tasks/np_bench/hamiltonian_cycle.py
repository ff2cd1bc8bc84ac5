"""Longest cycle: as many vertices as possible; a Hamiltonian cycle where the graph has one."""

from typing import Any

from .base import Instance, Reference, Rng, distinct_in_range
from .graphs import GraphTask, graph_of, neighbours, random_graph
from .solvers import CpSat


class HamiltonianCycle(GraphTask):
    name = "hamiltonian_cycle"
    title = "Longest cycle"
    category = "planning"
    maximise = True
    sizes = {"easy": (6, 8), "medium": (12, 16), "hard": (24, 30), "bench": (40, 50)}
    wanted = (
        "Find a longest cycle in a graph: it visits as many vertices as possible, none of them twice, goes along edges "
        "only and returns to its start. It need not visit all vertices."
    )
    answer_format = "the vertices in the order of the cycle, as a list of numbers; do not repeat the first at the end"

    def generate(self, rng: Rng, level: str) -> Instance:
        # A planted cycle visits most vertices, and a few more edges lead astray.
        number = rng.randint(*self.sizes[level])
        ring = rng.randint(number - number // 5, number)
        return random_graph(
            rng, number, lambda a, b: 1 if b < ring and b - a in (1, ring - 1) else min(0.2, 1.8 / number)
        )

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 2), (0, 3), (1, 3), (1, 4), (2, 4), (2, 3), (3, 5)]), [0, 2, 4, 1, 3]

    def check(self, instance: Instance, answer: Any) -> int | str:
        if isinstance(answer, list) and len(answer) > 1 and answer[0] == answer[-1]:
            answer = answer[:-1]
        if problem := distinct_in_range(answer, instance["vertices"], "vertex"):
            return problem
        if len(answer) < 3:
            return "a cycle has at least three vertices"
        near = neighbours(instance)
        for a, b in zip(answer, answer[1:] + answer[:1], strict=True):
            if b not in near[a]:
                return f"no edge joins the vertices {a} and {b}"
        return len(answer)

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        solver = CpSat()
        skipped = [solver.model.new_bool_var(f"{vertex} is skipped") for vertex in range(instance["vertices"])]
        arcs = {
            arc: solver.model.new_bool_var(f"{arc[0]}-{arc[1]}")
            for a, b in instance["edges"]
            for arc in ((a, b), (b, a))
        }
        loops = [(vertex, vertex, variable) for vertex, variable in enumerate(skipped)]
        solver.model.add_circuit(loops + [(a, b, taken) for (a, b), taken in arcs.items()])
        for a, b in instance["edges"]:  # to and fro on one edge is no cycle
            solver.model.add_at_most_one(arcs[a, b], arcs[b, a])
        solver.model.maximize(sum(arcs.values()))
        solver.run(time_limit)
        follows = {a: b for (a, b), taken in arcs.items() if solver.value(taken)}
        cycle = [min(follows)]
        while (vertex := follows[cycle[-1]]) != cycle[0]:
            cycle.append(vertex)
        return solver.reference(self, instance, cycle)

    def canonical(self, instance: Instance, answer: Any) -> str:
        cycle = answer[:-1] if answer[0] == answer[-1] else answer
        start = cycle.index(min(cycle))
        forth = cycle[start:] + cycle[:start]
        return str(min(forth, forth[:1] + forth[:0:-1]))

    def trivial(self, instance: Instance) -> Any:
        """A shortest cycle."""
        near = neighbours(instance)
        cycles = []
        for a, b in instance["edges"]:
            paths, seen = [[a]], {a}
            for path in paths:
                if path[-1] == b:
                    cycles.append(path)
                    break
                for other in sorted(near[path[-1]] - seen):
                    if (path[-1], other) != (a, b):
                        seen.add(other)
                        paths.append([*path, other])
        return min(cycles, key=len)

    def highlights(self, instance: Instance, answer: Any) -> tuple[dict[int, int], set[tuple[int, int]]]:
        cycle = answer[:-1] if answer[0] == answer[-1] else answer
        edges = {(min(edge), max(edge)) for edge in zip(cycle, cycle[1:] + cycle[:1], strict=True)}
        return dict.fromkeys(cycle, 0), edges
