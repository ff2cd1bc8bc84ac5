#!/usr/bin/env bash
# GRPO against DMPO on a toy task, trained by verl on CPU cores: one command, about twenty minutes.
# `bash scripts/quickstart.sh --help` lists the options.
source "$(dirname "${BASH_SOURCE[0]}")/cpu_common.sh"

set_up quickstart "$@"
exec .venv/bin/python -m dmpo.cpu.quickstart "$@"
