#!/usr/bin/env bash
# DMPO with forward KL and a policy temperature of 1/4, our recommendation: Qwen2.5-Math-7B on 8 GPUs.
# Environment and arguments: scripts/train_common.sh. Data: python -m dmpo.tasks.math.prepare. Guide: docs/math.md.
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

train_math qwen2.5-7b_math_grpo_dmpo_fkl Elliott/Qwen2.5-Math-7B-16k-think 8 \
    dmpo=recommended \
    "$@"
