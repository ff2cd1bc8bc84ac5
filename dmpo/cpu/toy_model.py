"""A language model small enough to train in a minute on one core, and its start: supervised on noisy answers.

The start is right some of the time and has seen every right answer, so that reinforcement learning has something to
reward and diversity something to lose.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from . import toy_task

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, `<|im_start|>`, `<|im_end|>` (ends an answer) and `<|endoftext|>` (pads)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int = 64, layers: int = 2, context: int = 256
) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights from torch's global generator: 0.1 million parameters unless told otherwise.

    Its heads have 32 dimensions, the fewest that vLLM's CPU kernels take.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        # Large enough for so narrow a model to start learning at once; the default, 0.02, costs hundreds of steps.
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config)


def encode(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[list[dict[str, str]]], answers: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of prompt, answer and end for each pair of chat messages and answer, and the mask of answer and end.

    Returns:
        (B, T) int64 and (B, T) bool, padded on the left so that answers of one length stand in the same columns.
    """
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
    asked = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    given = [tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False) for answer in answers]
    width = max(len(p) + len(a) for p, a in zip(asked, given, strict=True))
    ids = torch.full((len(asked), width), tokenizer.pad_token_id)
    mask = torch.zeros(len(asked), width, dtype=torch.bool)
    for row, (p, a) in enumerate(zip(asked, given, strict=True)):
        ids[row, width - len(p) - len(a) :] = torch.tensor(p + a)
        mask[row, width - len(a) :] = True
    return ids, mask


def answer_log_prob(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, pad: int) -> torch.Tensor:
    """Log-probability of each row's masked tokens, (B,), natural logarithm."""
    answer = int(mask.sum(-1).max())  # the mask is a suffix, so only so many positions need logits
    logits = model(input_ids=ids, attention_mask=ids != pad, logits_to_keep=answer + 1).logits[:, :-1]
    token = logits.log_softmax(-1).gather(-1, ids[:, -answer:, None]).squeeze(-1)
    return (token * mask[:, -answer:]).sum(-1)


class Answers:
    """Every answer "a+b" to every number, after the text `before`, to ask a model how likely it is to give each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, before: str = "") -> None:
        digits = range(10)
        pairs = [(number, f"{a}+{b}") for number in toy_task.NUMBERS for a in digits for b in digits]
        asked = [[{"role": "user", "content": toy_task.prompt(number)}] for number, _ in pairs]
        self.ids, self.mask = encode(tokenizer, asked, [before + answer for _, answer in pairs])
        self.pad = tokenizer.pad_token_id
        self.right = torch.tensor([answer in toy_task.answers(number) for number, answer in pairs]).view(-1, 100)

    @torch.no_grad()
    def measure(self, model: Qwen2ForCausalLM) -> tuple[float, float]:
        """Probability of a right answer, averaged over the numbers, and that of the least likely right answer."""
        prob = answer_log_prob(model, self.ids, self.mask, self.pad).exp().view(-1, 100)
        return (prob * self.right).sum(-1).mean().item(), prob[self.right].min().item()


def warm_start(
    path: Path,
    seed: int = 0,
    accuracy: float = 0.25,
    rarest: float = 1e-3,
    max_steps: int = 2000,
    before: str = "",
) -> None:
    """Train a new model until it gives a right answer with probability `accuracy` and save it with its tokenizer.

    It learns from answers of which 80 % are right, all right ones equally often, and 20 % arbitrary, and stops long
    before it has learnt all that they can teach. Each right answer must then have at least the probability `rarest`.
    Every answer comes after the text `before`.

    Raises:
        RuntimeError: not reached within `max_steps`.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # so small a model gains nothing from more, and on a busy machine they wait for each other
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    every = Answers(tokenizer, before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    weight = 0.8 * every.right / every.right.sum(-1, keepdim=True) + 0.2 / 100

    title = f"warm start until {accuracy:.0%} right"
    for step in (bar := tqdm(range(max_steps + 1), title, bar_format="{desc}: {n_fmt} steps, {elapsed}{postfix}")):
        if step % 20 == 0:
            right, least = every.measure(model)
            bar.set_postfix_str(f"{right:.0%} right")
            if right >= accuracy and least >= rarest:
                bar.close()
                break
        # 6 answers to each of the 16 numbers, as rows of the table of all answers
        rows = torch.multinomial(weight, 6, replacement=True) + 100 * torch.arange(len(weight))[:, None]
        log_prob = answer_log_prob(model, every.ids[rows.flatten()], every.mask[rows.flatten()], every.pad)
        optimizer.zero_grad()
        (-log_prob.mean()).backward()
        optimizer.step()
    else:
        raise RuntimeError(
            f"warm start: {right:.0%} right after {max_steps} steps, wanted {accuracy:.0%}; try another --seed"
        )
    disable_progress_bar()  # of saving
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
