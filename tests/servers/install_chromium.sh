#!/usr/bin/env bash
# Installs the browser that tests/explore/test_browser.py drives: Chromium, from Debian or Ubuntu. Does nothing
# where it is there already. Exits 1 with the reason where it cannot.
set -euo pipefail
lock_seconds=120 # another apt may be at work

command -v chromium > /dev/null && exit 0
give_up() { echo "install_chromium.sh: $1; tests in a browser are skipped without chromium" >&2; exit 1; }

command -v apt-get > /dev/null || give_up "no apt-get on this machine"
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo > /dev/null || give_up "neither root nor sudo"
  as_root=(sudo)
fi
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=$lock_seconds "$@"; }
# The package lists of a fresh machine are empty, those of an old one name files that are gone.
apt install --no-install-recommends chromium && exit 0
apt update || give_up "apt-get update failed"
apt install --no-install-recommends chromium || give_up "apt-get install failed"
