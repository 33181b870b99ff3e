# shellcheck shell=bash
# What sft.sbatch, distill.sbatch and eval.sbatch share; sourced by them on the first node, and on every node by the step
# that they start. What a site changes comes first.

# ---------------------------------------------------------------------------------------------------- site settings
# Partition, account, time limit and GPUs are #SBATCH lines of the three scripts, or options of sbatch. Everything else
# is here: remove the `#` and change the value, or set the variable where sbatch is called, which wins.

# Where Python comes from: a container (Pyxis, with Transformer Engine and Apex in it), or an environment.
#: "${CONTAINER:=/shared/images/megatron.sqsh}"       # srun --container-image
#: "${CONTAINER_MOUNTS:=/shared:/shared}"             # srun --container-mounts; the checkout, the data and the run folder
#: "${VENV:=/shared/environments/megatron_ext}"       # default: .venv of the checkout
#: "${MODULES:=cuda/13.0 nccl/2.28}"                  # `module load` of these first; not used with a container

# How many ranks on each node (default: one for each GPU; without GPUs what the layout needs), and how nodes meet.
#: "${RANKS_PER_NODE:=8}"
#: "${RENDEZVOUS_PORT:=29400}"                        # default: made from the job's id; it has to be free on node 0
#: "${NODE_START_SECONDS:=600}"                       # how long nodes wait for the last one (a container's download)

# The network between the nodes. NCCL finds it by itself on most sites; where it does not, name the interfaces.
#export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ib0}"
#export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-ib0}"
#export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5}"
#export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# Options that every srun needs on this site.
site_srun_options=()
#site_srun_options+=(--mpi=none)
# ------------------------------------------------------------------------------------------- end of the site settings

# shellcheck source=scripts/launch_common.sh
source "$project/scripts/launch_common.sh"

# Stops unless Slurm has set these: the script was started without sbatch, or part of the environment is missing.
need_variables() { # NAME...
    local name
    for name in "$@"; do
        [[ -n "${!name:-}" ]] || fail "the variable $name is not set; Slurm sets it for jobs, so start this with sbatch"
    done
}

# The name, or the address that Slurm itself uses, under which other nodes reach a node.
address_of() { # NODE
    if getent hosts "$1" >/dev/null; then
        printf '%s\n' "$1"
    else
        scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
    fi
}

