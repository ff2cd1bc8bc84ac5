#!/usr/bin/env bash
# NP-hard tasks as text: Qwen2.5-7B-Instruct on 8 GPUs.
# Environment and arguments: scripts/train_common.sh. Data: python -m dmpo.tasks.np_bench.make. Guide: docs/np_bench.md.
source "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"

train_np_bench qwen2.5-7b_np_bench_grpo_dmpo Qwen/Qwen2.5-7B-Instruct 8 "$@"
