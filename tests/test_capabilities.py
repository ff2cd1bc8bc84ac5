"""One optimizer step with each feature of verl's workers on: its gradient is that of the unsplit objective.

verl's own worker and engine run over gloo (capability_ranks.py). Each step starts from coefficients of zero and has
them recomputed (`dmpo_group_stats: refresh`), so a feature must get two passes right: the one that the coefficients
come from and the one that the gradient comes from. docs/capabilities.md says what each test leaves open.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2ForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu

from dmpo import plugin  # noqa: F401
from dmpo.dmpo_losses import COEF_FIELD, dmpo_ppo_loss

from .capability_ranks import Outcome, Task, take, verl_function
from .split_cases import ROWS, VOCABULARY, Case, Split, deal, log_probs, tiny_model, unsplit_gradient, whole_batch
from .split_cases import worker_batch as rows_with_coefficients
from .split_losses import group_objective
from .test_trainer import (
    N,
    expected_coefficients,
    flat,
    make_trainer,
    put_rollouts,
    transfer_queue,  # noqa: F401
    update,
)

CASE = Case("grpo_dmpo")
WHOLE = whole_batch(CASE.batch)
MASK = WHOLE.mask.bool()
LENGTHS = WHOLE.mask.new_tensor([len(row["responses"]) for row in WHOLE.rows])
TIMEOUT = 600  # seconds for all processes, on a busy machine

EXACT, FLOAT32, FLOAT16 = 1e-12, 1e-5, 2e-2
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
PACKED = {"use_remove_padding": True}
FLASH = PACKED | {"override_config": {"attn_implementation": "packed_by_torch"}}
FUSED = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
HALF = {
    "model_dtype": "fp32",
    "mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
}


def jagged(x: Tensor) -> Tensor:
    """(B, T) as verl's workers get it: each row as long as its response."""
    return torch.nested.as_nested_tensor([row[:n] for row, n in zip(x, LENGTHS, strict=True)], layout=torch.jagged)


def draw(seed: int) -> Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed)).double()


# --- models --------------------------------------------------------------------------------------------------------


@cache
def tied_model() -> Qwen2ForCausalLM:
    """`tiny_model` with one matrix for embedding and head: with two, verl's FSDP2 shards the head by itself, and its
    fused kernels, which take the head's weight without calling it, fail for any loss."""
    model = tiny_model.__wrapped__("fp64")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


@cache
def lora_model() -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(
        r=LORA["lora_rank"],
        lora_alpha=LORA["lora_alpha"],
        target_modules=LORA["target_modules"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # neither factor is zero, so both have a gradient
    )
    return get_peft_model(tiny_model.__wrapped__("fp64"), config)


IMAGE, VISION_START, VISION_END = VOCABULARY, VOCABULARY + 1, VOCABULARY + 2
GRID = torch.tensor([[1, 4, 4]])  # patches of an image; 2 x 2 of them make a token


@cache
def vision_model() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=VOCABULARY + 8,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        ),
        vision_config=dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=2),
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    return Qwen2VLForConditionalGeneration(config).double().eval()


@cache
def vision_rows() -> list[dict]:
    """The rows of the batch, those of every other prompt with an image before the text, at 3-D positions.

    Position ids are (4, L): the text's, then time, height and width.
    """
    rows = []
    for row in WHOLE.rows:
        text = len(row["input_ids"])
        if int(row["uid"][-1]) % 2 or row["uid"] == "pad0":
            positions = torch.arange(text).expand(4, -1).contiguous()
            rows.append(row | {"position_ids": positions, "multi_modal_inputs": {}})
            continue
        image = torch.tensor([VISION_START, IMAGE, IMAGE, IMAGE, IMAGE, VISION_END])
        spatial = torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
        spatial = torch.cat([spatial, 4 + torch.arange(text).expand(3, -1)], 1)
        pixels = torch.randn(16, 24, generator=torch.Generator().manual_seed(int(row["uid"][-1])))
        rows.append(
            row
            | {
                "prompts": torch.cat([image, row["prompts"]]),
                "input_ids": torch.cat([image, row["input_ids"]]),
                "position_ids": torch.cat([torch.arange(6 + text)[None], spatial]),
                "multi_modal_inputs": {"pixel_values": pixels, "image_grid_thw": GRID},
            }
        )
    return rows


