"""DMPO written from the paper's formulas, one group at a time, in float64 with autograd. Slow and plain on purpose."""

import torch


def group_loss(phi, score, temperature, policy_temperature, divergence):
    """L_g = tau * D(p, q) of one group; phi (G,) may require grad."""
    p = torch.softmax(score.double() / temperature, 0)
    q = torch.softmax(phi / policy_temperature, 0)
    log_p = torch.log_softmax(score.double() / temperature, 0)
    log_q = torch.log_softmax(phi / policy_temperature, 0)
    if divergence == "mse":
        d = ((p - q) ** 2).mean()
    elif divergence == "js":
        log_m = torch.logsumexp(torch.stack([log_p, log_q]), 0) - torch.log(torch.tensor(2.0, dtype=torch.float64))
        d = (p * (log_p - log_m)).sum() / 2 + (q * (log_q - log_m)).sum() / 2
    elif divergence == "forward_kl":
        d = (p * (log_p - log_q)).sum()
    elif divergence == "reverse_kl":
        d = (q * (log_q - log_p)).sum()
    return policy_temperature * d


def counts(reward, zero_signal, solved_score):
    if len(reward) < 2:
        return False
    if zero_signal == "keep" or (max(reward) - min(reward)) > 1e-6 * max(1.0, abs(max(reward))):
        return True
    return zero_signal == "keep_solved" and max(reward) >= solved_score - 1e-6 * max(1.0, abs(max(reward)))


def objective(
    phi,
    score,
    group_index,
    *,
    temperature,
    policy_temperature=1.0,
    divergence="mse",
    zero_signal="keep",
    solved_score=0.5,
    valid=None,
):
    """Mean of L_g over the groups that count; phi (B,) float64 with or without grad. Returns (loss, counted labels)."""
    valid = [True] * len(phi) if valid is None else valid.tolist()
    members = {}
    for i, label in enumerate(group_index.tolist()):
        if valid[i]:
            members.setdefault(label, []).append(i)
    losses, counted = [], []
    for label, rows in members.items():
        if counts([float(score[i]) for i in rows], zero_signal, solved_score):
            losses.append(group_loss(phi[rows], score[rows], temperature, policy_temperature, divergence))
            counted.append(label)
    loss = torch.stack(losses).mean() if losses else (phi * 0).sum()
    return loss, counted
