#!/usr/bin/env bash
# Installs what tests/servers/slurm.py runs: Slurm's daemons and munge, from Debian (no service is started). Does
# nothing where they are there already. Exits 1 with the reason where it cannot.
set -euo pipefail
packages=(slurmctld slurmd slurm-client munge)
lock_seconds=120 # another apt may be at work

is_there() { command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; }
is_there > /dev/null && exit 0
give_up() { echo "install_slurm.sh: $1; tests of a Slurm cluster are skipped without ${packages[*]}" >&2; exit 1; }

command -v apt-get > /dev/null || give_up "no apt-get on this machine"
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo > /dev/null || give_up "neither root nor sudo"
  as_root=(sudo)
fi
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=$lock_seconds "$@"; }
# The package lists of a fresh machine are empty, those of an old one name files that are gone.
apt install --no-install-recommends "${packages[@]}" && exit 0
apt update || give_up "apt-get update failed"
apt install --no-install-recommends "${packages[@]}" || give_up "apt-get install failed"
