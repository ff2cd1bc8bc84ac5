#!/usr/bin/env bash
# NP-hard tasks on CPU cores: a tiny model learns from a solver, then GRPO and DMPO train it; table and picture.
# `bash scripts/run_np_cpu.sh --help` lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # setup.sh says why

# A wrong argument shows before anything is installed, and so does the help.
"${PYTHON:-python3}" -m dmpo.cpu.arguments np "$@"
for argument in "$@"; do
    case $argument in -h | --help) exit 0 ;; esac
done

bash scripts/setup.sh --cpu
exec .venv/bin/python -m dmpo.cpu.np_run "$@"
