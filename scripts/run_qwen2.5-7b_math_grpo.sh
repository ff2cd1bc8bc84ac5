#!/usr/bin/env bash
# The baseline: plain GRPO with everything else as in run_qwen2.5-7b_math_grpo_dmpo_zero.sh.
# Environment and arguments: scripts/train_common.sh. Data: python -m dmpo.tasks.math.prepare. Guide: docs/math.md.
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

train_math qwen2.5-7b_math_grpo Elliott/Qwen2.5-Math-7B-16k-think 8 \
    dmpo=pr105 \
    actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \
    "$@"
