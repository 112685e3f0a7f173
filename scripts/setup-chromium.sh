#!/bin/bash
# See to a Chromium and its driver for the page's tests, from Debian's packages where they may be installed
# without asking; else say what to do. Never fails: without a browser those tests are skipped, and say so.
set -uo pipefail

packages=(chromium chromium-driver)
apt_timeout_s=600

found() {
    command -v chromedriver >/dev/null &&
        { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null
}

install() {
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || return 1
        as_root=(sudo -n)
    fi
    command -v apt-get >/dev/null || return 1
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout "$apt_timeout_s" apt-get -qq)
    "${apt[@]}" install -y --no-install-recommends "${packages[@]}" >/dev/null 2>&1 ||
        { "${apt[@]}" update >/dev/null 2>&1 &&
            "${apt[@]}" install -y --no-install-recommends "${packages[@]}" >/dev/null; }
}

found && exit 0
echo "setup-chromium: no Chromium with a driver here; trying to install ${packages[*]}"
if install && found; then
    echo "setup-chromium: installed ${packages[*]}"
else
    echo "setup-chromium: going on without; the tests of the page will be skipped. To change that:" >&2
    echo "    sudo apt-get install ${packages[*]}      (macOS: brew install --cask chromium chromedriver)" >&2
fi
exit 0