def vision_logits(model: Qwen2VLForConditionalGeneration, rows: list[dict]) -> Tensor:
    """(B, L, V) by transformers' own forward pass, which verl replaces on the ranks."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    length = torch.tensor([len(row["input_ids"]) for row in rows])
    positions = pad_sequence([row["position_ids"].T for row in rows], batch_first=True)
    images = [row["multi_modal_inputs"] for row in rows if row["multi_modal_inputs"]]
    return model(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < length[:, None]).long(),
        position_ids=positions.permute(2, 0, 1),
        pixel_values=torch.cat([image["pixel_values"] for image in images]).double(),
        image_grid_thw=torch.cat([image["image_grid_thw"] for image in images]),
    ).logits


def vision_log_probs(model: Qwen2VLForConditionalGeneration, rows: list[dict]) -> Tensor:
    """As `split_cases.log_probs`."""

    class Logits:
        def __init__(self, **_: Any) -> None:
            self.logits = vision_logits(model, rows)

    return log_probs(Logits, rows)


# --- the unsplit objective -----------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What a step's gradient is compared with.

    Attributes:
        model: in float64.
        log_probs: of its rows, (B, T).
        fields: what the batch has in place of the ordinary fields, or beside them, (B, T) in float64.
        actor: fields of the actor's configuration.
    """

    model: Any
    log_probs: Callable[[Any], Tensor] = lambda model: log_probs(model, WHOLE.rows)
    fields: dict[str, Tensor] = {}
    actor: dict[str, Any] = {}

    @property
    def actor_config(self) -> Any:
        return dataclasses.replace(CASE.actor, **self.actor)

    def gradient(self) -> dict[str, Tensor]:
        """Of every trained parameter, by autograd on the whole mini-batch."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(self.objective(), list(trained.values()), allow_unused=True)
        return {name: grad for name, grad in zip(trained, found, strict=True) if grad is not None}

    def objective(self) -> Tensor:
        actor, log_prob = self.actor_config, self.log_probs(self.model)
        actor.global_batch_info.update(dp_size=1, batch_num_tokens=WHOLE.mask.sum().item(), global_batch_size=ROWS)
        loss, _ = get_policy_loss_fn("vanilla")(
            old_log_prob=self.fields.get("old_log_probs", old_log_probs()),
            log_prob=log_prob,
            advantages=WHOLE.advantages.double(),
            response_mask=MASK,
            loss_agg_mode="token-mean",
            config=actor,
            rollout_is_weights=self.fields.get("rollout_is_weights"),
        )
        loss = loss + group_objective(actor.policy_loss, log_prob, WHOLE.mask, WHOLE.reward, WHOLE.group)
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * token_mean(entropies(self.model))
        if actor.use_kl_loss:
            ratio = self.fields["ref_log_prob"] - log_prob
            loss = loss + actor.kl_loss_coef * token_mean(ratio.exp() - ratio - 1)
        return loss


def token_mean(x: Tensor) -> Tensor:
    return x[MASK].sum() / MASK.sum()


def entropies(model: Qwen2ForCausalLM) -> Tensor:
    """(B, T) entropy of each response token's distribution in nats, 0 after the ends."""
    ids = pad_sequence([row["input_ids"] for row in WHOLE.rows], batch_first=True)
    length = torch.tensor([len(row["input_ids"]) for row in WHOLE.rows])
    log_p = torch.log_softmax(
        model(input_ids=ids, attention_mask=torch.arange(ids.shape[1]) < length[:, None]).logits, -1
    )
    every = -(log_p.exp() * log_p).sum(-1)
    return pad_sequence(
        [x[len(row["prompts"]) - 1 : len(row["input_ids"]) - 1] for x, row in zip(every, WHOLE.rows, strict=True)],
        batch_first=True,
    )


@cache
def old_log_probs() -> Tensor:
    with torch.no_grad():
        return log_probs(tiny_model("fp64"), WHOLE.rows)


