#!/usr/bin/env bash
# What `make distill` does once .venv is there: gets the pretrained model, makes a student of 24 of its 30 layers, lets
# the model teach it on two local ranks, and prints their divergence and the student's answer before and after. It only
# calls what a user would call by hand, and shows those calls.
#
#   scripts/quick_distill.sh [RUN_FOLDER]     default: runs/distill_smollm2
#
# The run folder is replaced if an earlier call of this script made it, and otherwise must not exist yet.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
readonly ranks=2
readonly bin=.venv/bin
readonly mark=.made-by-quick-distill
readonly teacher=models/SmolLM2-135M-Instruct.Q4_1.gguf
readonly student=models/SmolLM2-24-layers
readonly prompt="How can I tell that rain is coming?"
run="${1:-runs/distill_smollm2}"

show_and_run() {
    printf '+ %s\n' "$*"
    "$@"
}

if ! "$bin/python" scripts/fetch_smollm2.py --folder models; then
    echo "Without the pretrained model there is no teacher; get it once where the network is, into models/." >&2
    exit 1
fi
if [[ ! -e "$student" ]]; then
    show_and_run "$bin/python" scripts/take_layers.py --model "$teacher" --output "$student" --drop 10,13,16,19,22,25
fi

if [[ -e "$run/$mark" ]]; then
    echo "Replacing $run, made by an earlier call; to keep one, name another folder: make distill RUN=FOLDER"
    rm -rf "$run"
elif [[ -e "$run" ]]; then
    echo "$run exists and is not from an earlier call of this; move it away or name another: make distill RUN=FOLDER" >&2
    exit 1
fi
mkdir -p "$run"
touch "$run/$mark"

# The ranks share this machine's cores: more threads than cores would only wait for each other.
cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"

show_and_run "$bin/torchrun" --standalone --nproc-per-node "$ranks" pretrain_sft.py \
    --config examples/distill_smollm2.yaml --save "$run" --save-hf "$run/hf" --log-dir "$run"

"$bin/python" scripts/compare_models.py --before "$student" --after "$run/hf" \
    --metrics "$run/metrics.jsonl" --loss kl --prompt "$prompt"
printf '\nDone in %d s; checkpoint, metrics.jsonl and the exported student (hf/) are in %s.\n' "$SECONDS" "$run"
