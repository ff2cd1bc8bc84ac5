"""What test_split_invariance.py runs: objectives, mini-batches, ways to split them; and the gradient they must keep.

A case's unsplit gradient is that of base + beta * L, by plain autograd in float64 on an unsharded copy of the model and
the whole mini-batch: base is verl's own vanilla loss, L is written from the formulas (reference.py).
"""

import types
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.config import FSDPActorConfig

from dmpo.config import DMPOPolicyLossConfig
from dmpo.dmpo_losses import COEF_FIELD, GROUP_FIELD, LOG_TARGET_FIELD, SCALE_FIELD
from dmpo.groups import group_statistics, sequence_scores

from .engine_ranks import DTYPES, norm_in_own_dtype
from .split_losses import group_objective

ROWS = 24
VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """An objective and the mini-batch that it is evaluated on."""

    loss_mode: str
    loss_agg_mode: str = "token-mean"
    batch: str = "uneven"
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        changed = [
            f"{name.removeprefix('dmpo_')}={value:.3g}" if isinstance(value, float) else value
            for name, value in self.settings
        ]
        return " ".join([self.loss_mode, self.loss_agg_mode, self.batch, *changed])

    @property
    def actor(self) -> FSDPActorConfig:
        # beta is such that the group term is not small beside the base loss.
        settings = {"dmpo_beta": 8.0, "dmpo_temperature": 0.5, "dmpo_policy_temperature": 0.25} | dict(self.settings)
        return FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=4,
            ppo_micro_batch_size_per_gpu=1,
            loss_agg_mode=self.loss_agg_mode,
            policy_loss=DMPOPolicyLossConfig(loss_mode=self.loss_mode, **settings),
        )


@dataclass(frozen=True)
class Split:
    """How the rows of a mini-batch are dealt and cut.

    Attributes:
        world_size: number of ranks.
        order: "grouped", "balanced" (verl's own balancing of tokens over ranks) or "shuffled".
        micro_batch_size: rows of a micro-batch; 0 for dynamic micro-batches of at most `max_tokens`.
    """

    world_size: int
    order: str
    micro_batch_size: int = 0
    max_tokens: int = 0

    @property
    def name(self) -> str:
        cut = f"{self.micro_batch_size} rows" if self.micro_batch_size else f"{self.max_tokens} tokens"
        return f"{self.world_size} ranks, {self.order}, {cut}"


def token_rows(batch: str) -> list[dict]:
    """Rows as verl's agent loop stores them; `batch` is "even", "uneven" or "no_signal"."""
    draw = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=draw)

    sizes = [4] * 6 if batch == "even" else [4, 1, 3, 2, 6, 5]
    rows = []
    for group, size in enumerate(sizes):
        prompt = integers(0, VOCABULARY, int(integers(2, 6, 1)))
        for member in range(size):
            response = integers(0, VOCABULARY, int(integers(1, 17, 1)))
            mask = torch.ones_like(response)
            reward = torch.rand(1, generator=draw).item() if group % 2 else float(member % 2)
            if batch == "uneven":
                if group in (2, 3):  # without signal: all wrong, all right
                    reward = float(group == 3)
                if group == 4:  # a tool's answer, which is not the policy's
                    mask[len(mask) // 3 : len(mask) // 2] = 0
                if group == 5 and member == 1:  # a failed rollout
                    mask[:] = 0
            if batch == "no_signal":
                reward = float(group % 2)
            score = torch.zeros(len(response))
            score[-1] = reward
            rows.append(
                {
                    "uid": f"prompt{group}",
                    "prompts": prompt,
                    "responses": response,
                    "input_ids": torch.cat([prompt, response]),
                    "position_ids": torch.arange(len(prompt) + len(response)),
                    "response_mask": mask,
                    "loss_mask": mask,
                    "rm_scores": score,
                }
            )
    # What verl appends to make a batch divisible: rows of one shared uid without a single response token.
    token, none = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    padding = {
        "uid": "pad0",
        "prompts": token.repeat(7),
        "responses": token,
        "input_ids": token.repeat(8),
        "position_ids": torch.arange(8),
        "response_mask": none,
        "loss_mask": none,
        "rm_scores": none.float(),
    }
    rows += [padding] * (ROWS - len(rows))
    return rows


@cache
def tiny_model(dtype: str) -> Qwen2ForCausalLM:
    """Qwen2 of two layers and random weights, the same (of float32) for any `dtype` that it computes in."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config).to(DTYPES[dtype]).eval()
    for module in model.modules():
        if isinstance(module, Qwen2RMSNorm):
            module.forward = types.MethodType(norm_in_own_dtype, module)
    return model


def log_probs(model: Qwen2ForCausalLM, rows: list[dict]) -> Tensor:
    """(B, T) log-probabilities of the responses' tokens, 0 after their ends: one forward pass over the padded batch."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    length = torch.tensor([len(row["input_ids"]) for row in rows])
    attention_mask = (torch.arange(ids.shape[1]) < length[:, None]).long()
    logits = model(input_ids=ids, attention_mask=attention_mask).logits
    every = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    responses = [x[len(row["prompts"]) - 1 : len(row["input_ids"]) - 1] for x, row in zip(every, rows, strict=True)]
    return pad_sequence(responses, batch_first=True)


@dataclass(frozen=True)
class Whole:
    """A mini-batch that nobody has cut.

    Attributes:
        rows: see `token_rows`.
        mask, advantages: (B, T).
        reward, group: (B,).
    """

    rows: list[dict]
    mask: Tensor
    advantages: Tensor
    reward: Tensor
    group: Tensor


@cache
def whole_batch(name: str) -> Whole:
    """The mini-batch of that name."""
    rows = token_rows(name)
    mask = pad_sequence([row["response_mask"] for row in rows], batch_first=True)
    # Any numbers do for advantages: the base loss does not see groups.
    advantages = torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1)) * mask
    reward = torch.stack([row["rm_scores"].sum() for row in rows])
    uids = [row["uid"] for row in rows]
    return Whole(rows, mask, advantages, reward, torch.tensor([uids.index(uid) for uid in uids]))