# srun with what all steps need. One task a node; the job's variables go along, and a task is not tied to one core.
step() { # SRUN_OPTIONS... COMMAND...
    local options=(--ntasks-per-node=1 --export=ALL "${site_srun_options[@]}")
    [[ "$(scontrol show config)" == *task/none* ]] || options+=(--cpu-bind=none) # which task/none complains about
    if [[ -n "${CONTAINER:-}" ]]; then
        options+=(--container-image "$CONTAINER" --container-workdir "$PWD")
        [[ -z "${CONTAINER_MOUNTS:-}" ]] || options+=(--container-mounts "$CONTAINER_MOUNTS")
    fi
    # since Slurm 22.05 srun does not take sbatch's --cpus-per-task over
    [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || options+=(--cpus-per-task "$SLURM_CPUS_PER_TASK")
    srun "${options[@]}" "$@"
}

# Runs pretrain_sft.py on every node of the job and returns its exit code.
run_job() { # CONFIG ARGUMENTS...
    need_variables SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES
    [[ $# -gt 0 && "$1" != -* ]] || fail "no configuration was given; use: sbatch ... CONFIG [--any-setting VALUE ...]"
    local arguments=(--config "$@") again=() plan status=0 node addresses=()
    local port="${RENDEZVOUS_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
    if [[ -n "${MODULES:-}" && -z "${CONTAINER:-}" ]]; then
        # shellcheck disable=SC2086 # several modules, separated by spaces
        module load $MODULES || fail "MODULES: 'module load $MODULES' failed; name modules that this site has"
    fi
    while read -r node; do
        addresses+=("$(address_of "$node")")
    done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

    # A job that Slurm started again after a node failed, a preemption or `scontrol requeue` goes on from its own
    # checkpoint. A new job does not: it may be a mistake to write to a folder with another run's checkpoints.
    if ((${SLURM_RESTART_COUNT:-0} > 0)); then
        again=(--again)
        printf 'job %s starts again, for the %s. time\n' "$SLURM_JOB_ID" "$SLURM_RESTART_COUNT"
    fi
    export project
    # shellcheck disable=SC2016 # the node's variables, not this shell's
    plan="$(step --nodes=1 --ntasks=1 --relative=0 bash -euo pipefail -c 'source "$project/scripts/slurm/common.sh"; make_plan "$@"' \
        make_plan --nodes "$SLURM_JOB_NUM_NODES" --ranks-per-node "${RANKS_PER_NODE:-}" --rendezvous-port "$port" \
        "${again[@]}" -- "${arguments[@]}")" || exit $?
    read_plan "$plan"
    export ranks_per_node rendezvous="${addresses[0]}:$port" addresses_of_nodes="${addresses[*]}"
    export node_start="${NODE_START_SECONDS:-600}"
    export logs="$run_folder/logs/job-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    printf 'starting %s x %s ranks; the output of each is kept in %s\n' \
        "$SLURM_JOB_NUM_NODES" "$ranks_per_node" "$logs"

    rm -f "$logs/exit_code" # a new cluster may count its jobs from 1 again
    # --kill-on-bad-exit: when one node's ranks fail, those of the others would wait for them until a timeout.
    # shellcheck disable=SC2016 # the node's variables, not this shell's
    step --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --kill-on-bad-exit=1 \
        bash -euo pipefail -c 'source "$project/scripts/slurm/common.sh"; run_node "$@"' \
        run_node "${arguments[@]}" "${added[@]}" || status=$?
    # srun's own code is the largest of all nodes, and that of a node that was ended because of the first is larger
    ((status == 0)) || [[ ! -s "$logs/exit_code" ]] || status="$(<"$logs/exit_code")"
    ((status == 0)) || printf 'failed with exit code %s; the output of each rank is in %s\n' "$status" "$logs" >&2
    return "$status"
}

# Runs in a step on the first node, in the container if there is one: it has the Python and sees a node's GPUs.
make_plan() { # ARGUMENTS OF launch_plan.py
    find_python
    # the package may be only in the checkout, as in a container with other people's packages
    PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$project/scripts/launch_plan.py" "$@"
}

# Runs in a step on every node: one torchrun, which meets the others' at the first node of the job's list.
run_node() { # ARGUMENTS OF pretrain_sft.py
    need_variables SLURM_NODEID SLURM_JOB_ID SLURM_JOB_NUM_NODES
    local addresses is_host=false status=0
    read -ra addresses <<<"$addresses_of_nodes"
    find_python
    # told, not guessed: torchrun takes a name that it does not know as its own for another machine
    [[ "$SLURM_NODEID" != 0 ]] || is_host=true
    # This shell stays until torchrun has ended its ranks: Slurm kills what is left of a task whose first process is gone.
    trap : TERM
    # the restarts count too: a new start must not meet what is left of the last one
    (
        start_torchrun "$ranks_per_node" "$logs/node$SLURM_NODEID" --nnodes "$SLURM_JOB_NUM_NODES" \
            --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-backend c10d --rdzv-endpoint "$rendezvous" \
            --rdzv-conf "is_host=$is_host,join_timeout=$node_start,read_timeout=$node_start" \
            --local-addr "${addresses[SLURM_NODEID]}" -- "$@"
    ) || status=$?
    # the first node to fail leaves its code for the job: the others fail because of it
    ((status == 0)) || (set -o noclobber && printf '%s\n' "$status" >"$logs/exit_code") 2>/dev/null || true
    return "$status"
}
