"""Travelling salesman: the shortest tour through all cities."""

from math import cos, hypot, pi, sin
from typing import Any

from .base import Instance, Reference, Rng, Task, distinct_in_range
from .pictures import points
from .solvers import CpSat


class TravellingSalesman(Task):
    name = "tsp"
    title = "Travelling salesman"
    category = "planning"
    maximise = False
    sizes = {"easy": (6, 8), "medium": (12, 16), "hard": (24, 30), "bench": (45, 55)}
    answer_format = "the cities in the order of the tour, as a list of numbers; do not repeat the first at the end"

    def generate(self, rng: Rng, level: str) -> Instance:
        number = rng.randint(*self.sizes[level])
        places = [[rng.randint(0, 99), rng.randint(0, 99)] for _ in range(number)]
        return {"places": places, "distances": _distances(places)}

    how_to_read = (
        "The picture shows where the cities are, as dots beside their numbers, on a grid with a line every 2 units. "
        "The distance of two cities is that of their dots, rounded, and at least 1."
    )

    def question(self, instance: Instance) -> str:
        last = len(instance["places"]) - 1
        return f"Find the shortest tour that visits each of the cities 0 to {last} once and returns to its start."

    def data(self, instance: Instance) -> str:
        lines = [f"{city}: {' '.join(map(str, row))}" for city, row in enumerate(instance["distances"]) if row]
        return "The line of a city has its distances to the cities with larger numbers, in order:\n" + "\n".join(lines)

    def example(self) -> tuple[Instance, Any]:
        # On a circle the optimal tour goes around.
        order = [0, 2, 4, 1, 3]
        places = [[0, 0]] * 5
        for turn, city in enumerate(order):
            places[city] = [round(50 + 40 * cos(2 * pi * turn / 5)), round(50 + 40 * sin(2 * pi * turn / 5))]
        return {"places": places, "distances": _distances(places)}, order

    def check(self, instance: Instance, answer: Any) -> int | str:
        cities = len(instance["distances"])
        if isinstance(answer, list) and len(answer) == cities + 1 and answer[0] == answer[-1]:
            answer = answer[:-1]
        if problem := distinct_in_range(answer, cities, "city"):
            return problem
        if len(answer) < cities:
            missing = min(set(range(cities)) - set(answer))
            return f"city {missing} is not visited"
        return sum(_distance(instance, a, b) for a, b in zip(answer, answer[1:] + answer[:1], strict=True))

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        cities = range(len(instance["distances"]))
        solver = CpSat()
        arcs = {(a, b): solver.model.new_bool_var(f"{a}-{b}") for a in cities for b in cities if a != b}
        solver.model.add_circuit([(a, b, taken) for (a, b), taken in arcs.items()])
        solver.model.minimize(sum(_distance(instance, a, b) * taken for (a, b), taken in arcs.items()))
        solver.run(time_limit)
        follows = {a: b for (a, b), taken in arcs.items() if solver.value(taken)}
        tour = [0]
        while (city := follows[tour[-1]]) != 0:
            tour.append(city)
        return solver.reference(self, instance, tour)

    def canonical(self, instance: Instance, answer: Any) -> str:
        cities = answer[: len(instance["distances"])]
        start = cities.index(0)
        forth = cities[start:] + cities[:start]
        back = forth[:1] + forth[:0:-1]
        return str(min(forth, back))

    def trivial(self, instance: Instance) -> Any:
        return list(range(len(instance["distances"])))

    def draw(self, instance: Instance, axes: Any, answer: Any = None) -> None:
        from matplotlib.patheffects import withStroke

        places = instance["places"]
        if answer is not None:
            tour = [places[city] for city in [*answer, answer[0]]]
            axes.plot(*zip(*tour, strict=True), color="tab:orange", linewidth=1.6, zorder=2)
        axes.scatter(*zip(*places, strict=True), s=16, color="tab:blue", zorder=3)
        size = 9
        unit = min(points(axes)) / 108
        clear = [withStroke(linewidth=2.5, foreground="white")]
        for city, (x, y) in enumerate(_labels(places, 0.68 * size / unit, 4 / unit)):
            axes.text(x, y, str(city), ha="center", va="center_baseline", fontsize=size, zorder=4, path_effects=clear)
        axes.set_aspect("equal")
        axes.set_xlim(-4, 104)
        axes.set_ylim(-4, 104)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(0, 101, 10))
            axis.set_ticks(range(0, 101, 2), minor=True)
        axes.tick_params(labelsize=9)
        axes.grid(color="0.82", linewidth=0.8)
        axes.grid(which="minor", color="0.93", linewidth=0.5)
        axes.set_axisbelow(True)


def _labels(places: list[list[int]], digit: float, gap: float) -> list[tuple[float, float]]:
    """A place for the number of each city beside its dot, free of other numbers and dots where that can be had.

    Args:
        places: of the cities.
        digit: width of a digit, whose height is half as much again.
        gap: between a dot and its number.
    """
    widths = [digit * len(str(city)) for city in range(len(places))]
    height = 1.5 * digit

    def spots(city: int) -> list[tuple[float, float]]:
        (x, y), side, up = places[city], widths[city] / 2 + 0.8 * gap, height / 2 + 0.7 * gap
        steps = [(0, up), (side, 0), (-side, 0), (0, -up)]
        steps += [(dx * 0.85 * side, dy * 0.85 * up) for dx in (1, -1) for dy in (1, -1)]
        steps += [(2.2 * dx, 2.2 * dy) for dx, dy in steps]
        return [(x + dx, y + dy) for dx, dy in steps]

    def cost(city: int, spot: tuple[float, float]) -> float:
        x, y = spot
        labels = sum(
            abs(x - u) < (widths[city] + widths[other]) / 2 and abs(y - v) < height
            for other, (u, v) in enumerate(result)
            if other != city
        )
        dots = sum(abs(x - u) < widths[city] / 2 + gap / 2 and abs(y - v) < height / 2 + gap / 2 for u, v in places)
        outside = not (0 <= x <= 100 and 0 <= y <= 100)
        far = hypot(x - places[city][0], y - places[city][1]) / 100
        # A number must be nearest to its own dot.
        other = sum(
            hypot(x - u, y - v) < 1.2 * far * 100
            for index, (u, v) in enumerate(places)
            if index != city and [u, v] != places[city]
        )
        return 4 * labels + 4 * dots + 2 * other + outside + far

    result = [spots(city)[0] for city in range(len(places))]
    for _ in range(4):
        for city in range(len(places)):
            result[city] = min(spots(city), key=lambda spot: cost(city, spot))
    return result


def _distances(places: list[list[int]]) -> list[list[int]]:
    """Upper triangle of rounded Euclidean distances, at least 1: row a has those from a to a + 1, a + 2, ..."""
    return [[max(1, round(hypot(x - u, y - v))) for u, v in places[a + 1 :]] for a, (x, y) in enumerate(places)]


def _distance(instance: Instance, a: int, b: int) -> int:
    a, b = sorted((a, b))
    return instance["distances"][a][b - a - 1]
