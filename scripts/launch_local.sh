#!/usr/bin/env bash
# Starts a run on this machine: one rank for each GPU, or without GPUs as many ranks as the configuration's layout needs.
#
#   scripts/launch_local.sh CONFIG [--any-setting VALUE ...]
#
# Each rank's output is kept in the run folder, under logs/; the terminal shows the first rank's progress, and the error
# of the first rank that fails. Relative paths are relative to where you are, as with torchrun.
#
# Environment: RANKS_PER_NODE   another number of ranks
#              OMP_NUM_THREADS  threads of each rank (default: this machine's cores divided by the ranks)
#              VENV             the Python environment (default: the checkout's .venv, else python3 on PATH)
set -euo pipefail

project="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/launch_common.sh
source "$project/scripts/launch_common.sh"

[[ $# -gt 0 && "$1" != -* ]] || fail "no configuration was given; use: $0 CONFIG [--any-setting VALUE ...]"
config="$1"
shift
find_python
plan="$("$python" "$project/scripts/launch_plan.py" --nodes 1 --ranks-per-node "${RANKS_PER_NODE:-}" -- \
    --config "$config" "$@")"
read_plan "$plan"
logs="$run_folder/logs/$(date +%Y%m%d-%H%M%S)"
printf 'starting %s ranks; the output of each is kept in %s\n' "$ranks_per_node" "$logs"
start_torchrun "$ranks_per_node" "$logs" --standalone -- --config "$config" "$@"
