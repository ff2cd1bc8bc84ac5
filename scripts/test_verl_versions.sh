#!/usr/bin/env bash
# Run the tests with every verl that this package supports, and see that it refuses the others with one error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # setup.sh says why

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'HELP'
Usage: bash scripts/test_verl_versions.sh [VERSION ...] [-- PYTEST ARGUMENT ...]

Makes an environment for each version (.venv, or .venv-verl-VERSION), and runs the tests in it: without arguments for
pytest the fast ones, trainings of one and two steps on a CPU among them; twenty minutes each. Default: every version on
the package index from the oldest supported on, and the one before it. A version that is not supported must end a run
with one error, before anything starts.
HELP
    exit 0
fi
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -eq 0 ] || shift

bash scripts/setup.sh --cpu
sort_versions='
import sys
from packaging.version import Version
from dmpo.dmpo_patch import SUPPORTED_VERL
known = sorted(map(Version, sys.argv[1].replace(",", " ").split()))
supported = [version for version in known if version in SUPPORTED_VERL]
older = [version for version in known if version < supported[0]]
print(*(older[-1:] + [version for version in known if version >= supported[0]]))
'
if [ ${#versions[@]} -eq 0 ]; then
    known=$(.venv/bin/python -m pip index versions verl 2>/dev/null | sed -n 's/^Available versions: //p')
    read -ra versions <<<"$(.venv/bin/python -W ignore -c "$sort_versions" "$known")"
fi

results=()
status=0
for version in "${versions[@]}"; do
    printf '\n=== verl %s\n' "$version"
    if .venv/bin/python -W ignore -c "from dmpo.dmpo_patch import SUPPORTED_VERL as s; raise SystemExit('$version' not in s)"; then
        python=.venv-verl-$version/bin/python
        bash scripts/setup.sh --verl "$version"
        [ -x "$python" ] || python=.venv/bin/python
        found=$("$python" -c 'from importlib.metadata import version; print(version("verl"))')
        [ "$found" = "$version" ] || { echo "$python has verl $found, not $version" >&2; exit 1; }
        if "$python" -m pytest "$@"; then result="tests passed"; else result="TESTS FAILED" status=1; fi
    else
        folder=outputs/verl-$version
        [ -d "$folder/verl" ] || .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
            --no-compile --target "$folder" "verl==$version"
        output=$(PYTHONPATH=$folder .venv/bin/python -W ignore -m dmpo.main_dmpo 2>&1) || true
        echo "$output"
        # One line, and verl by itself still loads.
        if [[ $output == "UnsupportedVerlError: DMPO does not work with the installed verl: its version is $version."* ]] &&
            [ "$(wc -l <<<"$output")" -eq 1 ] &&
            PYTHONPATH=$folder .venv/bin/python -W ignore -c 'import verl.trainer.ppo.core_algos'; then
            result="refused with one error"
        else
            result="NOT REFUSED AS IT SHOULD BE" status=1
        fi
    fi
    results+=("verl $version: $result")
done
printf '\n%s' "${results[@]}"
echo
exit $status
