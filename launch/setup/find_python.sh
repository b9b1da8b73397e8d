#!/bin/sh
# Print the path of a Python that the project runs on and that can make a virtual environment.
#
# Looked at in this order, by running each one (a pyenv shim may exist and fail): $PYTHON, then for 3.12 and then 3.13
# whatever PATH, pyenv and uv have. Prints nothing and says what to install when there is none; exit status 1.

# accepts PYTHON "VERSIONS": it runs, is one of the versions and has the usual (not free-threaded) build.
accepts() {
    "$1" - "$2" >/dev/null 2>&1 <<'END'
import sys, sysconfig
version = f"{sys.version_info.major}.{sys.version_info.minor}"
free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
raise SystemExit(version not in sys.argv[1].split() or bool(free_threaded))
END
}

can_make_environments() {
    "$1" -c "import ensurepip, venv" >/dev/null 2>&1
}

offer() {
    accepts "$1" "$2" || return 0
    if can_make_environments "$1"; then
        "$1" -c "import sys; print(sys._base_executable)"
        exit 0
    fi
    without_ensurepip="$1"
}

offer_from_path() {
    for name in "python$1" python3 python; do
        command -v "$name" >/dev/null 2>&1 && offer "$name" "$1"
    done
}

# The newest patch release first: 3.12.10 before 3.12.9.
offer_from_pyenv() {
    versions="${PYENV_ROOT:-${HOME:-}/.pyenv}/versions"
    [ -d "$versions" ] || return 0
    for version in $(ls "$versions" | grep "^$1" | sort -t . -k 3,3nr); do
        offer "$versions/$version/bin/python" "$1"
    done
}

offer_from_uv() {
    if command -v uv >/dev/null 2>&1; then
        found=$(uv python find "$1" 2>/dev/null) && offer "$found" "$1"
    fi
    for folder in "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}"/cpython-"$1"*; do
        [ -x "$folder/bin/python$1" ] && offer "$folder/bin/python$1" "$1"
    done
}

without_ensurepip=""
if [ -n "${PYTHON:-}" ]; then
    offer "$PYTHON" "3.12 3.13"
else
    for minor in 3.12 3.13; do
        offer_from_path "$minor"
        offer_from_pyenv "$minor"
        offer_from_uv "$minor"
    done
fi

if [ -n "$without_ensurepip" ]; then
    version=$("$without_ensurepip" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "set-up: $without_ensurepip (Python $version) cannot make a virtual environment: its ensurepip is missing." >&2
    echo "        On Debian and Ubuntu: apt install python$version-venv, then run the same command again." >&2
elif [ -n "${PYTHON:-}" ]; then
    echo "set-up: PYTHON=$PYTHON is not a working Python 3.12 or 3.13." >&2
else
    echo "set-up: no working Python 3.12 or 3.13 on PATH, in pyenv's or in uv's folder (megatron-core has no other)." >&2
    echo "        Install one, then run the same command again; any of these will do:" >&2
    echo "          uv python install 3.12      pyenv install 3.12      brew install python@3.12" >&2
    echo "          apt install python3.12 python3.12-venv" >&2
    echo "        Or name one that lies elsewhere: make demo PYTHON=/path/to/python3.12" >&2
fi
exit 1
