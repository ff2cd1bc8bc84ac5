import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmpo.divergences import DIVERGENCES
from dmpo.groups import NonFiniteGroupError, group_statistics, sequence_scores

from . import reference

TEMPERATURES = st.sampled_from([1e-4, 1e-2, 1 / 15, 0.3, 1.0, 7.0, 1e4])


@st.composite
def batches(draw):
    """Groups of 1 to 9 rows in shuffled order, with negative labels, equal scores, rows left out, extreme phi."""
    seed = draw(st.integers(0, 2**31 - 1))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    scale = draw(st.sampled_from([0.01, 1.0, 30.0, 1e4]))
    binary = draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    group = torch.cat([torch.full((n,), 17 * i - 40) for i, n in enumerate(sizes)])
    group = group[torch.randperm(len(group), generator=generator)]
    phi = -scale * torch.rand(len(group), generator=generator, dtype=torch.float64)
    score = torch.rand(len(group), generator=generator)
    if binary:
        score = (score > 0.5).float()
    valid = torch.rand(len(group), generator=generator) > draw(st.sampled_from([-1.0, 0.2]))
    return phi, score, group, valid


@settings(max_examples=300, deadline=None)
@given(
    batches(),
    TEMPERATURES,
    TEMPERATURES,
    st.sampled_from(sorted(DIVERGENCES)),
    st.sampled_from(["keep", "skip", "keep_solved"]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_loss_and_coefficients_match_autograd_of_the_formulas(
    batch, temperature, policy_temperature, divergence, zero_signal, solved_score
):
    phi, score, group, valid = batch
    options = dict(
        temperature=temperature,
        policy_temperature=policy_temperature,
        divergence=divergence,
        zero_signal=zero_signal,
        solved_score=solved_score,
        valid=valid,
    )
    leaf = phi.clone().requires_grad_()
    loss, counted = reference.objective(leaf, score, group, **options)
    loss.backward()
    stats = group_statistics(phi, score, group, **options)
    assert sorted(stats.label[stats.counted].tolist()) == sorted(counted)
    torch.testing.assert_close(stats.loss, loss.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(stats.coef, leaf.grad, rtol=1e-8, atol=1e-11)
    for label in stats.label.tolist():
        rows = valid & (group == label)
        torch.testing.assert_close(stats.q[rows], torch.softmax(phi[rows] / policy_temperature, 0))
        torch.testing.assert_close(stats.p[rows], torch.softmax(score[rows].double() / temperature, 0))
    assert (stats.p[~valid] == 0).all() and (stats.coef[~valid] == 0).all() and (stats.group[~valid] == -1).all()


def test_per_group_figures_are_those_of_the_group():
    phi = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
    score = torch.tensor([1.0, 0.0, 0.0, 0.0])
    stats = group_statistics(phi, score, torch.tensor([3, 3, 1, 3]), temperature=0.5)
    p = torch.softmax(score[[0, 1, 3]].double() / 0.5, 0)
    q = torch.softmax(phi[[0, 1, 3]], 0)
    assert stats.label.tolist() == [1, 3] and stats.size.tolist() == [1, 3] and stats.counted.tolist() == [False, True]
    expected = {
        "target_entropy": -(p * p.log()).sum(),
        "policy_entropy": -(q * q.log()).sum(),
        "target_ess": 1 / (p**2).sum(),
        "forward_kl": (p * (p / q).log()).sum(),
        "reverse_kl": (q * (q / p).log()).sum(),
        "group_loss": ((p - q) ** 2).mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(stats, name)[1], value)


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
@pytest.mark.parametrize("temperature,policy_temperature", [(1e-4, 1e-4), (1e4, 1e4), (1e-4, 1e4), (1e4, 1e-4)])
def test_extremes_stay_finite_and_bounded(divergence, temperature, policy_temperature):
    phi = torch.linspace(-1e4, 0, 4096)
    score = torch.linspace(0, 1, 4096).flip(0)
    stats = group_statistics(
        phi,
        score,
        torch.zeros(4096, dtype=torch.long),
        temperature=temperature,
        policy_temperature=policy_temperature,
        divergence=divergence,
    )
    for name in ("loss", "coef", "p", "q", "log_p", "group_loss", "target_entropy", "forward_kl", "reverse_kl"):
        assert getattr(stats, name).isfinite().all(), name
    assert stats.loss >= 0
    torch.testing.assert_close(stats.p.sum(), torch.ones((), dtype=torch.float64))
    # c sums to 0 over a group: q does not change when all scores move together.
    scale = max(1.0, stats.coef.abs().max().item())
    assert abs(stats.coef.sum().item()) < 1e-8 * scale


def test_one_hundred_thousand_groups():
    torch.manual_seed(0)
    n = 100_000
    group = torch.arange(n).repeat(3)[torch.randperm(3 * n)]
    phi, score = -torch.rand(3 * n), torch.rand(3 * n)
    stats = group_statistics(phi, score, group, temperature=0.1, divergence="forward_kl")
    assert stats.counted.sum() == n
    p = score.double().div(0.1).exp()
    p = p / torch.zeros(n, dtype=torch.float64).index_add_(0, group, p)[group]
    q = phi.double().exp()
    q = q / torch.zeros(n, dtype=torch.float64).index_add_(0, group, q)[group]
    torch.testing.assert_close(stats.coef, (q - p) / n)


def test_bf16_scores_lose_nothing_beyond_their_own_rounding():
    torch.manual_seed(0)
    phi, score = (-torch.rand(64)).bfloat16(), torch.rand(64).bfloat16()
    group = torch.arange(64) // 8
    low = group_statistics(phi, score, group, temperature=0.1)
    wide = group_statistics(phi.double(), score.double(), group, temperature=0.1)
    torch.testing.assert_close(low.coef, wide.coef, rtol=0, atol=0)


def test_order_and_labels_do_not_matter():
    torch.manual_seed(0)
    phi, score, group = -torch.rand(60).double(), torch.rand(60), torch.randint(0, 9, (60,))
    stats = group_statistics(phi, score, group, temperature=0.2, divergence="js")
    order = torch.randperm(60)
    moved = group_statistics(phi[order], score[order], (group * -7 + 3)[order], temperature=0.2, divergence="js")
    torch.testing.assert_close(moved.coef, stats.coef[order], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(moved.loss, stats.loss, rtol=1e-12, atol=0)


def test_mini_batches_with_whole_groups_are_normalised_by_their_own_counts():
    torch.manual_seed(0)
    phi, group = -torch.rand(40).double(), torch.arange(40) // 4
    score = (torch.rand(40) > 0.5).float()
    score[:8] = 0.0  # two groups of the first mini-batch have no signal
    mini_batch = group // 5
    options = dict(temperature=0.2, zero_signal="skip")
    stats = group_statistics(phi, score, group, mini_batch=mini_batch, **options)
    for m in (0, 1):
        rows = mini_batch == m
        alone = group_statistics(phi[rows], score[rows], group[rows], **options)
        torch.testing.assert_close(stats.coef[rows], alone.coef)


def test_a_cut_group_counts_by_its_share_of_rows():
    phi, score = -torch.rand(8).double(), torch.rand(8)
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    mini_batch = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    whole = group_statistics(phi, score, group, temperature=0.2)
    cut = group_statistics(phi, score, group, temperature=0.2, mini_batch=mini_batch)
    unnormalised = whole.coef * 2
    torch.testing.assert_close(cut.coef[:5], unnormalised[:5] / 1.25)
    torch.testing.assert_close(cut.coef[5:], unnormalised[5:] / 0.75)


def test_reward_decides_about_signal_and_solved_where_the_target_is_an_advantage():
    phi = -torch.rand(6).double()
    advantage = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, -1.0])
    reward = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    stats = group_statistics(phi, advantage, group, temperature=1.0, zero_signal="keep_solved", reward=reward)
    assert stats.counted.tolist() == [True, False, True]
    without = group_statistics(phi, advantage, group, temperature=1.0, zero_signal="keep_solved")
    assert without.counted.tolist() == [False, False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["phi", "score"])
def test_non_finite_rows_are_named_by_their_group(bad, field):
    phi, score, group = -torch.rand(6), torch.rand(6), torch.tensor([5, 5, 6, 6, 7, 7])
    (phi if field == "phi" else score)[3] = bad
    with pytest.raises(NonFiniteGroupError, match="row 3.*group 6"):
        group_statistics(phi, score, group, temperature=1.0)
    with pytest.raises(NonFiniteGroupError, match="group uid-b"):
        names = ["uid-a", "uid-a", "uid-b", "uid-b", "uid-c", "uid-c"]
        group_statistics(phi, score, group, temperature=1.0, names=names)
    valid = torch.tensor([True, True, True, False, True, True])
    assert group_statistics(phi, score, group, temperature=1.0, valid=valid).coef.isfinite().all()
    with pytest.raises(NonFiniteGroupError, match="group 6"):
        group_statistics(phi, score, group, temperature=1.0, zero_signal="skip")


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(temperature=0.0), "temperature must be a finite number > 0, got 0.0"),
        (dict(temperature=math.nan), "temperature must be"),
        (dict(policy_temperature=-1.0), "policy_temperature must be"),
        (dict(divergence="tv"), "divergence must be one of"),
        (dict(zero_signal="drop"), "zero_signal must be one of"),
        (dict(valid=torch.ones(3, dtype=torch.bool)), "valid must have the shape of phi"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        group_statistics(torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), **(dict(temperature=1.0) | change))


def test_no_rows_and_no_counted_groups_give_zero():
    empty = group_statistics(torch.zeros(0), torch.zeros(0), torch.zeros(0).long(), temperature=1.0)
    assert empty.loss == 0 and empty.coef.shape == (0,)
    singles = group_statistics(torch.zeros(3), torch.rand(3), torch.arange(3), temperature=1.0)
    assert singles.loss == 0 and not singles.counted.any() and (singles.coef == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sequence_scores_are_masked_means_or_sums(dtype):
    torch.manual_seed(0)
    log_prob = -torch.rand(5, 7).to(dtype)
    mask = torch.rand(5, 7) > 0.4
    mask[2] = False
    log_prob[~mask] = math.nan
    for norm in ("mean", "sum"):
        phi = sequence_scores(log_prob, mask, norm)
        assert phi.dtype == torch.promote_types(dtype, torch.float32)
        for i in range(5):
            tokens = log_prob[i][mask[i]].double()
            expected = 0.0 if not len(tokens) else (tokens.mean() if norm == "mean" else tokens.sum()).item()
            assert phi[i].item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="length_norm must be one of"):
        sequence_scores(log_prob, mask, "median")
    with pytest.raises(ValueError, match="must match"):
        sequence_scores(log_prob, mask[:4])


def test_sequence_scores_are_differentiable_through_the_mask():
    log_prob = torch.rand(2, 3).double().neg().requires_grad_()
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    sequence_scores(log_prob, mask).sum().backward()
    assert log_prob.grad.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
