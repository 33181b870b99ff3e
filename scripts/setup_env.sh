#!/usr/bin/env bash
# Creates the virtual environment (.venv) with Python 3.12 and installs the project into it with the versions pinned in
# requirements.lock. A call with nothing to do returns at once. It runs nothing of the project itself.
#
#   scripts/setup_env.sh          create or refresh the environment
#   scripts/setup_env.sh --lock   write requirements.lock anew, from the newest versions that pyproject.toml allows
#
# Environment: PYTHON  the Python 3.12 to use (default: python3.12 or python3 on PATH, then pyenv's, then uv's)
#              VENV    the environment's folder (default: .venv)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME # another installation's packages must not count as installed here
export PIP_USER=0           # a personal "install --user" default is refused inside a virtual environment
export LC_ALL=C            # one sorting order everywhere
venv="${VENV:-.venv}"
stamp="$venv/.setup-stamp"
log="$venv/setup.log"

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# pyenv puts a python3.12 on PATH that fails unless that version is selected: only running it tells.
is_python_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

print_candidates() {
    local name
    for name in python3.12 python3; do
        command -v "$name" || true
    done
    if command -v pyenv >/dev/null; then
        # Newest first; a folder that is no usable installation is weeded out by the caller.
        { find "$(pyenv root)/versions" -maxdepth 1 -name '3.12*' 2>/dev/null || true; } |
            sort -rV | sed 's|$|/bin/python3.12|'
    fi
    if command -v uv >/dev/null; then
        UV_PYTHON_DOWNLOADS=never uv python find --no-project --system 3.12 2>/dev/null || true
    fi
}

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        is_python_312 "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.12; unset it or name another one."
        printf '%s\n' "$PYTHON"
        return
    fi
    while IFS= read -r candidate; do
        if is_python_312 "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done < <(print_candidates)
    die "Python 3.12 was not found: install it with your distribution's package manager (python3.12 and" \
        "python3.12-venv), with 'pyenv install 3.12' or with 'uv python install 3.12', or set PYTHON to the path" \
        "of one; then run this again."
}

create_venv() {
    local python
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        die "$python cannot create virtual environments; install its venv module (on Debian and Ubuntu the" \
            "package python3.12-venv), then run this again."
    if [[ -e "$venv" && ! -f "$venv/pyvenv.cfg" && -n "$(find "$venv" ! -type d -print -quit)" ]]; then
        die "$venv exists and is no virtual environment; move it away or set VENV to another folder."
    fi
    say "creating $venv with $("$python" --version) ($python)"
    # Renamed first: what an interrupted removal leaves would not be known as an environment the next time.
    rm -rf "$venv.removed"
    [[ ! -e "$venv" ]] || mv "$venv" "$venv.removed"
    rm -rf "$venv.removed"
    "$python" -m venv "$venv"
}

run_pip() {
    # Byte-compiling all files takes longer than all else together; compile_imports sees to the few that are used.
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile "$@" >>"$log" 2>&1; then
        tail -n 25 "$log" >&2
        die "pip failed; its last lines are above, everything is in $log."
    fi
}

# What the installation depends on. The folder is part of it: a moved environment's scripts point to the old place.
fingerprint() {
    pwd
    cat pyproject.toml requirements.lock scripts/setup_env.sh
}

install_project() {
    local -r pin=("--constraint" "requirements.lock")
    : >"$log"
    # setuptools is installed first, so that the project itself can be built without a second, isolated environment.
    run_pip "${pin[@]}" --upgrade pip setuptools
    run_pip "${pin[@]}" --no-build-isolation --editable '.[dev]'
    check_pins
}

# Compiles what a run imports, once: otherwise every rank does so at the same time, or at every start where
# PYTHONDONTWRITEBYTECODE is set. A module that fails to import here is told about where it is needed.
compile_imports() {
    say "compiling the modules that a run imports"
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -W ignore >>"$log" 2>&1 <<'END' || true
import contextlib, importlib
for name in (
    "torch", "torch.distributed.run", "torch.distributed.checkpoint", "torch.optim", "torch.testing",
    "transformers", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.generation.utils", "transformers.modeling_gguf_pytorch_utils", "accelerate", "gguf",
    "safetensors.torch", "megatron.core", "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.dist_checkpointing",
    "megatron.core.pipeline_parallel.schedules", "pydantic", "yaml", "pytest", "hypothesis", "pip._internal.cli.main",
):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
END
}

# A package that the lock does not name would be a different version on every machine.
check_pins() {
    local unpinned
    unpinned="$(comm -23 <(list_installed) <(sed 's/[[:space:]]*#.*//; /^$/d' requirements.lock | sort))"
    if [[ -n "$unpinned" ]]; then
        say "note: installed, but not as requirements.lock says: ${unpinned//$'\n'/, }"
    fi
}

# pip and setuptools too, as NAME==VERSION; not the project itself, and nothing that was installed from a file.
list_installed() {
    "$venv/bin/python" -m pip list --disable-pip-version-check --exclude-editable --format freeze | sort
}

write_lock() {
    [[ -e "$venv" ]] && die "$venv exists; name a folder for a new environment, for example VENV=.venv-lock."
    create_venv
    : >"$log"
    run_pip --upgrade pip setuptools
    run_pip --no-build-isolation --editable '.[dev]'
    sed '/^[^#]/,$d' requirements.lock >"$venv/lock"
    list_installed >>"$venv/lock"
    mv "$venv/lock" requirements.lock
    say "wrote requirements.lock; run the tests with it, then remove $venv"
}

main() {
    [[ -f requirements.lock ]] || die "requirements.lock is missing; restore it from version control."
    if [[ "${1:-}" == --lock ]]; then
        write_lock
        return
    fi
    [[ $# -eq 0 ]] || die "unknown argument '$1'; the only one is --lock."
    if [[ -f "$stamp" ]] && fingerprint | cmp -s - "$stamp" && is_python_312 "$venv/bin/python"; then
        return
    fi
    # An environment that works is kept: what it already has (a CPU-only torch, say) is not installed again.
    if ! is_python_312 "$venv/bin/python" || { [[ -f "$stamp" ]] && [[ "$(head -n 1 "$stamp")" != "$PWD" ]]; }; then
        create_venv
    fi
    rm -f "$stamp"
    say "installing the pinned packages into $venv (a few GB, one to three minutes; log: $log)"
    install_project
    compile_imports
    fingerprint >"$stamp"
    say "done in $SECONDS s"
}

main "$@"