REFERENCES: dict[str, Callable[[], Reference]] = {
    "plain": lambda: Reference(tiny_model("fp64")),
    "tied": lambda: Reference(tied_model()),
    "lora": lambda: Reference(lora_model()),
    "vision": lambda: Reference(
        vision_model(), lambda model: vision_log_probs(model, vision_rows()), {"old_log_probs": vision_old_log_probs()}
    ),
    # What a sampler says that computes a little differently, with the truncated weights of that difference.
    "bypass": lambda: Reference(tiny_model("fp64"), fields={"old_log_probs": sampled_log_probs()}),
    "weights": lambda: Reference(
        tiny_model("fp64"),
        fields={"rollout_is_weights": (old_log_probs() - sampled_log_probs()).exp().clamp(max=1.2) * MASK},
    ),
    "terms": lambda: Reference(
        tiny_model("fp64"),
        fields={"ref_log_prob": (old_log_probs() + 0.3 * draw(2)) * MASK},
        actor={"entropy_coeff": 0.5, "use_kl_loss": True, "kl_loss_coef": 0.7},
    ),
}


def sampled_log_probs() -> Tensor:
    return (old_log_probs() + 0.3 * draw(1)) * MASK


def vision_old_log_probs() -> Tensor:
    with torch.no_grad():
        return (vision_log_probs(vision_model(), vision_rows()) + 0.1 * draw(3)) * MASK


@cache
def expected(reference: str) -> dict[str, Tensor]:
    return REFERENCES[reference]().gradient()


# --- the steps -----------------------------------------------------------------------------------------------------


class Feature(NamedTuple):
    """One step of `Task`.

    Attributes:
        world_size, sp_size: ranks, and those of them that share their rows.
        reference: a key of `REFERENCES`.
        dtype: a key of `engine_ranks.DTYPES` for the batch.
        task: fields of `Task`.
        tolerance: relative error of the gradient.
    """

    world_size: int = 2
    sp_size: int = 1
    reference: str = "plain"
    dtype: str = "fp64"
    task: dict[str, Any] = {}
    tolerance: float = EXACT


def packed(**options: Any) -> dict[str, Any]:
    return dict(engine_options=PACKED, **({"model_options": PACKED} | options))


def ulysses() -> dict[str, Any]:
    return dict(
        model_options=FLASH,
        engine_options=PACKED | {"ulysses_sequence_parallel_size": 2},
        patches=("flash kernel",),
    )


FEATURES = {
    "FSDP2": Feature(),
    "FSDP1": Feature(
        dtype="fp32",
        task=dict(dtype="fp32", strategy="fsdp", engine_options={"use_orig_params": True}, patches=("fsdp1",)),
        tolerance=FLOAT32,
    ),
    "VeOmni's loop": Feature(task=dict(patches=("veomni",))),
    "torchtitan's loop": Feature(task=dict(patches=("torchtitan",))),
    "remove-padding": Feature(task=packed()),
    "remove-padding, FlashAttention's inputs": Feature(task=packed(model_options=FLASH, patches=("flash kernel",))),
    "Ulysses 2": Feature(sp_size=2, task=ulysses()),
    "Ulysses 2 x 2": Feature(4, sp_size=2, task=ulysses()),
    "LoRA": Feature(reference="lora", task=dict(model_options=LORA, adapter_off=True)),
    "gradient checkpointing": Feature(task=dict(model_options={"enable_gradient_checkpointing": True})),
    "fused kernels": Feature(reference="tied", task=dict(model_options=FUSED), tolerance=FLOAT32),
    "fused kernels, remove-padding": Feature(
        reference="tied", task=packed(model_options=FUSED | PACKED), tolerance=FLOAT32
    ),
    "entropy and KL terms": Feature(reference="terms", task=dict(meta={"calculate_entropy": True})),
    "entropy and KL terms, remove-padding": Feature(
        reference="terms", task=packed() | dict(meta={"calculate_entropy": True})
    ),
    "rollout correction": Feature(reference="weights"),
    "bypass mode": Feature(reference="bypass"),
    "vision and language": Feature(reference="vision", dtype="fp32", task=dict(dtype="fp32"), tolerance=FLOAT32),
    "float16": Feature(
        dtype="fp32",
        task=dict(dtype="fp16", engine_options=HALF, patches=("fp16 scaler",), lr=1e-3),
        tolerance=FLOAT16,
    ),
    "float16 that overflows": Feature(
        dtype="fp32",
        task=dict(dtype="fp16", engine_options=HALF, patches=("fp16 scaler that overflows",), lr=1e-3),
        tolerance=float("nan"),
    ),
}
FINITE = [name for name, feature in FEATURES.items() if feature.tolerance == feature.tolerance]
MODELS = {"tied": tied_model, "vision": vision_model}


