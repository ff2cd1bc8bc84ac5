"""Google OR-Tools' CP-SAT, as the tasks use it. Needs the extra `np`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Instance, Reference, Task


class CpSat:
    """A constraint model, and the best solution that is found to it.

    Attributes:
        model: an `ortools.sat.python.cp_model.CpModel`, for the task to fill.
    """

    def __init__(self) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise ImportError("solving needs OR-Tools: pip install 'verl-dmpo[np]'") from error
        self._cp_model = cp_model
        self.model = cp_model.CpModel()
        self._solver = cp_model.CpSolver()
        # With all of a model in its linear relaxation, tours and cuts are proved optimal in seconds, else in minutes.
        self._solver.parameters.linearization_level = 2
        self._status: Any = None

    def run(self, time_limit: float, workers: int = 1, seed: int = 0) -> None:
        """Solve, for at most `time_limit` seconds.

        Raises:
            RuntimeError: no solution was found in that time.
        """
        parameters = self._solver.parameters
        parameters.max_time_in_seconds, parameters.num_workers, parameters.random_seed = time_limit, workers, seed
        self._status = self._solver.solve(self.model)
        if self._status not in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE):
            name = self._solver.status_name(self._status)
            raise RuntimeError(f"CP-SAT found no solution in {time_limit} s: {name}; give it more time")

    def value(self, variable: Any) -> int:
        return self._solver.value(variable)

    def reference(self, task: Task, instance: Instance, solution: Any) -> Reference:
        """The solution as a reference, valued by the task's own verifier.

        Raises:
            AssertionError: the verifier disagrees with the model, which is a fault in one of them.
        """
        import ortools

        from .base import Reference

        verdict = task.verify(instance, solution)
        optimal = self._status == self._cp_model.OPTIMAL
        assert verdict.valid and verdict.value == round(self._solver.objective_value), (task.name, verdict)
        return Reference(
            value=verdict.value,
            solution=solution,
            status="optimal" if optimal else "feasible",
            solver=f"CP-SAT {ortools.__version__}",
            bound=float(verdict.value) if optimal else self._solver.best_objective_bound,
        )
