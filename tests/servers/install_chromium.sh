#!/usr/bin/env bash
# Installs the browser that tests/explore/test_browser.py drives: Chromium, from Debian or Ubuntu. Does nothing
# where it is there already. Exits 1 with the reason where it cannot.
set -euo pipefail
source "$(dirname "$0")/debian.sh"

command -v chromium > /dev/null && exit 0
from_debian "tests in a browser" chromium
