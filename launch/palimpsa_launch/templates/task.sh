#!/usr/bin/env bash
# Run one command on one node, or one task of an array, over as many attempts (requeues) as it takes.
#
# Exit status: 0 when the command has come to its end; 2 wrong input; 75 stopped before its end; 1 anything else.
%%{sbatch}

# Settings are meant literally, dollars and tildes too:
# shellcheck disable=SC2016,SC2088
set -euo pipefail

# ---- settings
%%{settings}
# ---- end of settings

attempt=${SLURM_RESTART_COUNT:-0}
job=$SLURM_JOB_ID
if [[ -n $tasks ]]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    command+=(--shard "$SLURM_ARRAY_TASK_ID/$tasks")
fi
failures_file=$stage_folder/job/failures-of-$job

%%{slurm}

# In the job's log, or else the last line there.
last_error() {
    local said
    said=$(tail -c 100000 "$stage_folder/logs/job-$job.log" | tr '\r' '\n' | grep -avE '^ *$|^srun: | launch: ' || true)
    { grep -a 'rror: ' <<<"$said" || cat <<<"$said"; } | tail -n 1 | cut -c -500
}

if ((attempt > max_requeues)); then
    say "giving up: requeued $attempt times, at most $max_requeues are allowed (max_requeues)"
    exit 1
fi
say "attempt $attempt on $SLURM_JOB_NODELIST, folder $stage_folder: $python and ${command[*]}"
export PYTHONUNBUFFERED=1

near_limit=false
# Called by the traps alone:
# shellcheck disable=SC2317,SC2329
end_step() {
    say "told to end: $1"
    kill -TERM "$step" 2>/dev/null || true
}
trap 'near_limit=true; end_step limit' USR1
trap 'terminated=true; end_step cancelled' TERM

cd "$working_folder"
# In the background, because a trap runs only while the shell waits.
srun --nodes=1 --ntasks=1 --cpu-bind=none "${srun_options[@]}" "${enter[@]}" "${command[@]}" &
step=$!
while true; do
    status=0
    wait "$step" || status=$?
    # A trap ends `wait` too.
    if ! kill -0 "$step" 2>/dev/null; then
        break
    fi
done

if ((status == 0)); then
    if [[ -n $marker ]]; then
        touch "$marker"
    fi
    rm -f "$failures_file"
    say "done"
    exit 0
fi
say "ended with $status"
if ((status == 2)); then
    say "not requeued: exit code 2 (wrong input)"
    exit 2
fi
stop_unless_running "$job"
if [[ $near_limit == true ]]; then
    rm -f "$failures_file"
# SIGTERM comes before a preemption; what has killed a task of an array leaves the shards that it had made.
elif ((status != 143)) && [[ -z $tasks || $status -lt 128 ]]; then
    mkdir -p "$stage_folder/job"
    echo "$attempt" >>"$failures_file"
    if (($(wc -l <"$failures_file") >= 3)); then
        say "not requeued: it failed three times, now with $status: $(last_error)"
        exit 1
    fi
fi
if ((attempt >= max_requeues)); then
    say "not requeued: it was $attempt times already (max_requeues)"
    exit 1
fi
say "requeued"
requeue "$job"
