# shellcheck shell=bash
# What the scripts that train on a CPU share; they source it and call `set_up NAME ARGUMENT...`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # setup.sh says why

# Checks the arguments of the run NAME, shows its help and ends where that is asked for, and installs what is needed.
set_up() {
    # A wrong argument shows before anything is installed, and so does the help.
    "${PYTHON:-python3}" -m dmpo.cpu.arguments "$@"
    local argument
    for argument in "$@"; do
        case $argument in -h | --help) exit 0 ;; esac
    done
    bash scripts/setup.sh --cpu
}
