#!/usr/bin/env bash
# Train one stage on every node of a SLURM job until STAGE_COMPLETE, over as many attempts (requeues) as it takes.
#
# Exit status: 0 only when the stage is complete; 2 wrong input; 3 numerical stop; 75 stopped before its end;
# 1 anything else. A job that depends on this one with afterok therefore starts only after a complete stage.
%%{sbatch}

# Settings are meant literally, dollars and tildes too:
# shellcheck disable=SC2016,SC2088
set -euo pipefail

# ---- settings
%%{settings}
# ---- end of settings

attempt=${SLURM_RESTART_COUNT:-0}
log_folder=$stage_folder/logs/$SLURM_JOB_ID-restart-$attempt
attempts_file=$stage_folder/job/attempts

say() {
    printf '%(%F %T)T launch: %s\n' -1 "$*"
}

# The step that the next attempt would go on from.
newest_step() {
    local latest=step-0
    if [[ -r $stage_folder/checkpoints/latest ]]; then
        latest=$(<"$stage_folder/checkpoints/latest")
    fi
    if [[ $latest =~ ^step-([0-9]{1,18})$ ]]; then
        echo "$((10#${BASH_REMATCH[1]}))"
    else
        echo 0
    fi
}

# How many attempts of this job began at this step: those that a lost node or a preemption ended count as well.
attempts_from() {
    local job step count=0
    while read -r job _ step; do
        if [[ $job == "$SLURM_JOB_ID" && $step == "$1" ]]; then
            count=$((count + 1))
        fi
    done <"$attempts_file"
    echo "$count"
}

if [[ -e $stage_folder/STAGE_COMPLETE ]]; then
    say "$stage_folder is complete already"
    exit 0
fi
mkdir -p "$stage_folder/job"
touch "$attempts_file"
first_step=$(newest_step)
if ((attempt > max_requeues)); then
    say "giving up: requeued $attempt times, at most $max_requeues are allowed (max_requeues)"
    exit 1
fi
if (($(attempts_from "$first_step") >= 3)); then
    say "giving up: three attempts began at step $first_step and none got further; see $stage_folder/logs"
    exit 1
fi
echo "$SLURM_JOB_ID $attempt $first_step" >>"$attempts_file"
mkdir -p "$log_folder"

# The head node is the one with SLURM_NODEID 0. Ports below 32768 are not given out to clients.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#nodes[@]} != SLURM_JOB_NUM_NODES)); then
    say "scontrol names ${#nodes[@]} of the job's $SLURM_JOB_NUM_NODES nodes"
    exit 1
fi
head_node=${nodes[0]}
port=$((20000 + SLURM_JOB_ID % 12000))
say "attempt $attempt from step $first_step: ${nodes[*]}; head $head_node:$port; logs in $log_folder"

export PALIMPSA_STOP_FILE=$log_folder/STOP
export PYTHONUNBUFFERED=1
# Kernel caches on a network file system are raced for by the nodes.
export TRITON_CACHE_DIR=/tmp/megatron-palimpsa-$UID-$SLURM_JOB_ID/triton

near_limit=false
terminated=false
# Called by the traps alone:
# shellcheck disable=SC2317,SC2329
save_before_the_limit() {
    near_limit=true
    say "the time limit is near: the ranks save and stop"
    touch "$PALIMPSA_STOP_FILE"
}
# scancel and preemption: the first must not be requeued, the second is requeued by SLURM.
# shellcheck disable=SC2317,SC2329
save_before_the_end() {
    terminated=true
    say "told to end: the ranks save and stop"
    touch "$PALIMPSA_STOP_FILE"
}
trap save_before_the_limit USR1
trap save_before_the_end TERM

cd "$working_folder"
# In the background, because a trap runs only while the shell waits. $SLURM_NODEID is for each node's shell to fill in.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
    --kill-on-bad-exit=1 --wait=60 "${srun_options[@]}" \
    "${enter[@]}" bash -c 'exec "$1" -m torch.distributed.run --node-rank="$SLURM_NODEID" "${@:2}"' node "$python" \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$processes_per_node" --max-restarts=0 \
    --master-addr="$head_node" --master-port="$port" --rdzv-conf=timeout=600 \
    -m palimpsa_launch.rank "$log_folder" "${command[@]}" &
step=$!
while true; do
    status=0
    wait "$step" || status=$?
    # A trap ends `wait` too.
    if ! kill -0 "$step" 2>/dev/null; then
        break
    fi
done

if [[ -e $stage_folder/STAGE_COMPLETE ]]; then
    say "the stage is complete"
    exit 0
fi
# torchrun ends with 1 whatever its ranks end with; each leaves its own exit code beside its log.
codes=" $(cat "$log_folder"/rank-*.exit 2>/dev/null | tr '\n' ' ' || true)"
last_step=$(newest_step)
say "stopped at step $last_step; srun ended with $status, the ranks with:${codes:- }"
for code in 3 2; do
    if [[ $codes == *" $code "* ]]; then
        say "not requeued: exit code $code (3 numerical stop, 2 wrong input); see $log_folder/rank-*.log"
        exit "$code"
    fi
done
if [[ $terminated == true ]]; then
    say "not requeued from here: it was told to end"
    exit 75
fi
if ((last_step <= first_step)); then
    say "not requeued: no step was gained since step $first_step; see $log_folder/rank-*.log"
    exit 1
fi
if ((attempt >= max_requeues)); then
    say "not requeued: it was $attempt times already (max_requeues)"
    exit 1
fi
say "requeued (time limit near: $near_limit)"
trap - USR1 TERM
scontrol requeue "$SLURM_JOB_ID"
# SLURM ends this shell; whatever happens, the job must not look complete.
sleep 60 &
wait $! || true
exit 75
