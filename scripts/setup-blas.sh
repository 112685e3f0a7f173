#!/bin/bash
# Linux only: see to a tuned BLAS, without which mlx on a CPU is many times slower (see pool/blas.py).
# Installs Debian's OpenBLAS where it may do so without asking; else says what to do. Never fails.
#
# usage: setup-blas.sh [PYTHON]     PYTHON: the Python in which headrace is installed
set -uo pipefail

python=${1:-.venv/bin/python}
package=libopenblas0-pthread
apt_timeout_s=300

found() { "$python" -c 'import sys; from headrace.pool.blas import describe; sys.exit(describe().missing)'; }

install() {
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || return 1
        as_root=(sudo -n)
    fi
    command -v apt-get >/dev/null || return 1
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout "$apt_timeout_s" apt-get -qq)
    "${apt[@]}" install -y --no-install-recommends "$package" >/dev/null 2>&1 ||
        { "${apt[@]}" update >/dev/null 2>&1 &&
            "${apt[@]}" install -y --no-install-recommends "$package" >/dev/null; }
}

[ "$(uname -s)" = Linux ] || exit 0
found && exit 0
echo "setup-blas: no tuned BLAS here; trying to install $package"
if install && found; then
    echo "setup-blas: installed $package"
else
    echo "setup-blas: going on without. On a CPU mlx will be many times slower; to change that:" >&2
    echo "    sudo apt-get install $package      (Fedora: sudo dnf install openblas-threads)" >&2
fi
exit 0
