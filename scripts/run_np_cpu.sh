#!/usr/bin/env bash
# NP-hard tasks on CPU cores: a tiny model learns from a solver, then GRPO and DMPO train it; table and picture.
# `bash scripts/run_np_cpu.sh --help` lists the options.
source "$(dirname "${BASH_SOURCE[0]}")/cpu_common.sh"

set_up np "$@"
exec .venv/bin/python -m dmpo.cpu.np_run "$@"
