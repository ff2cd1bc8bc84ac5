"""Subset sum: as many numbers as possible that add up to exactly the target."""

from itertools import accumulate
from typing import Any

from .base import Instance, Reference, Rng, Task, distinct_in_range
from .pictures import draw_table
from .solvers import CpSat


class SubsetSum(Task):
    name = "subset_sum"
    title = "Subset sum"
    category = "selection"
    maximise = True
    sizes = {"easy": (6, 8), "medium": (9, 11), "hard": (12, 14), "bench": (15, 20)}
    answer_format = "the positions that you choose, not the numbers there, as a list"

    def generate(self, rng: Rng, level: str) -> Instance:
        # The planted subset leaves room for others with the same sum and more numbers.
        number = rng.randint(*self.sizes[level])
        numbers = [rng.randint(1, 4 * number) for _ in range(number)]
        planted = rng.sample(range(number), rng.randint(number // 3, number // 2))
        return {"numbers": numbers, "target": sum(numbers[position] for position in planted)}

    def question(self, instance: Instance) -> str:
        return (
            f"Choose from the numbers at the positions 0 to {len(instance['numbers']) - 1}, each position at most "
            f"once, such that they add up to exactly {instance['target']}. Choose as many of them as possible."
        )

    def data(self, instance: Instance) -> str:
        lines = [f"{position}: {number}" for position, number in enumerate(instance["numbers"])]
        return "The number at each position:\n" + "\n".join(lines)

    def example(self) -> tuple[Instance, Any]:
        return {"numbers": [9, 3, 5, 2, 4], "target": 9}, [1, 3, 4]

    def check(self, instance: Instance, answer: Any) -> int | str:
        numbers, target = instance["numbers"], instance["target"]
        if problem := distinct_in_range(answer, len(numbers), "position"):
            return problem
        if (total := sum(numbers[position] for position in answer)) != target:
            return f"the numbers add up to {total}, not to {target}"
        return len(answer)

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        solver = CpSat()
        chosen = [solver.model.new_bool_var(str(position)) for position in range(len(instance["numbers"]))]
        terms = [number * taken for number, taken in zip(instance["numbers"], chosen, strict=True)]
        solver.model.add(sum(terms) == instance["target"])
        solver.model.maximize(sum(chosen))
        solver.run(time_limit)
        return solver.reference(self, instance, [place for place, taken in enumerate(chosen) if solver.value(taken)])

    def trivial(self, instance: Instance) -> Any:
        """The first numbers, as many as do not exceed the target; seldom valid."""
        sums = accumulate(instance["numbers"])
        return [position for position, total in enumerate(sums) if total <= instance["target"]]

    def draw(self, instance: Instance, axes: Any, answer: Any = None) -> None:
        draw_table(axes, ("position", "number"), [list(row) for row in enumerate(instance["numbers"])], answer or ())
        axes.set_title(f"target {instance['target']}", fontsize=13)
