#!/usr/bin/env bash
# What `make sft` does once .venv is there: gets the pretrained model, fine-tunes it on two local ranks, and prints the
# model's loss and answer before and after. It only calls what a user would call by hand, and shows those calls.
#
#   scripts/quick_start.sh [RUN_FOLDER]     default: runs/sft_smollm2
#
# The run folder is replaced if an earlier call of this script made it, and otherwise must not exist yet.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
readonly ranks=2
readonly bin=.venv/bin
readonly mark=.made-by-quick-start
readonly prompt="How can I tell that rain is coming?"

fetched=0
"$bin/python" scripts/fetch_smollm2.py --folder models || fetched=$?
case "$fetched" in
    0)
        config=examples/sft_smollm2.yaml
        run="${1:-runs/sft_smollm2}"
        before=(--before models/SmolLM2-135M-Instruct.Q4_1.gguf)
        ;;
    3)
        echo "The pretrained model cannot be had from here (see above), so the same run follows with a small model" \
            "that starts from random weights: its loss falls, but its answer will make no sense."
        config=examples/sft_tiny.yaml
        run="${1:-runs/sft_tiny}"
        before=()
        ;;
    *) exit "$fetched" ;;
esac

if [[ -e "$run/$mark" ]]; then
    echo "Replacing $run, made by an earlier call; to keep one, name another folder: make sft RUN=FOLDER"
    rm -rf "$run"
elif [[ -e "$run" ]]; then
    echo "$run exists and is not from an earlier call of this; move it away or name another: make sft RUN=FOLDER" >&2
    exit 1
fi
mkdir -p "$run"
touch "$run/$mark"

# The ranks share this machine's cores: more threads than cores would only wait for each other.
cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"

command=("$bin/torchrun" --standalone --nproc-per-node "$ranks" pretrain_sft.py --config "$config"
    --save "$run" --save-hf "$run/hf" --log-dir "$run")
printf '+ %s\n' "${command[*]}"
"${command[@]}"

"$bin/python" scripts/compare_models.py ${before[@]+"${before[@]}"} --after "$run/hf" \
    --metrics "$run/metrics.jsonl" --prompt "$prompt"
printf '\nDone in %d s; checkpoint, metrics.jsonl and the exported model (hf/) are in %s.\n' "$SECONDS" "$run"
