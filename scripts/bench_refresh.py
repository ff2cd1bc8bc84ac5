"""How far the gradient is from the unsplit objective's after a batch's first optimizer step, and what exactness costs.

    .venv/bin/python scripts/bench_refresh.py

`dmpo_group_stats: anchored` keeps the coefficients of the old policy, `refresh` recomputes them before each mini-batch.
Both train the model of the tests with verl's worker and FSDP2 engine: batches of two mini-batches of 24 rows, 1 to 4
epochs, several learning rates (Adam: about the change of each weight in a step). At each step the gradient is compared
with that of the unsplit float64 objective at the step's parameters. Then a wider model is timed with both.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.refresh_ranks import train
from tests.split_cases import VOCABULARY, Split, tiny_model
from tests.test_refresh import MINI_BATCHES, Run, expected, update

SPLIT = Split(1, "grouped", 8)


def compare(mode: str, rates: list[float], epochs: int, work: Path) -> None:
    """A row for each learning rate and epoch: the worst cosine and relative error of the epoch's two steps."""
    runs = [Run(mode, SPLIT, epochs, refresh, lr=lr) for lr in rates for refresh in (None, "later")]
    tiny_model("fp32").save_pretrained(work / "model")
    found = dict(zip(runs, train([update(run) for run in runs], work / "model", work, timeout=3000), strict=True))
    print(f"\n| {mode}: lr | epoch | anchored: cosine | error | refresh: cosine | error |\n|---|---|---|---|---|---|")
    for lr in rates:
        for epoch in range(epochs):
            cells = []
            for refresh in (None, "later"):
                pairs = []
                for i in (0, 1):
                    step = found[Run(mode, SPLIT, epochs, refresh, lr=lr)][2 * epoch + i]
                    pairs.append((step.gradient.double(), expected(mode, MINI_BATCHES[i], step)))
                cosine = min(torch.cosine_similarity(a, b, dim=0).item() for a, b in pairs)
                error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
                cells.append(f"{cosine:.4f} | {error:.1e}")
            print(f"| {lr:g} | {epoch + 1} | {cells[0]} | {cells[1]} |")


def time_steps(work: Path) -> None:
    """Median seconds of a mini-batch's passes with and without refreshed coefficients."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
    )
    Qwen2ForCausalLM(config).save_pretrained(work / "model")
    runs = [Run("grpo_dmpo", SPLIT, 3, refresh, "fp32", lr=1e-6) for refresh in (None, "always", None, "always")]
    # One after the other, anchored and refreshed in turn, and the first step of each left out: it also allocates.
    seconds: dict[str | None, list[float]] = {None: [], "always": []}
    for run, steps in zip(runs, train([update(run) for run in runs], work / "model", work, timeout=3000), strict=True):
        seconds[run.refresh] += [step.seconds for step in steps[1:]]
    anchored, refreshed = (sorted(times)[len(times) // 2] for times in seconds.values())
    print(f"\nforward and backward of a mini-batch, {len(seconds[None])} each, 4 layers of width 256, float32:")
    print(f"anchored {anchored:.3f} s, refresh {refreshed:.3f} s (median), ratio {refreshed / anchored:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["grpo_dmpo", "grpo_dmpo_fkl"], help="loss modes")
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-5, 1e-4, 1e-3], help="learning rates")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    for mode in options.modes:
        with tempfile.TemporaryDirectory() as work:
            compare(mode, options.lr, options.epochs, Path(work))
    with tempfile.TemporaryDirectory() as work:
        time_steps(Path(work))


if __name__ == "__main__":
    main()
