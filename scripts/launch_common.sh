# shellcheck shell=bash
# What the launch scripts share: the Python to use, the plan of a configuration, and torchrun's command line. Sourced;
# it expects `set -euo pipefail` and the checkout's folder in `project`.

: "${project:?the script that sources this sets it to the checkout}"

fail() { # MESSAGE...
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Sets `python`: VENV's, else the checkout's own environment (not in a container: it is the host's), else what is on PATH.
find_python() {
    if [[ -n "${VENV:-}" ]]; then
        [[ -x "$VENV/bin/python" ]] || fail "VENV is $VENV, but $VENV/bin/python is not there; name an environment"
        python="$VENV/bin/python"
    elif [[ -z "${CONTAINER:-}" && -x "$project/.venv/bin/python" ]]; then
        python="$project/.venv/bin/python"
    else
        python="$(command -v python3)" || fail "no python3 found; run 'make setup' in $project, or set VENV"
    fi
}

# Sets `ranks_per_node`, `run_folder` and `added` (arguments to append) from the lines of launch_plan.py.
read_plan() { # LINES
    local name value
    ranks_per_node="" run_folder="" added=()
    while IFS='=' read -r name value; do
        case "$name" in
            ranks_per_node) ranks_per_node="$value" ;;
            run_folder) run_folder="$value" ;;
            argument) added+=("$value") ;;
        esac
    done <<<"$1"
    [[ -n "$ranks_per_node" && -n "$run_folder" ]] || fail "launch_plan.py gave no plan, but: $1"
}

# Becomes torchrun: each rank's output goes to a file of its own below LOGS, and to the terminal as well. Only the first
# rank talks there while all is well, and of several failing ranks only the first one names its error.
start_torchrun() { # RANKS LOGS TORCHRUN_OPTIONS... -- ARGUMENTS OF pretrain_sft.py
    # shellcheck disable=SC2016 # torchrun's variable, not the shell's
    local ranks="$1" logs="$2" cores options=(--role "") prefix='${role_name}'
    shift 2
    while [[ "$1" != -- ]]; do
        options+=("$1")
        shift
    done
    shift
    # The ranks share this machine's cores: more threads than cores would only wait for each other. nproc counts the
    # cores that this process may use, which is what Slurm or a container gave it.
    cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"
    # torchrun writes "[default0]:" before every line; "default" alone is the role's name, which can be empty.
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE:-$prefix}"
    # What torch says with a C++ trace when a connection ends, on every rank that is ended because another one failed.
    export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
    mkdir -p "$logs" || fail "the log folder $logs cannot be made; check the run folder's permissions"
    exec "$python" -m torch.distributed.run "${options[@]}" --nproc-per-node "$ranks" \
        --log-dir "$logs" --redirects 3 --tee 3 "$project/pretrain_sft.py" "$@"
}
