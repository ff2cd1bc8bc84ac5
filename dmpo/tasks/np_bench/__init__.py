"""NP-hard problems with many valid answers of different quality: generate, verify, solve, draw. See docs/np_bench.md.

task = TASKS["tsp"]
instance = task.make("easy", seed=0)
text = task.prompt(instance)
verdict = task.verify(instance, task.parse(reply))
"""

from .base import CATEGORIES, LEVELS, Instance, Reference, Rng, Task, Verdict, content_hash
from .dominating_set import DominatingSet
from .feedback_vertex_set import FeedbackVertexSet
from .graph_coloring import GraphColoring
from .hamiltonian_cycle import HamiltonianCycle
from .knapsack import Knapsack
from .maximum_clique import MaximumClique
from .maximum_cut import MaximumCut
from .maximum_independent_set import MaximumIndependentSet
from .meeting_scheduling import MeetingScheduling
from .minimum_cut import MinimumCut
from .parsing import Unparsed
from .set_cover import SetCover
from .subset_sum import SubsetSum
from .tsp import TravellingSalesman
from .vertex_cover import VertexCover

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        TravellingSalesman(),
        HamiltonianCycle(),
        GraphColoring(),
        MaximumClique(),
        MaximumIndependentSet(),
        VertexCover(),
        DominatingSet(),
        FeedbackVertexSet(),
        MinimumCut(),
        MaximumCut(),
        Knapsack(),
        SubsetSum(),
        SetCover(),
        MeetingScheduling(),
    )
}

__all__ = [
    "CATEGORIES",
    "LEVELS",
    "TASKS",
    "Instance",
    "Reference",
    "Rng",
    "Task",
    "Unparsed",
    "Verdict",
    "content_hash",
]
