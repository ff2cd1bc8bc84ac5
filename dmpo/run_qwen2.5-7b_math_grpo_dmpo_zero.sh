#!/usr/bin/env bash
# With this repository mounted as verl's recipe folder: bash recipe/dmpo/run_qwen2.5-7b_math_grpo_dmpo_zero.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/../scripts/run_qwen2.5-7b_math_grpo_dmpo_zero.sh" "$@"
