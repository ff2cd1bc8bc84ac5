"""Balanced minimum cut: two halves with the fewest edges between them."""

from __future__ import annotations

from math import ceil
from time import monotonic
from typing import Any

from .base import Instance, Reference, Rng
from .graphs import CutTask, cut_size, graph_of, random_graph


class MinimumCut(CutTask):
    name = "minimum_cut"
    title = "Balanced minimum cut"
    maximise = False
    balanced = True
    sizes = {"easy": (4, 5), "medium": (6, 8), "hard": (12, 15), "bench": (25, 25)}  # vertices of a half
    wanted = (
        "Divide the vertices of a graph into two halves of the same size, with as few edges as possible between them."
    )
    answer_format = "the vertices of one of the two halves, as a list of numbers"

    def generate(self, rng: Rng, level: str) -> Instance:
        half = rng.randint(*self.sizes[level])
        # Few edges lie between two planted halves, and the split by number is no lucky one.
        within, across = min(0.8, 6 / half), min(0.15, 1.2 / half)
        while True:
            graph = random_graph(rng, 2 * half, lambda a, b: across if a < half <= b else within)
            if cut_size(graph, self.trivial(graph)) >= 0.4 * len(graph["edges"]):
                return graph

    def example(self) -> tuple[Instance, Any]:
        return graph_of(6, [(0, 2), (0, 5), (1, 3), (1, 4), (2, 3), (2, 5), (3, 4)]), [0, 2, 5]

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        try:
            import networkx
        except ImportError as error:
            raise ImportError("solving needs networkx and NumPy: pip install 'verl-dmpo[np]'") from error
        deadline = monotonic() + time_limit
        half, bound = _branch_and_bound(instance, _kernighan_lin(instance), deadline)
        value = cut_size(instance, half)
        return Reference(
            value=value,
            solution=half,
            status="optimal" if bound == value else "feasible",
            solver=f"networkx {networkx.__version__} Kernighan-Lin, branch and bound",
            bound=float(bound),
        )


def _kernighan_lin(instance: Instance, starts: int = 100) -> list[int]:
    """The best half of many local searches."""
    import networkx
    from networkx.algorithms.community import kernighan_lin_bisection

    graph = networkx.Graph()
    graph.add_nodes_from(range(instance["vertices"]))
    graph.add_edges_from(instance["edges"])
    halves = (sorted(kernighan_lin_bisection(graph, seed=seed)[0]) for seed in range(starts))
    return min(halves, key=lambda half: cut_size(instance, half))


def _branch_and_bound(instance: Instance, half: list[int], deadline: float) -> tuple[list[int], int]:
    """The best half, and a lower bound on the edges that any cuts, starting from a good half.

    CP-SAT proves next to nothing here.
    """
    import numpy as np

    number = instance["vertices"]
    laplacian = np.zeros((number, number))
    for a, b in instance["edges"]:
        laplacian[a, b] = laplacian[b, a] = -1
    laplacian -= np.diag(laplacian.sum(0))
    sign = np.where(np.isin(range(number), half), 1.0, -1.0)
    # The vertices with the most cut edges are decided first.
    order = np.argsort(-sign * (laplacian @ sign), kind="stable")
    laplacian, sign = laplacian[order][:, order], sign[order] * sign[order[0]]
    value = cut_size(instance, half)
    open_nodes = [(0.0, [1])]  # a bound, and the sides of the first vertices
    while open_nodes:
        if monotonic() > deadline:
            return half, min(value, ceil(min(bound for bound, _ in open_nodes) - 1e-6))
        bound, sides = open_nodes.pop()
        full = next((side for side in (1, -1) if 2 * sides.count(side) == number), None)
        if full is not None:  # which leaves the other side to all vertices that are not decided
            found = sorted(int(vertex) for vertex, side in zip(order, sides, strict=False) if side == full)
            if cut_size(instance, found) < value:
                half, value = found, cut_size(instance, found)
            continue
        bound = max(bound, _spectral_bound(laplacian, sides, sign, value))
        if bound < value - 1 + 1e-6:
            open_nodes += [(bound, [*sides, 1]), (bound, [*sides, -1])]
    return half, value


def _spectral_bound(laplacian: Any, sides: list[int], sign: Any, value: int, steps: int = 100) -> float:
    """No balanced cut with the given sides of the first vertices has fewer edges than this.

    Let x be 1 on one side and -1 on the other; x = Sz, where z has one entry for the vertices whose sides are given and
    one for each other vertex. Four times the cut is x'Lx = z'(S'LS + diag(u))z - sum(u) for any u; since the balance
    makes z orthogonal to S'1, that is at least |z|^2 times the smallest eigenvalue there, less sum(u). The best u is
    approached by subgradients, until `value` cannot be improved. It starts where z of a given good cut, `sign`, is an
    eigenvector, which for many graphs is the best u at once.
    """
    import numpy as np

    given = len(sides)
    members = np.eye(len(laplacian))[:, given - 1 :]
    members[:given, 0] = sides
    reduced, guess = members.T @ laplacian @ members, sign[given - 1 :].copy()
    guess[0] = 1
    basis = np.linalg.svd(members.sum(0)[None])[2][1:].T
    shift = -guess * (reduced @ guess)
    best = 0.0
    for _ in range(steps):
        eigenvalues, vectors = np.linalg.eigh(basis.T @ (reduced + np.diag(shift)) @ basis)
        bound = (len(guess) * eigenvalues[0] - shift.sum()) / 4
        best = max(best, bound)
        if best > value - 1 + 1e-6:
            break
        gradient = len(guess) * (basis @ vectors[:, 0]) ** 2 - 1
        # Polyak's step to a little more than is needed.
        shift += 4 * (value - 0.8 - bound) / max(gradient @ gradient, 1e-9) * gradient
    return best
