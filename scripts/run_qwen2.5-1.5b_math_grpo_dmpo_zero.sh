#!/usr/bin/env bash
# The published recipe on one GPU of 80 GB: Qwen2.5-Math-1.5B, whose context of 4,096 tokens bounds the responses.
# Environment and arguments: scripts/train_common.sh. Data: python -m dmpo.tasks.math.prepare. Guide: docs/math.md.
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

train_math qwen2.5-1.5b_math_grpo_dmpo_zero Qwen/Qwen2.5-Math-1.5B 1 \
    dmpo=pr105 \
    data.max_prompt_length=1024 \
    data.max_response_length=3072 \
    data.train_batch_size=64 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    "$@"
