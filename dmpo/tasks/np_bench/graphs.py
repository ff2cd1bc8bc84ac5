"""What the graph tasks share: random graphs, their text and pictures, and answers that are sets or sides of vertices.

A graph is {"vertices": n, "edges": [[a, b], ...]}: vertices 0 to n - 1, edges sorted, with a < b.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from itertools import combinations
from math import pi
from typing import Any, ClassVar

from .base import Instance, Reference, Rng, Task, distinct_in_range
from .pictures import PALETTE, draw_matrix
from .solvers import CpSat


def random_graph(rng: Rng, number: int, probability: Callable[[int, int], float]) -> Instance:
    """A connected graph with several cycles; each edge a < b by `probability(a, b)`; then renumbered at random."""
    while True:
        pairs = [pair for pair in combinations(range(number), 2) if rng.random() < probability(*pair)]
        labels = rng.shuffled(range(number))
        graph = graph_of(number, [(labels[a], labels[b]) for a, b in pairs])
        if len(pairs) >= number + 2 and len(distances(graph, 0)) == number:
            return graph


def graph_of(number: int, edges: Iterable[tuple[int, int]]) -> Instance:
    return {"vertices": number, "edges": sorted(sorted(edge) for edge in edges)}


def neighbours(instance: Instance) -> list[set[int]]:
    """The neighbours of each vertex."""
    result: list[set[int]] = [set() for _ in range(instance["vertices"])]
    for a, b in instance["edges"]:
        result[a].add(b)
        result[b].add(a)
    return result


def distances(instance: Instance, start: int) -> dict[int, int]:
    """The number of steps from `start` to each vertex that can be reached, nearest first."""
    near = neighbours(instance)
    result = {start: 0}
    for vertex in (queue := [start]):
        for other in sorted(near[vertex] - result.keys()):
            result[other] = result[vertex] + 1
            queue.append(other)
    return result


def cut_size(instance: Instance, side: Iterable[int]) -> int:
    """The number of edges with one end in `side`."""
    side = set(side)
    return sum((a in side) != (b in side) for a, b in instance["edges"])


class GraphTask(Task):
    """A task on an undirected graph without weights."""

    wanted: ClassVar[str]
    """The question."""
    how_to_read = (
        "The picture shows the graph: circles with their numbers are vertices, lines are edges. If it is a table, each "
        "row is a vertex, and its squares with a number are the vertices to which edges join it."
    )

    def question(self, instance: Instance) -> str:
        return f"{self.wanted} The graph is undirected and has the vertices 0 to {instance['vertices'] - 1}."

    def data(self, instance: Instance) -> str:
        lines = [
            f"{vertex}: {' '.join(map(str, larger))}"
            for vertex, near in enumerate(neighbours(instance))
            if (larger := sorted(other for other in near if other > vertex))
        ]
        return "The line of a vertex has its neighbours with larger numbers:\n" + "\n".join(lines)

    def highlights(self, instance: Instance, answer: Any) -> tuple[dict[int, int], set[tuple[int, int]]]:
        """What to show of a valid answer: numbers of colours of some vertices, and edges a < b."""
        return dict.fromkeys(answer, 0), set()

    def draw(self, instance: Instance, axes: Any, answer: Any = None) -> None:
        colours, thick = ({}, set()) if answer is None else self.highlights(instance, answer)
        fills = {vertex: PALETTE[colour % len(PALETTE)] for vertex, colour in colours.items()}
        places = layout(instance)
        if places is None:
            number = instance["vertices"]
            near = [sorted(others) for others in neighbours(instance)]

            def fill(a: int, b: int) -> str:
                return "#ff6f61" if (min(a, b), max(a, b)) in thick else fills.get(a, "0.88")

            draw_matrix(axes, near, number, ("vertex", "joined to vertex"), fill, fills)
            return
        from matplotlib.collections import LineCollection

        for edges, style in (
            ([(a, b) for a, b in instance["edges"] if (a, b) not in thick], {"color": "0.45", "linewidth": 0.8}),
            (sorted(thick), {"color": "tab:red", "linewidth": 2.0}),
        ):
            axes.add_collection(LineCollection([(places[a], places[b]) for a, b in edges], zorder=1, **style))
        faces = [fills.get(vertex, "white") for vertex in range(len(places))]
        axes.scatter(*zip(*places, strict=True), s=210, c=faces, edgecolor="black", linewidth=0.9, zorder=3)
        for vertex, (x, y) in enumerate(places):
            axes.text(x, y, str(vertex), ha="center", va="center_baseline", fontsize=8.5, zorder=4)
        axes.set_aspect("equal")
        axes.axis("off")
        axes.set_xlim(-0.05, 1.05)
        axes.set_ylim(-0.05, 1.05)


MOST_EDGES = 100
"""That can be followed in a picture."""
RADIUS = 0.0175
"""Of a vertex in a picture of 7 inches, as a share of its width."""


def layout(instance: Instance) -> list[tuple[float, float]] | None:
    """A place in the unit square for each vertex such that no edge passes behind a vertex that it does not touch.

    By springs in large sparse graphs, else on a circle. None where neither does, or the edges are too many to follow.

    Raises:
        ImportError: networkx or NumPy is missing.
    """
    number, edges = instance["vertices"], instance["edges"]
    if len(edges) > MOST_EDGES:
        return None
    try:
        import networkx
        import numpy as np
    except ImportError as error:
        raise ImportError("drawing needs networkx and NumPy: pip install 'verl-dmpo[np]'") from error
    turns = 2 * pi * np.arange(number) / number
    circle = 0.5 + 0.5 * np.stack([np.sin(turns), np.cos(turns)], 1)
    if number > 10 and len(edges) <= 3 * number:
        graph = networkx.Graph()
        graph.add_nodes_from(range(number))
        graph.add_edges_from(edges)
        found = networkx.spring_layout(graph, k=2.5 / number**0.5, iterations=300, seed=0)
        springs = np.array([found[vertex] for vertex in range(number)])
        # Halfway to their ranks, so that vertices in the middle have room.
        springs += 2 * springs.argsort(0).argsort(0) / number
        springs = (springs - springs.min(0)) / np.ptp(springs, axis=0)
        # The fewer vertices, the farther edges keep away from them.
        for room in (4, 2.8, 2, 1.6)[number // 20 :]:
            if (places := _make_room(springs, np.array(edges), room * RADIUS)) is not None:
                return places.tolist()
    return None if _make_room(circle, np.array(edges), 1.4 * RADIUS, steps=1) is None else circle.tolist()


def _make_room(places: Any, edges: Any, room: float, steps: int = 150) -> Any:
    """Places, [vertices, 2], moved so that edges, [edges, 2], pass no vertex closer than `room`; None if that fails."""
    import numpy as np

    places = places.copy()
    number = len(places)
    touches = np.zeros((len(edges), number), bool)
    touches[np.arange(len(edges))[:, None], edges] = True
    for _ in range(steps):
        starts, along = places[edges[:, 0]], places[edges[:, 1]] - places[edges[:, 0]]
        length = np.maximum((along**2).sum(1), 1e-12)
        # The point of each edge that is nearest to each vertex: [edges, vertices, 2].
        share = ((places[None] - starts[:, None]) * along[:, None]).sum(2) / length[:, None]
        share = share.clip(0, 1)
        away = places[None] - starts[:, None] - share[..., None] * along[:, None]
        distance = np.where(touches, np.inf, np.sqrt((away**2).sum(2)))
        apart = places[:, None] - places[None]
        between = np.sqrt((apart**2).sum(2)) + np.where(np.eye(number, dtype=bool), np.inf, 0)
        if distance.min() >= room and between.min() >= 2 * room:
            return places
        push = (room * 1.1 - distance).clip(0) / np.maximum(distance, 1e-6)
        push = np.where(np.isfinite(distance), push, 0)[..., None] * away
        force = push.sum(0)
        for end, weight in ((0, 1 - share), (1, share)):
            np.add.at(force, edges[:, end], -(push * weight[..., None]).sum(1))
        spread = (2.2 * room - between).clip(0) / np.maximum(between, 1e-6)
        force += 0.5 * (np.where(np.isfinite(between), spread, 0)[..., None] * apart).sum(1)
        places = (places + 0.4 * force.clip(-room, room)).clip(0, 1)
    return None


class VertexSetTask(GraphTask):
    """The answer is a set of vertices; its size is the value."""

    answer_format = "the vertices that you choose, as a list of numbers"

    @abstractmethod
    def fault(self, instance: Instance, chosen: set[int]) -> str | None:
        """Why the vertices must not be chosen; None if they may."""

    @abstractmethod
    def constrain(self, instance: Instance, model: Any, chosen: list[Any]) -> None:
        """Let CP-SAT's `model` choose only what `fault` allows; `chosen` are its variables."""

    def check(self, instance: Instance, answer: Any) -> int | str:
        return (
            distinct_in_range(answer, instance["vertices"], "vertex")
            or ("" if answer else "no vertex is chosen")
            or self.fault(instance, set(answer))
            or len(answer)
        )

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        solver = CpSat()
        chosen = [solver.model.new_bool_var(str(vertex)) for vertex in range(instance["vertices"])]
        self.constrain(instance, solver.model, chosen)
        (solver.model.maximize if self.maximise else solver.model.minimize)(sum(chosen))
        solver.run(time_limit)
        return solver.reference(self, instance, [v for v, variable in enumerate(chosen) if solver.value(variable)])

    def trivial(self, instance: Instance) -> Any:
        return [0] if self.maximise else list(range(instance["vertices"]))


