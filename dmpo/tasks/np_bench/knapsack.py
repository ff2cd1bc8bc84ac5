"""Knapsack: the most valuable items that fit."""

from itertools import accumulate
from typing import Any

from .base import Instance, Reference, Rng, Task, distinct_in_range
from .pictures import draw_table
from .solvers import CpSat


class Knapsack(Task):
    name = "knapsack"
    title = "Knapsack"
    category = "selection"
    maximise = True
    sizes = {"easy": (6, 8), "medium": (14, 20), "hard": (30, 40), "bench": (56, 80)}
    answer_format = "the items that you choose, as a list of numbers"

    def generate(self, rng: Rng, level: str) -> Instance:
        items = [[rng.randint(1, 60), rng.randint(1, 60)] for _ in range(rng.randint(*self.sizes[level]))]
        weights = [weight for weight, _ in items]
        return {"capacity": max(*weights, round(sum(weights) * (0.3 + 0.2 * rng.random()))), "items": items}

    def question(self, instance: Instance) -> str:
        return (
            f"Choose from the items 0 to {len(instance['items']) - 1}, each at most once, such that their weights add "
            f"up to at most {instance['capacity']} and their values to as much as possible."
        )

    def data(self, instance: Instance) -> str:
        lines = [f"{item}: {weight} {value}" for item, (weight, value) in enumerate(instance["items"])]
        return "The line of an item has its weight and its value:\n" + "\n".join(lines)

    def example(self) -> tuple[Instance, Any]:
        return {"capacity": 10, "items": [[6, 9], [5, 7], [4, 6], [8, 12], [1, 1]]}, [0, 2]

    def check(self, instance: Instance, answer: Any) -> int | str:
        items, capacity = instance["items"], instance["capacity"]
        if problem := distinct_in_range(answer, len(items), "item"):
            return problem
        if (weight := sum(items[item][0] for item in answer)) > capacity:
            return f"the items weigh {weight}; at most {capacity} is allowed"
        return sum(items[item][1] for item in answer)

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        solver = CpSat()
        chosen = [solver.model.new_bool_var(str(item)) for item in range(len(instance["items"]))]
        weights, values = zip(*instance["items"], strict=True)
        solver.model.add(sum(w * taken for w, taken in zip(weights, chosen, strict=True)) <= instance["capacity"])
        solver.model.maximize(sum(v * taken for v, taken in zip(values, chosen, strict=True)))
        solver.run(time_limit)
        return solver.reference(self, instance, [item for item, taken in enumerate(chosen) if solver.value(taken)])

    def trivial(self, instance: Instance) -> Any:
        """The first items, as many as fit."""
        weights = accumulate(weight for weight, _ in instance["items"])
        return [item for item, weight in enumerate(weights) if weight <= instance["capacity"]]

    def draw(self, instance: Instance, axes: Any, answer: Any = None) -> None:
        rows = [[item, weight, value] for item, (weight, value) in enumerate(instance["items"])]
        draw_table(axes, ("item", "weight", "value"), rows, answer or ())
        axes.set_title(f"capacity {instance['capacity']}", fontsize=13)