def worker_batch(case: Case, dtype: str) -> TensorDict:
    """The mini-batch as workers get it: verl's fields, and the coefficients that the controller computes."""
    whole, settings = whole_batch(case.batch), case.actor.policy_loss
    with torch.no_grad():
        old_log_probs = log_probs(tiny_model(dtype), whole.rows)
    stats = group_statistics(
        sequence_scores(old_log_probs, whole.mask, settings.dmpo_length_norm),
        whole.reward,
        whole.group,
        temperature=settings.dmpo_temperature,
        policy_temperature=settings.dmpo_policy_temperature,
        divergence=settings.divergence,
        zero_signal=settings.zero_signal,
        solved_score=settings.dmpo_solved_score,
        valid=whole.mask.any(-1),
    )
    coef = (settings.beta_at(1) * stats.coef).to(DTYPES[dtype])
    counts = torch.zeros(ROWS, dtype=torch.bool)
    counts[stats.group >= 0] = stats.counted[stats.group[stats.group >= 0]]
    advantages = whole.advantages.to(DTYPES[dtype])
    return tu.list_of_dict_to_tensordict(
        [
            row
            | {
                "row": torch.tensor(i),
                "old_log_probs": old_log_probs[i, : len(row["responses"])],
                "advantages": advantages[i, : len(row["responses"])],
                COEF_FIELD: coef[i],
                GROUP_FIELD: torch.where(counts, stats.group, -1)[i],
                LOG_TARGET_FIELD: stats.log_p[i],
                SCALE_FIELD: settings.beta_at(1) * stats.weight[i],
            }
            for i, row in enumerate(whole.rows)
        ]
    )


def deal(batch: TensorDict, split: Split) -> list[list[int]]:
    """The rows of each rank."""
    if split.order == "balanced":
        work = calculate_workload(batch["input_ids"].offsets().diff())
        return get_seqlen_balanced_partitions(work.tolist(), split.world_size, equal_size=True)
    rows = torch.arange(ROWS)
    if split.order == "shuffled":
        rows = torch.randperm(
            ROWS, generator=torch.Generator().manual_seed(ROWS * split.micro_batch_size + split.max_tokens)
        )
    return rows.view(split.world_size, -1).tolist()


def gradient(loss: Tensor, model: Qwen2ForCausalLM) -> Tensor:
    """All parameters' gradients as one vector, in the order of sorted names."""
    parameters = dict(sorted(model.named_parameters()))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)])


@cache
def unsplit_gradients(case: Case) -> tuple[Tensor, Tensor]:
    """Gradients of the base loss (zeros in a pure mode) and of beta * L on the whole mini-batch, in float64."""
    whole, model, actor = whole_batch(case.batch), tiny_model("fp64"), case.actor
    log_prob = log_probs(model, whole.rows)
    term = group_objective(actor.policy_loss, log_prob, whole.mask, whole.reward, whole.group)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=whole.mask.sum().item(), global_batch_size=ROWS)
    base, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=log_prob.detach(),
        log_prob=log_prob,
        advantages=whole.advantages.double(),
        response_mask=whole.mask.bool(),
        loss_agg_mode=case.loss_agg_mode,
        config=actor,
    )
    return gradient(base, model) * actor.policy_loss.mode.base, gradient(term, model)


def unsplit_gradient(case: Case) -> Tensor:
    return sum(unsplit_gradients(case))
