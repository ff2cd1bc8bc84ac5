"""However verl deals a mini-batch to ranks and micro-batches, the gradient is that of the unsplit objective.

verl's own FSDP engine runs over gloo with 1, 2 and 4 processes (engine_ranks.py) on the mini-batches of split_cases.py,
where the reference is, too. `python -m tests.test_split_invariance` prints the errors as a table.
"""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from dmpo.dmpo_losses import COEF_FIELD, GROUP_FIELD

from .engine_ranks import DTYPES, Outcome, Step, take
from .split_cases import (
    ROWS,
    Case,
    Split,
    deal,
    tiny_model,
    unsplit_gradient,
    unsplit_gradients,
    whole_batch,
    worker_batch,
)

SPLIT_TOLERANCE = 1e-12
FLOAT32_TOLERANCE = 1e-5
TIMEOUT = 600  # seconds for all processes; a busy machine takes several times the minute of an idle one

PAPER = (("dmpo_temperature", 1 / 15), ("dmpo_policy_temperature", 1.0))
SUMMED = (("dmpo_divergence", "reverse_kl"), ("dmpo_length_norm", "sum"), ("dmpo_policy_temperature", 8.0))
CASES = [
    Case("grpo_dmpo"),
    Case("pure_dmpo", batch="even"),
    Case("grpo_dmpo", settings=PAPER),
    Case("grpo_dmpo_zero"),
    Case("grpo_dmpo_js", "seq-mean-token-sum"),
    Case("grpo_dmpo_fkl", "seq-mean-token-mean"),
    Case("grpo_dmpo", settings=SUMMED),
    Case("dmpo_zero"),
]
# The first two are run on every split, the others on some.
THOROUGH = CASES[:2]

UNSPLIT = Split(1, "grouped", ROWS)
SPLITS = [
    UNSPLIT,
    Split(1, "shuffled", 3),
    Split(1, "shuffled", max_tokens=40),
    Split(1, "grouped", max_tokens=100),
    Split(2, "balanced", 12),
    Split(2, "shuffled", 3),
    Split(2, "grouped", 1),
    Split(2, "shuffled", max_tokens=40),
    Split(2, "balanced", max_tokens=80),
    Split(4, "balanced", 6),
    Split(4, "shuffled", 2),
    Split(4, "grouped", 1),
    Split(4, "shuffled", max_tokens=40),
    Split(4, "balanced", max_tokens=1000),
]
SOME = [UNSPLIT, SPLITS[2], SPLITS[5], SPLITS[12]]
FEW = [SPLITS[i] for i in (3, 8, 12)]

NO_SIGNAL = [Case("dmpo_zero", batch="no_signal"), Case("grpo_dmpo_zero", batch="no_signal")]
PER_MICRO_BATCH = ["softmax_per_micro_batch", "weighted_softmax_per_micro_batch"]
SCALED_WRONGLY = ["without_dp_size", "mean_over_micro_batch"]
CONTROL = Case("pure_dmpo", batch="even")


class Run(NamedTuple):
    """One optimizer step; `dtype` and `loss` as in engine_ranks.Step."""

    case: Case
    split: Split
    dtype: str
    loss: str = "dmpo"


def plan() -> list[Run]:
    runs = [Run(case, split, "fp64") for case in CASES for split in (SPLITS if case in THOROUGH else SOME)]
    runs += [Run(case, split, "fp32") for case in CASES for split in FEW]
    runs += [Run(case, split, "fp64") for case in NO_SIGNAL for split in FEW]
    runs += [
        Run(case, split, "fp64", loss)
        for loss in PER_MICRO_BATCH
        for case in (CONTROL, Case("grpo_dmpo"))
        for split in SOME
    ]
    runs += [Run(CONTROL, split, "fp64", loss) for loss in SCALED_WRONGLY for split in SOME]
    return runs


