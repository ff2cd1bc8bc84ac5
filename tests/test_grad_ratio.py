import math

import pytest

from dmpo.grad_ratio import BOUNDS, DECAY, GradRatioController

RATIOS = [0.5, 2.0, 0.1, 0.3, 4.0, 0.7]


def expected(wanted, ratios):
    """Wanted ratio over the weighted geometric mean, written out: the newest weighs 1, the one before it DECAY, ..."""
    weights = [DECAY**age for age in range(len(ratios))]
    mean = sum(w * math.log(r) for w, r in zip(weights, reversed(ratios), strict=True)) / sum(weights)
    return wanted / math.exp(mean)


def test_beta_is_the_wanted_ratio_over_the_average_one():
    controller = GradRatioController(0.25, initial_beta=1.0)
    for count in range(1, len(RATIOS) + 1):
        assert controller.update(RATIOS[count - 1]) == pytest.approx(expected(0.25, RATIOS[:count]))


def test_a_step_without_a_ratio_changes_nothing():
    controller = GradRatioController(0.25, initial_beta=3.0)
    assert [controller.update(None), controller.update(0.0)] == [3.0, 3.0]
    beta = controller.update(0.5)
    assert controller.update(None) == controller.update(0.0) == beta == 0.5
    assert controller.update(0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("ratio,bound", [(1e9, BOUNDS[0]), (1e-9, BOUNDS[1])])
def test_beta_is_bounded(ratio, bound):
    assert GradRatioController(1.0, initial_beta=1.0).update(ratio) == bound


def test_a_saved_state_goes_on_as_if_nothing_had_happened(tmp_path):
    whole, first = GradRatioController(0.25, 1.0), GradRatioController(0.25, 1.0)
    for ratio in RATIOS[:3]:
        whole.update(ratio)
        first.update(ratio)
    first.save(tmp_path / "global_step_3" / "state.json")
    assert [file.name for file in (tmp_path / "global_step_3").iterdir()] == ["state.json"]
    second = GradRatioController(0.25, 1.0)
    second.load(tmp_path / "global_step_3" / "state.json")
    assert second.beta == first.beta
    for ratio in (None, *RATIOS[3:]):
        assert second.update(ratio) == whole.update(ratio)
