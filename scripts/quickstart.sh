#!/usr/bin/env bash
# GRPO against DMPO on a toy task, trained by verl on CPU cores: one command, about twenty minutes.
# `bash scripts/quickstart.sh --help` lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # setup.sh says why

# A wrong argument shows before anything is installed, and so does the help.
"${PYTHON:-python3}" -m dmpo.cpu.arguments quickstart "$@"
for argument in "$@"; do
    case $argument in -h | --help) exit 0 ;; esac
done

bash scripts/setup.sh --cpu
exec .venv/bin/python -m dmpo.cpu.quickstart "$@"
