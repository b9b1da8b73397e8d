say() {
    printf '%(%F %T)T launch: %s\n' -1 "$*"
}

# Whether this script was told to end; its traps say so.
terminated=false

# In the background, because a trap runs only while the shell waits.
pause() {
    sleep 10 >/dev/null 2>&1 &
    wait $! || true
}

# What a job is, as `state`: RUNNING and the like, GONE where SLURM has forgotten it; "" where SLURM, whose controller may
# be away for a while, does not answer for minutes.
ask_state() {
    local try answer
    state=
    for ((try = 1; try <= 30; try++)); do
        if answer=$(squeue --noheader --states=all --jobs="$1" --format=%T 2>&1); then
            state=GONE
            if [[ $answer =~ (^|$'\n')([A-Z_]+)($|$'\n') ]]; then
                state=${BASH_REMATCH[2]}
            fi
            return
        fi
        if [[ $answer == *"Invalid job id"* ]]; then
            state=GONE
            return
        fi
        say "SLURM does not say what job $1 is (try $try): ${answer##*$'\n'}"
        pause
        if [[ $terminated == true ]]; then
            return
        fi
    done
}

# Ends the script where it must not ask for a requeue: a cancelled job would come back.
stop_unless_running() {
    if [[ $terminated == false ]]; then
        ask_state "$1"
    fi
    if [[ $terminated == true ]]; then
        say "not requeued from here: it was told to end"
        exit 75
    fi
    if [[ -z $state ]]; then
        say "not requeued: SLURM has not answered for minutes whether the job is still to run"
        exit 75
    fi
    if [[ $state != RUNNING ]]; then
        say "not requeued from here: the job is $state"
        exit 75
    fi
}

# SLURM ends all processes of a job that it requeues; scontrol has to live until it knows.
ask_requeue() {
    local try
    trap '' USR1
    for ((try = 1; try <= 30; try++)); do
        if (trap '' TERM && exec scontrol requeue "$1"); then
            return
        fi
        say "SLURM has not taken the requeue (try $try)"
        pause
        stop_unless_running "$1"
    done
    say "not requeued: SLURM has not taken it for minutes"
    exit 1
}

# SLURM ends this shell; whatever happens, the job must not look complete.
requeue() {
    trap - TERM
    ask_requeue "$1"
    sleep 60 &
    wait $! || true
    exit 75
}
