"""The settings that are compared, each a point of the grid."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        name: unique.
        family: settings of a family are drawn and listed together.
        base: with the policy loss; else the group term alone.
        entropy: coefficient of the entropy bonus.
        clip_high: upper clip ratio.
        epochs: updates with each batch.
        divergence: None trains without the group term.
        beta, alpha, tau, target, zero_signal, length_norm: `dmpo_beta`, `dmpo_temperature`, `dmpo_policy_temperature`,
            `dmpo_target`, `dmpo_zero_signal`, `dmpo_length_norm` of the package.
        auto_tau: tau is this times the mean over groups of the standard deviation of phi within a group.
        cut: groups are cut as by verl, see `cut`.
        start_step, warmup: beta is 0 before that step, then rises linearly over so many.
        group_size: rollouts of a prompt; there are as many rollouts in all whatever it is.
    """

    name: str
    family: str
    base: bool = True
    entropy: float = 0.0
    clip_high: float = 0.2
    epochs: int = 1
    divergence: str | None = None
    beta: float = 1.0
    alpha: float = 1 / 15
    tau: float = 1.0
    auto_tau: float | None = None
    target: str = "reward"
    zero_signal: str = "keep"
    length_norm: str = "mean"
    cut: bool = False
    start_step: int = 0
    warmup: int = 0
    group_size: int = 8

    def beta_at(self, step: int) -> float:
        """Weight of the group term in training step `step`, the first being 1."""
        if step < self.start_step:
            return 0.0
        return self.beta * min(1.0, (step - self.start_step + 1) / self.warmup) if self.warmup else self.beta

    def identity(self) -> dict[str, Any]:
        """What the results of a run depend on: all but its name and family."""
        return {name: value for name, value in asdict(self).items() if name not in ("name", "family")}


GRPO = Setting("GRPO", "baseline")
PUBLISHED = Setting(
    "published, whole groups", "published", divergence="mse", beta=2, target="advantage", zero_signal="skip"
)
OURS = Setting("forward_kl b1 t1/4 keep_solved", "ours", divergence="forward_kl", tau=0.25, zero_signal="keep_solved")

_TAUS = {"1": 1.0, "1/4": 0.25, "1/16": 0.0625}


def _term(divergence: str, beta: float, tau: str, zero_signal: str) -> Setting:
    return Setting(
        f"{divergence} b{beta:g} t{tau} {zero_signal}",
        divergence,
        divergence=divergence,
        beta=beta,
        tau=_TAUS[tau],
        zero_signal=zero_signal,
    )


def baselines() -> list[Setting]:
    """What a user would try without a group term, and the published setting, cut and whole."""
    return [
        GRPO,
        *(replace(GRPO, name=f"entropy {c:g}", family="entropy", entropy=c) for c in (0.01, 0.02, 0.05, 0.1)),
        # Clipping acts from the second update of a batch on.
        replace(GRPO, name="4 epochs", family="clip", epochs=4),
        replace(GRPO, name="4 epochs, clip-higher", family="clip", epochs=4, clip_high=0.28),
        replace(PUBLISHED, name="published, cut", cut=True),
        PUBLISHED,
    ]


def group_terms() -> list[Setting]:
    """Every divergence, beta, policy temperature and treatment of groups without signal."""
    return [
        _term(divergence, beta, tau, zero_signal)
        for zero_signal in ("keep_solved", "keep", "skip")
        for tau in _TAUS
        for divergence in ("forward_kl", "mse", "js", "reverse_kl")
        for beta in (1, 2, 0.5, 4)
    ]


def variations() -> list[Setting]:
    """Around our recommendation: without the base loss, in two stages, other group sizes."""
    found = [
        replace(OURS, name="pure forward_kl t1/4 keep_solved", family="pure", base=False),
        replace(OURS, name="pure forward_kl t1 keep", family="pure", base=False, tau=1.0, zero_signal="keep"),
        replace(PUBLISHED, name="pure mse", family="pure", base=False, target="reward", zero_signal="keep"),
        replace(OURS, name="forward_kl cut", family="cut", cut=True),
        *(
            replace(OURS, name=f"two stages, from {start}", family="two stages", start_step=start, warmup=20)
            for start in (40, 80)
        ),
    ]
    for n in (4, 16):
        found += [
            replace(GRPO, name=f"GRPO, groups of {n}", family="group size", group_size=n),
            replace(OURS, name=f"{OURS.name}, groups of {n}", family="group size", group_size=n),
        ]
    return found


def lengths() -> list[Setting]:
    """For longer responses: mean and sum scores, fixed and automatic policy temperature."""
    return [
        replace(GRPO, family="length"),
        *(
            replace(OURS, name=f"{norm} t{tau:g}", family="length", length_norm=norm, tau=tau)
            for norm, taus in (("mean", (1, 0.25, 0.0625, 0.015625)), ("sum", (4, 1, 0.25)))
            for tau in taus
        ),
        *(
            replace(OURS, name=f"{norm} auto {c:g}", family="length", length_norm=norm, auto_tau=c)
            for norm in ("mean", "sum")
            for c in (0.5, 1, 2)
        ),
    ]


def of_task(task: str) -> list[Setting]:
    """The settings that are run on a task, those first that say most."""
    if task == "two_digits":
        return baselines() + variations() + group_terms()
    if task == "two_digits_long":
        return lengths()
    recommended = [_term("forward_kl", 1, tau, zero) for tau in _TAUS for zero in ("keep_solved", "keep")]
    return [*baselines()[:4], *baselines()[-2:], *recommended, *(_term(d, 2, "1", "keep") for d in ("mse", "js"))]


def verdict() -> list[Setting]:
    """The settings that are run through verl."""
    return [
        GRPO,
        replace(PUBLISHED, name="published, cut", cut=True),
        OURS,
        PUBLISHED,
        _term("forward_kl", 0.5, "1/4", "keep_solved"),
        replace(GRPO, name="entropy 0.1", family="entropy", entropy=0.1),
        _term("js", 4, "1/4", "keep_solved"),
    ]