def measure(work: Path) -> dict[Run, Outcome]:
    """Run the plan in the folder `work`."""
    tiny_model("fp32").save_pretrained(work / "model")
    runs, batch = plan(), cache(worker_batch)
    steps = [
        Step(
            batch=batch(case, dtype),
            ranks=deal(batch(case, dtype), split),
            micro_batch_size=split.micro_batch_size,
            max_tokens=split.max_tokens,
            actor=case.actor,
            loss=loss,
            dtype=dtype,
        )
        for case, split, dtype, loss in runs
    ]
    return dict(zip(runs, take(steps, work / "model", work, timeout=TIMEOUT), strict=True))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Outcome]:
    return measure(tmp_path_factory.mktemp("ranks"))


def errors(outcomes: dict[Run, Outcome], case: Case, dtype: str = "fp64", loss: str = "dmpo") -> dict[Split, float]:
    """Relative error of each split's gradient to the unsplit objective's."""
    expected = unsplit_gradient(case)
    return {
        run.split: relative_error(outcome.gradient, expected)
        for run, outcome in outcomes.items()
        if (run.case, run.dtype, run.loss) == (case, dtype, loss)
    }


def spread(outcomes: dict[Run, Outcome], case: Case) -> float:
    """Largest difference between the gradients of any two splits, relative to the unsplit objective's, in float64."""
    gradients = [
        outcome.gradient
        for run, outcome in outcomes.items()
        if (run.case, run.dtype, run.loss) == (case, "fp64", "dmpo")
    ]
    return max((a - b).norm().item() for a in gradients for b in gradients) / unsplit_gradient(case).norm().item()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def worst(found: dict[Split, float]) -> str:
    split = max(found, key=found.get)
    return f"relative error {found[split]:.1e} on {split.name}"


def each_case(test: Callable) -> Callable:
    return pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))(test)


@each_case
def test_gradient_is_the_same_for_any_split(outcomes, case):
    found = spread(outcomes, case)
    assert found <= SPLIT_TOLERANCE, f"two splits differ by {found:.1e}"


@each_case
def test_gradient_is_that_of_the_unsplit_objective(outcomes, case):
    found = errors(outcomes, case)
    assert max(found.values()) <= SPLIT_TOLERANCE, worst(found)


@each_case
def test_float32_gradient_is_that_of_the_unsplit_float64_objective(outcomes, case):
    found = errors(outcomes, case, "fp32")
    assert max(found.values()) <= FLOAT32_TOLERANCE, worst(found)


def test_groups_without_signal_add_nothing(outcomes):
    pure, with_base = NO_SIGNAL
    for run, outcome in outcomes.items():
        if run.case == pure:
            assert outcome.gradient.abs().max() == 0, run.split.name
    found = errors(outcomes, with_base)
    assert max(found.values()) <= SPLIT_TOLERANCE, worst(found)


# That the tests above compare what they say.


def test_nothing_is_rounded_to_float32(outcomes):
    for run, outcome in outcomes.items():
        assert outcome.log_prob_dtype == outcome.gradient.dtype == DTYPES[run.dtype], run


@each_case
def test_group_term_is_a_good_part_of_the_gradient(case):
    _, term = unsplit_gradients(case)
    share = (term.norm() / unsplit_gradient(case).norm()).item()
    assert share > 0.2, f"its norm is {share:.2f} of the whole gradient's"


def test_each_row_is_given_to_the_loss_once(outcomes):
    for run, outcome in outcomes.items():
        assert len(outcome.micro_batches) == run.split.world_size, run
        assert sorted(sum(micro_batches_of(outcome), [])) == list(range(ROWS)), run


def test_micro_batches_are_as_large_as_asked(outcomes):
    for run, outcome in outcomes.items():
        length = torch.tensor([len(row["input_ids"]) for row in whole_batch(run.case.batch).rows])
        for rows in micro_batches_of(outcome):
            if run.split.micro_batch_size:
                assert len(rows) == run.split.micro_batch_size, run
            else:
                assert length[rows].sum() <= run.split.max_tokens, run


def micro_batches_of(outcome: Outcome) -> list[list[int]]:
    """Those of all ranks."""
    return [rows for rank in outcome.micro_batches for rows in rank]


