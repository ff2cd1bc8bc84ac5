import logging
import warnings

import pytest
import torch

# verl warns once for each engine that this machine has no packages for.
warnings.filterwarnings("ignore", message=".*engine is not available.*")
logging.getLogger("verl").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
