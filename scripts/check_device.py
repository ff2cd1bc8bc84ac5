"""The parts of DMPO that run on a worker, on a CUDA device (or on the CPU where there is none): right, exact, cheap.

    python scripts/check_device.py            # prints a table, exits with 1 if a check fails

1. Group statistics of every divergence, from float32 and bfloat16 scores, against float64 on the CPU.
2. Split invariance: the gradient of verl's `ppo_loss` with our loss, for micro-batches of 32, 8, 3 and 1 shuffled rows
   and for 1, 2 and 4 ranks, against the unsplit objective in float64.
3. Host synchronisations of our worker's loss beside verl's vanilla loss (CUDA's sync debug mode counts them).
4. Time and peak memory of both, forward and backward.
"""

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, OptimizerConfig

from dmpo import plugin  # noqa: F401
from dmpo.config import DMPOPolicyLossConfig
from dmpo.dmpo_losses import COEF_FIELD, dmpo_ppo_loss
from dmpo.groups import group_statistics, sequence_scores

_OPTIMIZER = OptimizerConfig(lr=1e-6)
DIVERGENCES = ("mse", "js", "forward_kl", "reverse_kl")


def actor(loss_mode: str) -> ActorConfig:
    loss = DMPOPolicyLossConfig(loss_mode=loss_mode, dmpo_temperature=0.5)
    return ActorConfig(
        strategy="fsdp2",
        rollout_n=8,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=loss,
        use_kl_loss=False,
        entropy_coeff=0,
    )


