"""Set cover: the fewest sets that contain every element."""

from typing import Any

from .base import Instance, Reference, Rng, Task, distinct_in_range
from .pictures import PALETTE, draw_matrix
from .solvers import CpSat


class SetCover(Task):
    name = "set_cover"
    title = "Set cover"
    category = "selection"
    maximise = False
    sizes = {  # elements, sets
        "easy": ((6, 8), (5, 7)),
        "medium": ((12, 16), (10, 14)),
        "hard": ((20, 26), (16, 22)),
        "bench": ((30, 40), (20, 30)),
    }
    answer_format = "the sets that you choose, as a list of their numbers"

    def generate(self, rng: Rng, level: str) -> Instance:
        elements, sets = (rng.randint(*size) for size in self.sizes[level])
        largest = max(3, elements // 4)
        members = [set(rng.sample(range(elements), rng.randint(2, largest))) for _ in range(sets)]
        # No set is chosen for being the only one with an element.
        for element in range(elements):
            while sum(element in found for found in members) < 2:
                rng.choice(members).add(element)
        return {"elements": elements, "sets": [sorted(found) for found in members]}

    def question(self, instance: Instance) -> str:
        return (
            f"Choose as few as possible of the sets 0 to {len(instance['sets']) - 1} such that each of the elements 0 "
            f"to {instance['elements'] - 1} is in at least one of them."
        )

    def data(self, instance: Instance) -> str:
        lines = [f"{number}: {' '.join(map(str, members))}" for number, members in enumerate(instance["sets"])]
        return "The line of a set has its elements:\n" + "\n".join(lines)

    def example(self) -> tuple[Instance, Any]:
        return {"elements": 6, "sets": [[0, 1], [1, 2, 3], [0, 4, 5], [3, 4], [2, 5]]}, [1, 2]

    def check(self, instance: Instance, answer: Any) -> int | str:
        if problem := distinct_in_range(answer, len(instance["sets"]), "set"):
            return problem
        missing = set(range(instance["elements"])).difference(*(instance["sets"][number] for number in answer))
        return f"element {min(missing)} is in none of the sets" if missing else len(answer)

    def solve(self, instance: Instance, time_limit: float = 60.0) -> Reference:
        solver = CpSat()
        chosen = [solver.model.new_bool_var(str(number)) for number in range(len(instance["sets"]))]
        for element in range(instance["elements"]):
            having = [taken for taken, found in zip(chosen, instance["sets"], strict=True) if element in found]
            solver.model.add_bool_or(having)
        solver.model.minimize(sum(chosen))
        solver.run(time_limit)
        return solver.reference(self, instance, [number for number, taken in enumerate(chosen) if solver.value(taken)])

    def trivial(self, instance: Instance) -> Any:
        return list(range(len(instance["sets"])))

    how_to_read = "The picture shows the sets: each row is a set, and its squares with a number are its elements."

    def draw(self, instance: Instance, axes: Any, answer: Any = None) -> None:
        chosen = set(answer or ())
        draw_matrix(
            axes,
            instance["sets"],
            instance["elements"],
            ("set", "element"),
            lambda number, element: PALETTE[0] if number in chosen else "0.88",
            dict.fromkeys(chosen, PALETTE[0]),
        )