def whole_share(outcome: Outcome, group: Tensor) -> float:
    """Share of the rows whose loss was evaluated with all rows of their group in the micro-batch."""
    size = torch.bincount(group)
    whole = 0
    for rows in micro_batches_of(outcome):
        here = torch.bincount(group[rows], minlength=len(size))
        whole += int(here[(here == size) & (size > 1)].sum())
    return whole / int(size[size > 1].sum())


def test_splits_cut_the_groups(outcomes):
    for run, outcome in outcomes.items():
        share = whole_share(outcome, whole_batch(run.case.batch).group)
        if run.split == UNSPLIT:
            assert share == 1
        elif run.split.order != "grouped":
            assert share < 0.35, f"{share:.0%} of the rows see their whole group: {run}"


def test_rows_that_belong_to_no_group_have_no_coefficient():
    batch = worker_batch(Case("grpo_dmpo"), "fp64")
    uid = tu.get(batch, "uid")
    outside = batch[GROUP_FIELD] == -1
    assert {uid[i] for i in outside.nonzero().flatten()} == {"prompt1", "prompt5", "pad0"}
    assert outside.sum() == 1 + 1 + uid.count("pad0")
    assert torch.equal(batch[COEF_FIELD] == 0, outside)


# That they notice losses that depend on the split.


@pytest.mark.parametrize("case", [CONTROL, Case("grpo_dmpo")], ids=lambda case: case.name.replace(" ", "-"))
@pytest.mark.parametrize("loss", PER_MICRO_BATCH)
def test_group_softmax_per_micro_batch_depends_on_the_split(outcomes, loss, case):
    """Right where nothing is cut; elsewhere off by 0.7 to 17 times the gradient's norm."""
    found = errors(outcomes, case, loss=loss)
    assert found.pop(UNSPLIT) <= SPLIT_TOLERANCE
    smallest = min(found, key=found.get)
    assert found[smallest] > 0.5, f"relative error only {found[smallest]:.1e} on {smallest.name}"


def test_missing_dp_size_is_noticed(outcomes):
    for split, error in errors(outcomes, CONTROL, loss="without_dp_size").items():
        assert error == pytest.approx(1 - 1 / split.world_size, abs=SPLIT_TOLERANCE), split.name


def test_mean_over_the_micro_batch_is_noticed(outcomes):
    """Each micro-batch then weighs as much as the whole mini-batch: off by 1 to 5 times the gradient's norm."""
    found = errors(outcomes, CONTROL, loss="mean_over_micro_batch")
    assert found.pop(UNSPLIT) <= SPLIT_TOLERANCE
    smallest = min(found, key=found.get)
    assert found[smallest] > 0.5, f"relative error only {found[smallest]:.1e} on {smallest.name}"


def table(outcomes: dict[Run, Outcome]) -> str:
    """The measured errors as Markdown."""

    def by_world_size(found: dict[Split, float]) -> str:
        worst = {n: max(error for split, error in found.items() if split.world_size == n) for n in (1, 2, 4)}
        return " | ".join(f"{error:.1e}" for error in worst.values())

    lines = [
        "| objective | float64, 1 rank | 2 ranks | 4 ranks | between splits | float32, 1 rank | 2 ranks | 4 ranks |"
    ]
    lines += ["|" + "---|" * 8]
    for case in CASES:
        exact, single = by_world_size(errors(outcomes, case)), by_world_size(errors(outcomes, case, "fp32"))
        lines.append(f"| {case.name} | {exact} | {spread(outcomes, case):.1e} | {single} |")
    lines += ["", "| wrong on purpose | objective | unsplit | 1 rank | 2 ranks | 4 ranks |", "|" + "---|" * 6]
    for loss, case in dict.fromkeys((run.loss, run.case) for run in outcomes if run.loss != "dmpo"):
        found = errors(outcomes, case, loss=loss)
        lines.append(f"| {loss} | {case.name} | {found.pop(UNSPLIT):.1e} | {by_world_size(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(table(measure(Path(folder))))