def make_rows(rows: int, tokens: int, device: torch.device, seed: int = 0) -> SimpleNamespace:
    """Rollouts in groups of 8 with responses of uneven length, one prompt token each."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(max(1, tokens // 2), tokens + 1, (rows,), generator=generator)
    length[0] = tokens
    mask = (torch.arange(tokens) < length[:, None]).to(device)
    log_prob = (-torch.rand(rows, tokens, generator=generator)).to(device)
    group = torch.arange(rows, device=device) // 8
    reward = torch.randint(0, 2, (rows,), generator=generator).double().to(device)
    advantage = torch.randn(rows, 1, generator=generator).to(device).expand(rows, tokens)
    return SimpleNamespace(length=length, mask=mask, log_prob=log_prob, group=group, reward=reward, advantage=advantage)


def micro_batch(data: SimpleNamespace, rows: list[int], coef: torch.Tensor, dp_size: int, tokens: int) -> TensorDict:
    """The fields of a worker's micro-batch (verl/workers/utils/losses.py), as jagged tensors."""

    def jagged(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor([x[r, : data.length[r]] for r in rows], layout=torch.jagged)

    one = torch.ones(len(data.mask), data.mask.shape[1], dtype=torch.int64, device=data.mask.device)
    batch = TensorDict(
        {
            "prompts": torch.nested.as_nested_tensor([one[r, :1] for r in rows], layout=torch.jagged),
            "responses": jagged(one),
            "response_mask": jagged(data.mask),
            "old_log_probs": jagged(data.log_prob),
            "advantages": jagged(data.advantage),
            COEF_FIELD: coef[rows],
        },
        batch_size=len(rows),
    )
    for name, value in {
        "dp_size": dp_size,
        "batch_num_tokens": tokens,
        "global_batch_size": len(data.mask),
    }.items():
        tu.assign_non_tensor_data(batch, name, value)
    return batch


def loss_of(config: ActorConfig, batch: TensorDict, log_prob: torch.Tensor, data: SimpleNamespace, rows: list[int]):
    # The model's output has the log-probability of the next token at each position.
    flat = torch.cat([torch.nn.functional.pad(log_prob[r, : data.length[r]], (0, 1)) for r in rows])
    offsets = torch.tensor([0, *itertools.accumulate(int(data.length[r]) + 1 for r in rows)], device=flat.device)
    nested = torch.nested.nested_tensor_from_jagged(flat, offsets)
    return dmpo_ppo_loss(config=config, model_output={"log_probs": nested}, data=batch)[0]


def check_statistics(device: torch.device) -> dict[str, float]:
    """Largest relative error of the coefficients against float64 on the CPU, for the same (rounded) scores."""
    generator = torch.Generator().manual_seed(0)
    phi = -torch.rand(4096, generator=generator)
    group = torch.randint(0, 500, (4096,), generator=generator)
    score = torch.rand(4096, generator=generator)
    found = {}
    for dtype, divergence in itertools.product((torch.float32, torch.bfloat16), DIVERGENCES):
        rounded = phi.to(dtype)
        settings = {"temperature": 0.3, "policy_temperature": 0.25, "divergence": divergence}
        expected = group_statistics(rounded.double(), score.double(), group, **settings).coef
        ours = group_statistics(rounded.to(device), score.to(device), group.to(device), **settings).coef
        error = ((ours.double().cpu() - expected).norm() / expected.norm()).item()
        found[f"{divergence}, {str(dtype)[6:]}"] = error
    return found


def check_splits(device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative error of the summed gradient over all splits against the unsplit objective in float64."""
    data = make_rows(32, 64, device)
    data.log_prob = data.log_prob.to(dtype).double()  # the rounding of the input is no error of ours
    phi = sequence_scores(data.log_prob, data.mask)
    stats = group_statistics(phi, data.reward, data.group, temperature=0.5)
    coef = stats.coef.float()
    tokens = int(data.mask.sum())
    # At the old policy a token's gradient is -A over the batch's tokens (vanilla) and c_j / len_j (group term).
    lengths = data.length.to(device)[:, None]
    expected = data.mask * (-data.advantage.double() / tokens + stats.coef[:, None] / lengths)
    worst = 0.0
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).tolist()
    for size, ranks in itertools.product((32, 8, 3, 1), (1, 2, 4)):
        log_prob = data.log_prob.to(dtype).requires_grad_()
        for rank in range(ranks):
            mine = order[rank::ranks]
            for start in range(0, len(mine), size):
                rows = mine[start : start + size]
                batch = micro_batch(data, rows, coef, ranks, tokens)
                # verl averages gradients over ranks.
                (loss_of(actor("grpo_dmpo"), batch, log_prob, data, rows) / ranks).backward()
        worst = max(worst, ((log_prob.grad.double() - expected).norm() / expected.norm()).item())
    return worst


def count_synchronisations(run) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def measure(
    device: torch.device, rows: int, tokens: int, dtype: torch.dtype, repeats: int
) -> dict[str, dict[str, float]]:
    """Median seconds, peak bytes and host synchronisations of forward and backward, ours and vanilla alternating."""
    data = make_rows(rows, tokens, device)
    data.log_prob = data.log_prob.to(dtype)
    everything = list(range(rows))
    batch = micro_batch(data, everything, torch.zeros(rows, device=device) + 1e-3, 1, int(data.mask.sum()))
    log_prob = data.log_prob.clone().requires_grad_()
    configs = {"vanilla": actor("vanilla"), "grpo_dmpo": actor("grpo_dmpo")}

    def once(name: str) -> None:
        log_prob.grad = None
        loss_of(configs[name], batch, log_prob, data, everything).backward()

    cuda = device.type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    found: dict[str, dict[str, float]] = {name: {} for name in configs}
    for name in configs:
        once(name)
        once(name)
    for _ in range(repeats):
        for name in configs:
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            once(name)
            if cuda:
                torch.cuda.synchronize()
                found[name]["peak MB"] = torch.cuda.max_memory_allocated() / 2**20
            seconds[name].append(time.perf_counter() - began)
    for name in configs:
        found[name]["ms"] = 1000 * sorted(seconds[name])[repeats // 2]
        if cuda:
            found[name]["synchronisations"] = count_synchronisations(lambda name=name: once(name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="of the timed micro-batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of its longest response (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}\n")
    failed = []

    def report(what: str, value: float, most: float) -> None:
        print(f"{what:60}{value:10.1e}   at most {most:.0e}{'' if value <= most else '   FAILED'}")
        if not value <= most:
            failed.append(what)

    for name, error in check_statistics(device).items():
        report(f"coefficients, {name}", error, 1e-6)
    report("split invariance, float32", check_splits(device, torch.float32), 1e-5)
    report("split invariance, bfloat16", check_splits(device, torch.bfloat16), 1e-2)
    for dtype in (torch.float32, torch.bfloat16):
        found = measure(device, options.rows, options.tokens, dtype, options.repeats)
        print(f"\nworker's loss, {options.rows} x {options.tokens}, {str(dtype)[6:]}, forward and backward")
        for name, figures in found.items():
            print(f"  {name:12}" + "".join(f"{value:12.3f} {unit}" for unit, value in figures.items()))
        print(f"  time of ours over vanilla's: {found['grpo_dmpo']['ms'] / found['vanilla']['ms']:.3f}")
        if device.type == "cuda":
            extra = found["grpo_dmpo"]["synchronisations"] - found["vanilla"]["synchronisations"]
            report("host synchronisations beyond vanilla's", extra, 0)
    if device.type != "cuda":
        print("\nno CUDA device: host synchronisations and memory were not looked at")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
