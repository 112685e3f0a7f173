#!/bin/bash
# Make .venv with a Python >= 3.11 and install headrace into it, editable, with what development needs.
#
# usage: setup-venv.sh FOLDER     PYTHON=/path/to/python chooses the Python
set -euo pipefail

folder=${1:?usage: setup-venv.sh FOLDER}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        if recent "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup-venv: no Python >= 3.11 found. Install one (Debian 12 or later: apt-get install python3 python3-venv;" >&2
    echo "macOS: brew install python), or name it: make PYTHON=/path/to/python ..." >&2
    return 1
}

# Debian ships Python without what makes environments.
ensure_venv_module() {
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 && return
    local version
    version=$("$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "setup-venv: installing $version-venv"
        apt-get -qq update
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$version-venv" >/dev/null && return
    fi
    echo "setup-venv: $1 can't make environments. On Debian: sudo apt-get install $version-venv" >&2
    return 1
}

if ! recent "$folder/bin/python" || ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    ensure_venv_module "$python"
    echo "setup-venv: making $folder with $python"
    "$python" -m venv --clear "$folder"
fi
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
