# shellcheck shell=bash
# What the run_*.sh scripts for GPUs share; they source it and call `train_math` or `train_np_bench`.
#
# Environment of every script:
#   TRAIN_FILES  parquet file, or a Hydra list of them "['a.parquet','b.parquet']" (default data/math/train.parquet,
#                data/np_bench/train.parquet, for pictures data/np_bench_images/train.parquet)
#   VAL_FILES    the same for validation (default: validation.parquet there)
#   MODEL_PATH   model folder or hub id (default: the script's)
#   OUTPUT_DIR   checkpoints, rollouts, TensorBoard (default outputs/<experiment>)
#   NNODES       machines (default 1)
#   GPUS         GPUs of each machine (default: the script's)
#   PYTHON       interpreter of the verl environment (default python3)
# Arguments are Hydra overrides; `--cfg job` prints the configuration and trains nothing.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# A text as a string of Hydra's override grammar, whatever characters it has; lists stay lists.
hydra_value() {
    case $1 in
        \[*) printf '%s' "$1" ;;
        *) printf "'%s'" "${1//\'/\\\'}" ;;
    esac
}

# Each: EXPERIMENT MODEL GPUS [OVERRIDE ...]
train_math() { train dmpo_math data/math "python -m dmpo.tasks.math.prepare" "$@"; }
train_np_bench() { train np_bench data/np_bench "python -m dmpo.tasks.np_bench.make" "$@"; }
train_np_bench_images() {
    local make="python -m dmpo.tasks.np_bench.make --images --out data/np_bench_images"
    train np_bench data/np_bench_images "$make" "$@" data.image_key=images
}

# train CONFIG DATA HOW_TO_MAKE_IT EXPERIMENT MODEL GPUS [OVERRIDE ...]
train() {
    local config=$1 data=$2 make=$3 experiment=$4 model=${MODEL_PATH:-$5} gpus=${GPUS:-$6}
    shift 6
    local output=${OUTPUT_DIR:-outputs/$experiment}
    case $output in /*) ;; *) output=$PWD/$output ;; esac
    local train=${TRAIN_FILES:-$data/train.parquet} validation=${VAL_FILES:-$data/validation.parquet}
    local file
    for file in "$train" "$validation"; do
        case $file in \[* | *://*) continue ;; esac
        if [ ! -e "$file" ]; then
            printf '%s\n' "no data at $file; make it with: $make" \
                "(or name yours: TRAIN_FILES=... VAL_FILES=...)" >&2
            exit 1
        fi
    done
    # Found by verl's processes too, on every machine, whether this repository is installed or mounted as verl's recipe
    # folder.
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    local env_vars=++ray_kwargs.ray_init.runtime_env.env_vars
    exec "${PYTHON:-python3}" -m dmpo.main_dmpo --config-name "$config" \
        data.train_files="$(hydra_value "$train")" \
        data.val_files="$(hydra_value "$validation")" \
        actor_rollout_ref.model.path="$(hydra_value "$model")" \
        trainer.default_local_dir="$(hydra_value "$output/checkpoints")" \
        trainer.rollout_data_dir="$(hydra_value "$output/rollouts")" \
        trainer.validation_data_dir="$(hydra_value "$output/validation")" \
        "$env_vars.PYTHONPATH=$(hydra_value "$PYTHONPATH")" \
        "$env_vars.TENSORBOARD_DIR=$(hydra_value "${TENSORBOARD_DIR:-$output/tensorboard}")" \
        trainer.experiment_name="$experiment" \
        trainer.nnodes="${NNODES:-1}" \
        trainer.n_gpus_per_node="$gpus" \
        "$@"
}
