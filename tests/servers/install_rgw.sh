#!/usr/bin/env bash
# Installs what tests/servers/rgw.py runs: Ceph's S3 gateway and its daemons, from Debian (61 MB, no service is
# started). Does nothing where it is there already. Exits 1 with the reason where it cannot.
set -euo pipefail
source "$(dirname "$0")/debian.sh"

is_there() { command -v radosgw && command -v radosgw-admin && command -v ceph-mon && command -v ceph-osd && command -v ceph; }
is_there > /dev/null && exit 0
from_debian "tests of a real S3 server" radosgw ceph-mon ceph-osd ceph-common
