#!/usr/bin/env bash
# Set up, check the style, run the tests. Arguments go to pytest: `bash scripts/test.sh -m slow`, `... tests/test_groups.py`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # setup.sh says why

bash scripts/setup.sh
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
"$python" -m ruff check .
"$python" -m ruff format --check .
exec "$python" -m pytest "$@"
