"""Beta from a wanted size of the group term's gradient beside the policy gradient's (`dmpo_grad_ratio`)."""

import json
import math
from pathlib import Path

from .files import replacing

DECAY = 0.9
"""Of the moving average over steps, which so remembers about ten of them."""
BOUNDS = (1e-3, 1e3)
"""Of beta."""


class GradRatioController:
    """Chooses beta so that, over recent steps, |gradient of the group term| = wanted * |policy gradient| on average.

    Both are taken with respect to the sequence scores phi, at the policy that generated the batch: the ratio that
    `dmpo/pg_grad_ratio` logs. The average is a bias-corrected exponential moving average of the logarithm of the ratio
    at beta = 1, the current step included, so that an unusual batch moves beta by little.
    """

    def __init__(self, wanted: float, initial_beta: float) -> None:
        """Take `initial_beta` until a ratio has been seen."""
        self.wanted = wanted
        self.beta = initial_beta
        self._sum = 0.0
        self._weight = 0.0

    def update(self, ratio: float | None) -> float:
        """Beta for a step in which the ratio at beta = 1 is `ratio`; one without it (None, or 0) changes nothing."""
        if ratio:
            self._sum = DECAY * self._sum + (1 - DECAY) * math.log(ratio)
            self._weight = DECAY * self._weight + (1 - DECAY)
            low, high = BOUNDS
            self.beta = min(max(self.wanted / math.exp(self._sum / self._weight), low), high)
        return self.beta

    def save(self, file: Path) -> None:
        """Write the state, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps({"beta": self.beta, "sum": self._sum, "weight": self._weight}))

    def load(self, file: Path) -> None:
        """Read a state that `save` wrote."""
        state = json.loads(file.read_text())
        self.beta, self._sum, self._weight = state["beta"], state["sum"], state["weight"]
