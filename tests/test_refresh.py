"""Exact through several updates: every optimizer step's gradient is the unsplit objective's at the current parameters.

Real optimizer steps of verl's worker and FSDP2 engine over gloo, with a learning rate at which the policy moves far; a
batch of two mini-batches with different groups.
"""

import copy
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu

from dmpo import plugin  # noqa: F401

from .refresh_ranks import Step, Update, train
from .split_cases import ROWS, Case, Split, deal, gradient, log_probs, tiny_model, whole_batch, worker_batch
from .split_losses import group_objective

MINI_BATCHES = ("uneven", "even")
LR = 0.02


class Run(NamedTuple):
    loss_mode: str
    split: Split
    epochs: int
    refresh: str | None
    dtype: str = "fp64"
    lr: float = LR


MODES = ("grpo_dmpo", "grpo_dmpo_fkl", "pure_dmpo", "grpo_dmpo_js")
ONE, TWO, FOUR = Split(1, "grouped", 24), Split(2, "shuffled", 3), Split(4, "balanced", max_tokens=80)
EXACT = [
    *(Run(mode, split, 2, "later") for mode in MODES for split in (ONE, TWO, FOUR)),
    Run("grpo_dmpo", TWO, 4, "later"),
    Run("grpo_dmpo", ONE, 1, "later"),
    Run("grpo_dmpo", FOUR, 1, "always"),
    *(Run("grpo_dmpo_fkl", split, 2, "later", "fp32") for split in (ONE, TWO, FOUR)),
]
ANCHORED = [Run(mode, split, 2, None) for mode in MODES for split in (ONE, FOUR)]


def case(loss_mode: str, batch: str) -> Case:
    return Case(loss_mode, batch=batch)


def update(run: Run) -> Update:
    actor = case(run.loss_mode, MINI_BATCHES[0]).actor
    parts = []
    for name in MINI_BATCHES:
        batch = worker_batch(case(run.loss_mode, name), run.dtype)
        parts.append([tu.index_select_tensor_dict(batch, rows) for rows in deal(batch, run.split)])
    return Update(
        ranks=[tu.concat_tensordict(list(rank)) for rank in zip(*parts, strict=True)],
        mini_batch_size=ROWS,
        epochs=run.epochs,
        micro_batch_size=run.split.micro_batch_size,
        max_tokens=run.split.max_tokens,
        actor=actor,
        refresh=run.refresh,
        lr=run.lr,
        dtype=run.dtype,
    )


@cache
def old_log_probs(batch: str) -> Tensor:
    with torch.no_grad():
        return log_probs(tiny_model("fp64"), whole_batch(batch).rows)


def expected(loss_mode: str, batch: str, step: Step) -> Tensor:
    """Gradient of base + beta * L on a whole mini-batch at the step's parameters, by autograd in float64."""
    whole, actor = whole_batch(batch), case(loss_mode, batch).actor
    model = copy.deepcopy(tiny_model("fp64"))
    model.load_state_dict({name: value.double() for name, value in step.parameters.items()}, strict=True)
    log_prob = log_probs(model, whole.rows)
    term = group_objective(actor.policy_loss, log_prob, whole.mask, whole.reward, whole.group)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=whole.mask.sum().item(), global_batch_size=ROWS)
    base, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=old_log_probs(batch),
        log_prob=log_prob,
        advantages=whole.advantages.double(),
        response_mask=whole.mask.bool(),
        loss_agg_mode="token-mean",
        config=actor,
    )
    return gradient(base * actor.policy_loss.mode.base + term, model)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    work = tmp_path_factory.mktemp("refresh")
    tiny_model("fp32").save_pretrained(work / "model")
    runs = [*EXACT, *ANCHORED]
    return dict(zip(runs, train([update(run) for run in runs], work / "model", work, timeout=600), strict=True))


def errors(run: Run, steps: list[Step]) -> list[float]:
    """Relative error of each step's gradient."""
    found = []
    for number, step in enumerate(steps):
        right = expected(run.loss_mode, MINI_BATCHES[number % 2], step)
        found.append(((step.gradient.double() - right).norm() / right.norm()).item())
    return found


def name(run: Run) -> str:
    return f"{run.loss_mode}-{run.split.name}-{run.epochs} epochs-{run.refresh}-{run.dtype}".replace(" ", "_")


@pytest.mark.parametrize("run", EXACT, ids=name)
def test_every_step_has_the_gradient_of_the_unsplit_objective(steps, run):
    found = errors(run, steps[run])
    assert len(found) == 2 * run.epochs
    assert max(found) <= 1e-5, found


@pytest.mark.parametrize("run", ANCHORED, ids=name)
def test_anchored_coefficients_are_exact_at_the_first_step_only(steps, run):
    first, *later = errors(run, steps[run])
    assert first <= 1e-5
    assert min(later) > 1e-3, later


def test_the_policy_moves_far_between_the_steps(steps):
    moved = [step.parameters for step in steps[ANCHORED[0]]]
    for before, after in zip(moved, moved[1:], strict=False):
        change = sum((after[key] - before[key]).square().sum() for key in before).sqrt()
        assert change > 0.05 * sum(value.square().sum() for value in before.values()).sqrt()
