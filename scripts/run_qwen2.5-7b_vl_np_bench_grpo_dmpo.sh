#!/usr/bin/env bash
# NP-hard tasks as pictures: Qwen2.5-VL-7B-Instruct on 8 GPUs.
# Environment and arguments: scripts/train_common.sh. Guide: docs/np_bench.md.
# Data: python -m dmpo.tasks.np_bench.make --images --out data/np_bench_images
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

train_np_bench_images qwen2.5-7b_vl_np_bench_grpo_dmpo Qwen/Qwen2.5-VL-7B-Instruct 8 "$@"