def rows_of(feature: Feature) -> list[TensorDict]:
    """Each rank's rows."""
    batch = rows_with_coefficients(CASE, feature.dtype)
    dtype = batch["old_log_probs"].dtype
    if feature.reference == "vision":
        for name in ("prompts", "input_ids", "position_ids"):
            batch[name] = torch.nested.as_nested_tensor([row[name] for row in vision_rows()], layout=torch.jagged)
        batch["multi_modal_inputs"] = NonTensorStack(*(row["multi_modal_inputs"] for row in vision_rows()))
    for name, value in REFERENCES[feature.reference]().fields.items():
        batch[name] = jagged(value.to(dtype))
    batch[COEF_FIELD] = torch.zeros_like(batch[COEF_FIELD])
    split = Split(feature.world_size // feature.sp_size, "shuffled", 3)
    return [tu.index_select_tensor_dict(batch, rows) for rows in deal(batch, split) for _ in range(feature.sp_size)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    work = tmp_path_factory.mktemp("capabilities")
    tiny_model("fp32").save_pretrained(work / "model")
    for name, model in MODELS.items():
        model().save_pretrained(work / name)
    lora_model().save_pretrained(work / "lora")
    tasks = []
    for feature in FEATURES.values():
        options = dict(feature.task)
        if feature.reference in MODELS:
            options["model"] = str(work / feature.reference)
        if feature.reference == "lora":
            options["model_options"] = LORA | {"lora_adapter_path": str(work / "lora")}
        actor = REFERENCES[feature.reference]().actor_config
        tasks.append(Task(rows_of(feature), actor, **options))
    return dict(zip(FEATURES, take(tasks, work / "model", work, TIMEOUT), strict=True))


def error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of the right gradient."""
    assert found.keys() == right.keys(), found.keys() ^ right.keys()
    difference = sum((found[name].double() - right[name]).square().sum() for name in right)
    return (difference / sum(grad.square().sum() for grad in right.values())).sqrt().item()


@pytest.mark.parametrize("name", FINITE)
def test_gradient_is_that_of_the_unsplit_objective(outcomes, name):
    feature = FEATURES[name]
    found = error(outcomes[name].gradient, expected(feature.reference))
    assert found <= feature.tolerance, f"relative error {found:.1e}"


# That the features were on, and that the comparison would notice if they were not.


@pytest.mark.parametrize("name", ["weights", "terms", "bypass"])
def test_what_the_batch_adds_is_a_good_part_of_the_gradient(name):
    assert error(expected("plain"), expected(name)) > 0.02


def test_images_and_their_positions_matter():
    visual = [grad.norm() for name, grad in expected("vision").items() if ".visual." in name]
    assert len(visual) > 10 and min(visual) > 0
    flattened = [row | {"position_ids": row["position_ids"][:1].expand(4, -1)} for row in vision_rows()]
    with torch.no_grad():
        moved = vision_log_probs(vision_model(), flattened) - vision_log_probs(vision_model(), vision_rows())
    assert moved[MASK].abs().max() > 0.01


def test_padding_and_sequence_parallelism_are_as_asked(outcomes):
    def shapes(name: str) -> set[int]:
        return {rows for rows, _ in outcomes[name].tokens}

    assert max(shapes("FSDP2")) > 1
    for name in ("remove-padding", "fused kernels, remove-padding", "Ulysses 2"):
        assert shapes(name) == {1}
    whole, half = outcomes["remove-padding, FlashAttention's inputs"], outcomes["Ulysses 2 x 2"]
    # Two ranks that share rows have half of the tokens each.
    assert sum(n for _, n in whole.tokens) / sum(n for _, n in half.tokens) == pytest.approx(2, rel=0.1)


def test_gradient_checkpointing_computes_layers_again(outcomes):
    """A pass for the coefficients and one for the gradient; with checkpoints, one more."""
    once, again = outcomes["FSDP2"].tokens, outcomes["gradient checkpointing"].tokens
    assert len(again) == 1.5 * len(once)


def test_fused_kernels_give_the_log_probabilities(outcomes):
    """verl's fused layer computes them in float32, whatever the model's type."""
    assert outcomes["fused kernels"].log_prob_dtype == torch.float32
    assert outcomes["FSDP2"].log_prob_dtype == torch.float64


def test_lora_trains_the_adapter_alone_and_the_reference_policy_is_the_base_model(outcomes):
    outcome = outcomes["LoRA"]
    assert all("lora_" in name for name in outcome.gradient)
    rows = deal(rows_with_coefficients(CASE, "fp64"), Split(2, "shuffled", 3))[0]
    torch.testing.assert_close(outcome.reference, old_log_probs()[rows][:, : outcome.reference.shape[1]])


def test_entropy_and_kl_terms_are_reported(outcomes):
    metrics = outcomes["entropy and KL terms"].metrics
    assert metrics["actor/entropy_loss"][0] == pytest.approx(token_mean(entropies(tiny_model("fp64"))).item())
    assert metrics["kl_loss"][0] > 0


def test_a_float16_step_is_scaled_and_one_that_overflows_is_skipped(outcomes):
    kept, skipped = outcomes["float16"], outcomes["float16 that overflows"]
    assert kept.log_prob_dtype == torch.float16
    assert kept.scale == (2.0**10, 2.0**10) and kept.moved == pytest.approx(1e-3, rel=0.01)
    assert not all(grad.isfinite().all() for grad in skipped.gradient.values())
    assert skipped.scale == (2.0**60, 2.0**59) and skipped.moved == 0


# --- Megatron ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of micro-batches", "calculate_per_token_loss"])
def test_megatrons_scaling_gives_the_gradient_of_the_unsplit_objective(per_token):
    """What verl's Megatron engine returns for each micro-batch, under Megatron's divisions.

    Megatron's schedule divides by the number of micro-batches and its data parallelism averages over ranks; with
    `calculate_per_token_loss` both add up, and the sum is divided by the number of tokens.
    """
    routed = verl_function("megatron", "MegatronEngine._routed_num_tokens")
    postprocess = verl_function("megatron", "MegatronEngineWithLMHead.postprocess_micro_batch_func", partial=partial)
    model, batch, ranks = tiny_model("fp64"), rows_with_coefficients(CASE, "fp64"), 2
    log_prob = packed_log_probs(model)

    def prepare_model_outputs(output: None, data: TensorDict) -> dict[str, Tensor]:
        rows = [log_prob[i] for i in data["row"].tolist()]
        return {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}

    engine = SimpleNamespace(
        prepare_model_outputs=prepare_model_outputs,
        get_data_parallel_group=lambda: None,
        engine_config=SimpleNamespace(dynamic_context_parallel=False, use_remove_padding=True, context_parallel_size=1),
        tf_config=SimpleNamespace(calculate_per_token_loss=per_token),
    )
    engine._routed_num_tokens = partial(routed, engine)
    total, tokens = 0, 0
    for rows in deal(batch, Split(ranks, "shuffled", 3)):
        for part in torch.tensor(rows).split(3):
            data = tu.index_select_tensor_dict(batch, part)
            tu.assign_non_tensor(
                data,
                dp_size=ranks,
                batch_num_tokens=WHOLE.mask.sum().item(),
                global_batch_size=ROWS,
                num_micro_batch=len(rows) // 3,
                routed_num_tokens=routed(engine, batch).item(),
            )
            loss, *rest = postprocess(engine, None, data, False, partial(dmpo_ppo_loss, config=CASE.actor))
            if per_token:
                total, tokens = total + loss, tokens + rest[0]
            else:
                total = total + loss / (len(rows) // 3) / ranks
    trained = dict(sorted(model.named_parameters()))
    found = torch.autograd.grad(total / tokens if per_token else total, list(trained.values()))
    right = unsplit_gradient(CASE)
    assert (torch.cat([grad.flatten() for grad in found]) - right).norm() <= EXACT * right.norm()


def packed_log_probs(model: Qwen2ForCausalLM) -> list[Tensor]:
    """Those of every row, (L,), as an engine gives them: at each position that of the next token."""
    ids = pad_sequence([row["input_ids"] for row in WHOLE.rows], batch_first=True)
    length = torch.tensor([len(row["input_ids"]) for row in WHOLE.rows])
    logits = model(input_ids=ids, attention_mask=(torch.arange(ids.shape[1]) < length[:, None]).long()).logits
    every = torch.log_softmax(logits, -1).gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)
    return [x[:n] for x, n in zip(every, length, strict=True)]


# --- the controller ------------------------------------------------------------------------------------------------


def test_penalised_rewards_and_corrected_rollouts_come_from_verls_own_advantages():
    """verl's KL penalty, importance weights and rejections on the way to the group term of DMPO.

    The target is the score before the penalty, rejected tokens leave phi, rejected rows their group, and the weights
    reach the worker, where they are the base loss's.
    """

    def disagree(rows):
        # In each group one rollout of which the sampler and the trainer think very differently.
        for key, row in rows.items():
            apart = 3.0 if key.endswith("_1_0") else 0.2
            row["rollout_log_probs"] = row["old_log_probs"] - apart * torch.rand(len(row["old_log_probs"]))
            row["ref_log_prob"] = row["old_log_probs"] - 0.5 * torch.rand(len(row["old_log_probs"]))

    correction = "algorithm.rollout_correction"
    trainer = make_trainer(
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.5",
        f"{correction}.rollout_is=token",
        f"{correction}.rollout_rs=seq_mean_k1",
        f"{correction}.rollout_rs_threshold='0.5_2.0'",
    )
    batch, _ = put_rollouts([N] * 8, edit=disagree)
    batch = trainer._compute_advantage(trainer._balance_batch(batch, {}), {})
    trainer._update_actor(batch, {})
    mini_batches = trainer.actor_rollout_wg.mini_batches
    rejected, penalised = 0, 0
    for mini_batch in mini_batches:
        rows = flat(mini_batch)
        expected_coef, _ = expected_coefficients(rows)
        torch.testing.assert_close(torch.stack([row["dmpo_coef"] for row in rows]), expected_coef.float())
        rejected += sum(not row["response_mask"].any() for row in rows)
        for data in mini_batch:
            penalised += sum(
                not torch.allclose(a, b)
                for a, b in zip(data["token_level_rewards"].unbind(), data["rm_scores"].unbind(), strict=True)
            )
            weights = data["rollout_is_weights"]
            assert torch.equal(weights.offsets(), data["response_mask"].offsets()) and (weights.values() != 1).any()
    assert 0 < rejected < 16 and penalised > 16


def test_rows_with_3d_positions_stay_together_when_groups_are_dealt():
    """(4, L) position ids and the images' tensors of each row, through verl's queue, padding and mini-batches."""

    def add_image(rows):
        for number, row in enumerate(rows.values()):
            row["row"] = torch.tensor(number)
            row["position_ids"] = 1000 * number + torch.arange(4 * len(row["input_ids"])).view(4, -1)
            row["multi_modal_inputs"] = {"pixel_values": torch.full((number % 3 + 1, 2), float(number))}

    trainer = make_trainer()
    batch, _ = put_rollouts([N] * 16, edit=add_image)
    metrics, mini_batches = update(trainer, batch)
    assert metrics["dmpo/whole_group_frac"] == 1.0
    seen = []
    for data in (data for mini_batch in mini_batches for data in mini_batch):
        tu.maybe_fix_3d_position_ids(data)  # as verl's worker does
        images = tu.get(data, "multi_modal_inputs")
        every = zip(
            data["row"].tolist(), data["input_ids"].unbind(), data["position_ids"].unbind(), images, strict=True
        )
        for number, tokens, positions, image in every:
            seen.append(number)
            assert torch.equal(positions, 1000 * number + torch.arange(4 * len(tokens)).view(4, -1))
            assert torch.equal(image["pixel_values"], torch.full((number % 3 + 1, 2), float(number)))
    assert sorted(seen) == list(range(64))
