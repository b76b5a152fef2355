#!/usr/bin/env bash
# Installs what tests/servers/slurm.py runs: Slurm's daemons and munge, from Debian (no service is started). Does
# nothing where they are there already. Exits 1 with the reason where it cannot.
set -euo pipefail
source "$(dirname "$0")/debian.sh"

is_there() { command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; }
is_there > /dev/null && exit 0
from_debian "tests of a Slurm cluster" slurmctld slurmd slurm-client munge