class CutTask(GraphTask):
    """The answer divides the vertices into two sides; the number of edges between them is the value.

    It is the list of the vertices of one side, or the lists of both.
    """

    category = "partition"
    answer_format = "the vertices of one of the two sides, as a list of numbers"
    balanced: ClassVar[bool]
    """Whether both sides must have the same size."""

    def check(self, instance: Instance, answer: Any) -> int | str:
        number = instance["vertices"]
        if both := isinstance(answer, list) and len(answer) == 2 and all(isinstance(side, list) for side in answer):
            answer, other = answer
            if not all(isinstance(item, int) for item in answer + other):
                return "each side must be a list of vertex numbers"
            answer, side = answer + other, answer
        if problem := distinct_in_range(answer, number, "vertex"):
            return problem
        if both and len(answer) < number:
            return f"vertex {min(set(range(number)) - set(answer))} is on neither side"
        size = len(side if both else answer)
        if self.balanced and 2 * size != number:
            return f"the sides have {size} and {number - size} vertices; they must have the same number"
        if size in (0, number):
            return "one side has no vertices"
        return cut_size(instance, side if both else answer)

    def side(self, instance: Instance, answer: Any) -> list[int]:
        """The sorted side with vertex 0 of a valid answer."""
        side = answer[0] if isinstance(answer[0], list) else answer
        return sorted(side if 0 in side else set(range(instance["vertices"])) - set(side))

    def canonical(self, instance: Instance, answer: Any) -> str:
        return str(self.side(instance, answer))

    def trivial(self, instance: Instance) -> Any:
        return list(range(instance["vertices"] // 2))

    def highlights(self, instance: Instance, answer: Any) -> tuple[dict[int, int], set[tuple[int, int]]]:
        side = self.side(instance, answer)
        colours = {vertex: int(vertex not in side) for vertex in range(instance["vertices"])}
        return colours, {(a, b) for a, b in instance["edges"] if colours[a] != colours[b]}
