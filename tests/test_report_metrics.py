import itertools
import math

import numpy as np
import pytest

from dmpo.report.metrics import answer_entropy, best_of_k, majority_score, pass_at_k, powers_of_two, sample_metrics


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    for correct in range(n + 1):
        outcomes = [1] * correct + [0] * (n - correct)
        for k in range(1, n + 1):
            expected = np.mean([max(subset) for subset in itertools.combinations(outcomes, k)])
            assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_and_prompts():
    n, correct = np.array([1000, 500]), np.array([3, 1])
    expected = [1 - math.comb(997, 100) / math.comb(1000, 100), 1 - math.comb(499, 100) / math.comb(500, 100)]
    np.testing.assert_allclose(pass_at_k(n, correct, 100), expected, rtol=1e-12)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(n, correct, k):
    with pytest.raises(ValueError):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_best_of_k_is_the_mean_over_all_subsets(n):
    scores = np.random.default_rng(0).normal(size=(3, n))
    for k in range(1, n + 1):
        expected = [np.mean([max(subset) for subset in itertools.combinations(row, k)]) for row in scores]
        np.testing.assert_allclose(best_of_k(scores, k), expected, rtol=1e-12)


def test_best_of_k_of_zeros_and_ones_is_pass_at_k():
    scores = np.r_[np.ones(7), np.zeros(993)]
    assert best_of_k(scores, 300) == pytest.approx(pass_at_k(1000, 7, 300), rel=1e-9)


@pytest.mark.parametrize("k", [0, 4])
def test_best_of_k_refuses_more_than_there_are(k):
    with pytest.raises(ValueError, match=f"got {k} for 3 samples"):
        best_of_k([1, 2, 3], k)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["a", "a", "b"], [1, 1, 0], 1.0),
        (["a", "b", "b"], [1, 0, 0], 0.0),
        (["a", "b"], [1, 0], 0.5),  # a tie
        ([None, None, "a"], [0, 0, 1], 1.0),  # no answer is no vote
        ([None, None], [0, 0], 0.0),
    ],
)
def test_majority(answers, scores, expected):
    assert majority_score(answers, scores) == expected


def test_entropy_of_answers():
    assert answer_entropy(["a", "a", "a"]) == 0
    assert answer_entropy(["a", "b", "c", "d"]) == pytest.approx(math.log(4))
    assert answer_entropy(["a", "a", "b", None]) == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))
    assert answer_entropy([None]) == 0


def test_the_k_that_are_reported():
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(12) == [1, 2, 4, 8, 12]


def test_figures_are_means_over_prompts_in_any_order_of_rows():
    rows = [
        # prompt, score, answer, length
        ("p", 1.0, "4", 10),
        ("q", 0.0, "7", 20),
        ("p", 0.0, "5", 30),
        ("q", 0.0, None, None),
        ("p", 1.0, "4", 20),
        ("q", 0.0, "7", 40),
    ]
    expected = {
        "avg@3": 1 / 3,
        "pass@1": 1 / 3,
        "pass@2": 1 / 2,
        "pass@3": 1 / 2,
        "maj@3": 1 / 2,
        "distinct_answers": 1.5,
        "answer_entropy": -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)) / 2,
        "answered": (1 + 2 / 3) / 2,
        "response_length": (20 + 30) / 2,
        "truncated": (0 + 1 / 2) / 2,
    }
    for order in itertools.islice(itertools.permutations(rows), 0, None, 37):
        prompts, scores, answers, lengths = zip(*order, strict=True)
        found = sample_metrics(prompts, scores, answers, lengths=lengths, max_length=40)
        assert found == pytest.approx(expected)


def test_without_answers_and_lengths_only_scores_count():
    assert sample_metrics(["p", "p"], [1, 0]) == {"avg@2": 0.5, "pass@1": 0.5, "pass@2": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["p"], [1, 0]), "scores has 2 values for 1 samples"),
        ((["p"], [1], ["a", "b"]), "answers"),
        (([], []), "no samples"),
    ],
)
def test_rows_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_metrics(*arguments)
