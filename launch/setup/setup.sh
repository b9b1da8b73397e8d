#!/bin/sh
# Make .venv and install the project into it, once: `setup.sh demo` what runs it, `setup.sh dev` what tests it too.
#
# .venv/installed says what was installed, from where and by which pyproject.toml and constraints.txt; while it is
# true a call costs a fraction of a second. A pip that was killed leaves .venv/installing, and the next call starts anew:
# half a package may look installed to pip.
set -u
extra="$1"
cd "$(dirname "$0")/../.." || exit 1
log=.venv/setup.log

fail() {
    echo "set-up: $1" >&2
    exit 1
}

wanted_state() {
    pwd
    cksum pyproject.toml constraints.txt
    echo "$1"
}

installed() {
    .venv/bin/python -c "" 2>/dev/null || return 1
    for level in "$@"; do
        [ "$(cat .venv/installed 2>/dev/null)" = "$(wanted_state "$level")" ] && return 0
    done
    return 1
}

# A killed set-up cannot stop its pip; a second one must not clear the folder under it.
refuse_if_running() {
    other=$(cat .venv/installing 2>/dev/null) || return 0
    if [ -n "$other" ] && ps -p "$other" -o args= 2>/dev/null | grep -q "pip install"; then
        fail "another installation into .venv is running (process $other); wait for it or end it, then start again"
    fi
}

# Not one that was made elsewhere and moved here, holds another Python or was left half installed.
usable_environment() {
    [ ! -e .venv/installing ] || return 1
    [ ! -e .venv/installed ] || [ "$(head -n 1 .venv/installed)" = "$(pwd)" ] || return 1
    .venv/bin/python -c 'import sys, pip; raise SystemExit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

make_environment() {
    python=$(sh launch/setup/find_python.sh) || exit 1
    echo "set-up: making .venv with $python"
    output=$("$python" -m venv --clear .venv 2>&1) || fail "$python -m venv --clear .venv failed: $output"
}

# pip's own output goes to the log; its last line and the seconds show that it moves (without a terminal, now and then).
watch_install() {
    started=$(date +%s)
    shown=""
    while kill -0 "$1" 2>/dev/null; do
        sleep 1
        seconds=$(($(date +%s) - started))
        line=$(tail -n 1 "$log" | tr '\r\t' '  ' | cut -c 1-90)
        if [ -t 1 ]; then
            printf '\r\033[K  %4d s  %s' "$seconds" "$line"
        elif [ $((seconds % 30)) -eq 0 ] || { [ "$line" != "$shown" ] && [ $((seconds % 10)) -eq 0 ]; }; then
            printf '  %4d s  %s\n' "$seconds" "$line"
            shown="$line"
        fi
    done
    [ -t 1 ] && printf '\r\033[K'
    echo "set-up: pip ended after $(($(date +%s) - started)) s"
}

install_project() {
    case "$extra" in
        demo) requirement="." ;;
        dev) requirement=".[dev]" ;;
        *) fail "unknown extra '$extra': demo or dev" ;;
    esac
    echo "set-up: installing $requirement with the versions of constraints.txt (some minutes the first time; 6 GB on Linux)"
    rm -f .venv/installed
    : >"$log"
    .venv/bin/python -m pip install --progress-bar off -c constraints.txt -e "$requirement" >>"$log" 2>&1 &
    pip=$!
    echo "$pip" >.venv/installing
    trap 'kill "$pip" 2>/dev/null; wait "$pip"; echo "set-up: stopped"; exit 130' INT TERM HUP
    watch_install "$pip"
    wait "$pip"
    status=$?
    trap - INT TERM HUP
    [ "$status" -gt 128 ] || rm -f .venv/installing
    if [ "$status" -ne 0 ]; then
        reason=$(grep -i "error" "$log" | tail -n 1)
        fail "pip install failed (exit status $status): ${reason:-see the log}; the whole log: $log"
    fi
    wanted_state "$extra" >.venv/installed.tmp
    mv .venv/installed.tmp .venv/installed
}

case "$extra" in
    demo) installed demo dev && exit 0 ;;
    *) installed "$extra" && exit 0 ;;
esac
refuse_if_running
usable_environment || make_environment
install_project
