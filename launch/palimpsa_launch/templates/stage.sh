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
excluded_file=$stage_folder/job/excluded-by-$SLURM_JOB_ID
holder_file=$stage_folder/job/holder

%%{slurm}

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

# One job trains into the folder; one that is gone holds nothing. Rank 0 locks the folder too, where the file system can.
take_folder() {
    local other
    if (set -o noclobber && echo "$SLURM_JOB_ID" >"$holder_file") 2>/dev/null; then
        return
    fi
    other=$(<"$holder_file")
    if [[ $other =~ ^[0-9]+$ && $other != "$SLURM_JOB_ID" ]]; then
        ask_state "$other"
        if [[ -z $state ]]; then
            say "refused: SLURM has not answered for minutes whether job $other still trains into $stage_folder;" \
                "submit again once it does"
            exit 75
        fi
        if [[ $state =~ ^(RUNNING|COMPLETING|SUSPENDED)$ ]]; then
            say "refused: job $other trains into $stage_folder"
            exit 2
        fi
    fi
    echo "$SLURM_JOB_ID" >"$holder_file.$SLURM_JOB_ID"
    mv -f "$holder_file.$SLURM_JOB_ID" "$holder_file"
}

# Ports below 32768 are not given out to clients. Each job tries in an order of its own, from $1 on in steps of two; what
# any program uses on this node, the head node, is left out.
free_port() {
    local port try hex
    for ((try = $1; try < 2000; try += 2)); do
        port=$((20000 + (2 * SLURM_JOB_ID + 7919 * (try / 2) + $1) % 12000))
        printf -v hex '%04X' "$port"
        if ! grep -qsE "^ *[0-9]+: [0-9A-F]+:$hex " /proc/net/tcp /proc/net/tcp6; then
            echo "$port"
            return
        fi
    done
    say "no port is free on $head_node" >&2
    return 1
}

# SLURM takes a new list of nodes to stay away from once the job has stopped running and before it starts again: while
# this shell lives on after the requeue, which is not for long.
requeue_elsewhere() {
    local list try
    list=$(paste -sd, "$excluded_file")
    trap 'terminated=true' TERM
    ask_requeue "$SLURM_JOB_ID"
    trap '' TERM
    for try in 1 2 3; do
        if scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${exclude:+$exclude,}$list"; then
            break
        fi
        say "SLURM has not taken the list of nodes to exclude (try $try)"
        sleep 1
    done
    exit 75
}

if [[ -e $stage_folder/STAGE_COMPLETE ]]; then
    say "$stage_folder is complete already"
    exit 0
fi
mkdir -p "$stage_folder/job"
take_folder
touch "$attempts_file" "$excluded_file"
first_step=$(newest_step)
if ((attempt > max_requeues)); then
    say "giving up: requeued $attempt times, at most $max_requeues are allowed (max_requeues)"
    exit 1
fi
if (($(attempts_from "$first_step") >= 3)); then
    say "giving up: three attempts began at step $first_step and none got further; see $stage_folder/logs"
    exit 1
fi
mkdir -p "$log_folder"

# The head node is the first of the list; on it this script runs. Each node finds its own place in the list.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#nodes[@]} != SLURM_JOB_NUM_NODES)); then
    say "scontrol names ${#nodes[@]} of the job's $SLURM_JOB_NUM_NODES nodes"
    exit 1
fi
head_node=${nodes[0]}
port=$(free_port 0)
check_port=$(free_port 1)
say "attempt $attempt from step $first_step: ${nodes[*]}; head $head_node:$port; logs in $log_folder"

export PALIMPSA_STOP_FILE=$log_folder/STOP
# Where collectives time out, what each rank was waiting for.
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$log_folder/collectives-of-rank-

near_limit=false
# Called by the traps alone:
# shellcheck disable=SC2317,SC2329
save_before_the_limit() {
    near_limit=true
    say "the time limit is near: the ranks save and stop"
    touch "$PALIMPSA_STOP_FILE"
}
# scancel, and `megatron-palimpsa cancel`, which sends this shell alone a signal. In the grace time before a preemption
# SLURM sends it to the ranks alone, and requeues only a job that has not ended when the time is over.
# shellcheck disable=SC2317,SC2329
save_before_the_end() {
    terminated=true
    say "told to end: the ranks save and stop"
    touch "$PALIMPSA_STOP_FILE"
}
trap save_before_the_limit USR1
trap save_before_the_end TERM

within=()
# One task a node, in the container if there is one; instead of this shell.
on_every_node() {
    exec "${within[@]}" srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=1 --wait=60 "${srun_options[@]}" "${enter[@]}" "$python" -m "$@"
}

cd "$working_folder"
echo "$SLURM_JOB_ID $attempt $first_step" >>"$attempts_file"
# In the background, because a trap runs only while the shell waits.
on_every_node palimpsa_launch.node --nodes="${nodes[*]}" --port="$port" --check-port="$check_port" \
    --processes="$processes_per_node" --gpus="$gpus_per_node" --stage-folder="$stage_folder" --logs="$log_folder" \
    --local-folder="$local_folder" --preflight="$preflight" -- "${command[@]}" &
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
# torchrun says little of what its ranks end with; each leaves its own exit code beside its log.
codes=" $(cat "$log_folder"/rank-*.exit 2>/dev/null | tr '\n' ' ' || true)"
if ((status)); then
    # Nodes whose part was killed have left what they compiled. SLURM may take a lost part for one that still runs: this
    # step shares the nodes with it, and ends after a minute, or when a signal ends `wait`.
    within=(timeout --kill-after=10 60)
    srun_options+=(--overlap)
    SLURM_TIMELIMIT=1 on_every_node palimpsa_launch.node_folder "$local_folder" 2>/dev/null &
    wait $! || kill $! 2>/dev/null || true
fi
last_step=$(newest_step)
say "stopped at step $last_step; srun ended with $status, the ranks with:${codes:- }"
if grep -qs '^Timeout (' "$log_folder"/rank-*.log; then
    say "it hung: the watchdog ended the ranks (train.watchdog_seconds); their stacks are in $log_folder/rank-*.log"
fi
for code in 3 2; do
    if [[ $codes == *" $code "* ]]; then
        say "not requeued: exit code $code (3 numerical stop, 2 wrong input); see $log_folder/rank-*.log"
        exit "$code"
    fi
done
stop_unless_running "$SLURM_JOB_ID"
if ((attempt >= max_requeues)); then
    say "not requeued: it was $attempt times already (max_requeues)"
    exit 1
fi
if [[ -s $log_folder/bad-nodes ]]; then
    cat "$log_folder/bad-nodes" >>"$excluded_file"
    if (($(wc -l <"$excluded_file") > max_excluded)); then
        say "not requeued: more than $max_excluded nodes were bad (preflight.max_excluded): $(paste -sd' ' "$excluded_file")"
        exit 1
    fi
    # It says nothing of the stage.
    sed -i '$d' "$attempts_file"
    say "requeued without $(paste -sd' ' "$log_folder/bad-nodes")"
    requeue_elsewhere
fi
if ((last_step <= first_step)) && (($(attempts_from "$first_step") >= 3)); then
    say "not requeued: no step was gained since step $first_step in three attempts; see $log_folder/rank-*.log"
    exit 1
fi
say "requeued (time limit near: $near_limit)"
requeue "$SLURM_JOB_ID"
