#!/usr/bin/env bash
# The published DMPO recipe (verl-recipe pull request 105) with whole groups: Qwen2.5-Math-7B on 8 GPUs.
# Environment and arguments: scripts/train_common.sh. Data: python -m dmpo.tasks.math.prepare. Guide: docs/math.md.
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

train_math qwen2.5-7b_math_grpo_dmpo_zero Elliott/Qwen2.5-Math-7B-16k-think 8 \
    dmpo=pr105 \
    "$@"
