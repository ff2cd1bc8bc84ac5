import importlib.util
from pathlib import Path

import pandas as pd
import pytest
import torch

from dmpo.cpu import toy_model, toy_task


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3+9", "3+9"), (" 3+9\n", "3+9"), ("3 + 9", None), ("3+9=12", None), ("12", None), ("3+10", None), ("٣+9", None)],
)
def test_only_an_answer_alone_is_parsed(text, expected):
    assert toy_task.parse(text) == expected


def test_right_answers_are_all_pairs_of_digits_with_that_sum():
    for number in range(19):
        pairs = [f"{a}+{b}" for a in range(10) for b in range(10) if a + b == number]
        assert toy_task.answers(number) == pairs


def test_score_is_one_for_a_right_answer_and_zero_for_any_other():
    # by its path, as verl loads it: the module may depend on nothing else of the package
    spec = importlib.util.spec_from_file_location("custom_module", toy_task.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.compute_score("two_digits", "3+9", "12", extra_info={"index": 0}, reward_router_address=None) == 1.0
    assert module.compute_score("two_digits", "3+8", "12") == 0.0
    assert module.compute_score("two_digits", "__import__('os')", "12") == 0.0


def test_coverage_counts_each_right_answer_once_and_wrong_ones_not():
    assert toy_task.coverage(3, ["0+3", "0+3", "1+2", "9+9", "", "x"]) == 0.5
    assert toy_task.coverage(3, toy_task.answers(3)) == 1.0
    assert toy_task.coverage(3, []) == 0.0


def test_parquet_has_the_columns_that_verl_reads(tmp_path):
    toy_task.write_parquet(tmp_path / "data" / "train.parquet", repeat=3)
    rows = pd.read_parquet(tmp_path / "data" / "train.parquet")
    assert len(rows) == 3 * len(toy_task.NUMBERS)
    row = rows.iloc[-1]
    assert row.data_source == "two_digits"
    assert list(row.prompt) == [{"role": "user", "content": "17="}]
    assert row.reward_model == {"style": "rule", "ground_truth": "17"}


def test_tokenizer_has_one_token_per_byte_and_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    toy_model.build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\né=<|im_end|>"
    assert len(tokenizer.encode(text)) == 1 + len("user\né=".encode()) + 1
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("\n")) == 1  # verl's chat handling relies on it
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12="}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\n12=<|im_end|>\n<|im_start|>assistant\n"


def test_log_prob_of_an_answer_does_not_depend_on_padding():
    torch.manual_seed(0)
    tokenizer = toy_model.build_tokenizer()
    model = toy_model.build_model(tokenizer).double()

    def encode(pairs):
        asked = [[{"role": "user", "content": toy_task.prompt(number)}] for number, _ in pairs]
        return toy_model.encode(tokenizer, asked, [answer for _, answer in pairs])

    def log_prob(pairs):
        ids, mask = encode(pairs)
        return toy_model.answer_log_prob(model, ids, mask, tokenizer.pad_token_id)

    both = log_prob([(5, "2+3"), (12, "3+9")])  # the first prompt is one byte shorter
    torch.testing.assert_close(both, torch.cat([log_prob([(5, "2+3")]), log_prob([(12, "3+9")])]))
    # against a sum written out: the answer's three bytes and the end
    ids, _ = encode([(5, "2+3")])
    expected = sum(model(ids[:, :-k]).logits[0, -1].log_softmax(-1)[ids[0, -k]] for k in range(1, 5))
    torch.testing.assert_close(both[0], expected)


def test_warm_start_learns_and_reaches_what_it_promises(tmp_path):
    from transformers import AutoModelForCausalLM

    start = toy_model.build_model(toy_model.build_tokenizer())
    answers = toy_model.Answers(toy_model.build_tokenizer())
    assert answers.measure(start)[0] < 0.01
    toy_model.warm_start(tmp_path, seed=1, accuracy=0.05, rarest=1e-3)
    right, least = answers.measure(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert right >= 0.05
    assert least >= 1e-3


def test_warm_start_that_fails_says_so(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"0% right after 0 steps, wanted 25%"):
        toy_model.warm_start(tmp_path, max_steps=0)
    assert not list(tmp_path.iterdir())
