#!/usr/bin/env bash
# The published recipe on a Ray cluster that is running already: NNODES machines (default 2) of GPUS each (default 8).
# Start Ray on each machine first (docs/math.md), then this on one of them; RAY_ADDRESS names the cluster (default auto).
# The repository must lie at the same path on every machine, and so must data, model and OUTPUT_DIR.
# Environment and arguments: scripts/train_common.sh. Data: python -m dmpo.tasks.math.prepare. Guide: docs/math.md.
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

export NNODES=${NNODES:-2}
train_math qwen2.5-7b_math_grpo_dmpo_zero_multinode Elliott/Qwen2.5-Math-7B-16k-think 8 \
    dmpo=pr105 \
    +ray_kwargs.ray_init.address="$(hydra_value "${RAY_ADDRESS:-auto}")" \
    "$@"
