import logging
import warnings
from collections import Counter

import pytest
import ray
import torch

# verl warns once for each engine that this machine has no packages for.
warnings.filterwarnings("ignore", message=".*engine is not available.*")
logging.getLogger("verl").setLevel(logging.ERROR)

OPT_IN = ("slow", "gpu")
_left_out: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def start_ray(**options) -> None:
    """`ray.init`, again where the node did not come up in the 30 seconds that Ray gives it: a busy machine."""
    for attempt in range(3):
        try:
            ray.init(include_dashboard=False, configure_logging=False, **options)
            return
        except Exception as error:
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow and GPU tests unless `-m` asks for a selection of its own."""
    if config.option.markexpr:
        return
    chosen, left_out = [], []
    for item in items:
        marks = [name for name in OPT_IN if item.get_closest_marker(name)]
        _left_out.update(marks[:1])
        (left_out if marks else chosen).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in _left_out.items():
        terminalreporter.write_line(f"{count} {name} tests not run: bash scripts/test.sh -m {name}")
