# For `source` by the install scripts beside it: `from_debian SKIPPED PACKAGE…` installs packages without starting
# services. SKIPPED says which tests are skipped without them, for the reason that ends the script where it cannot.
from_debian() {
  local skipped=$1 lock_seconds=120 # another apt may be at work
  local packages=("${@:2}") as_root=()
  give_up() { echo "$(basename "$0"): $1; $skipped are skipped without ${packages[*]}" >&2; exit 1; }
  command -v apt-get > /dev/null || give_up "no apt-get on this machine"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo > /dev/null || give_up "neither root nor sudo"
    as_root=(sudo)
  fi
  apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=$lock_seconds "$@"; }
  # The package lists of a fresh machine are empty, those of an old one name files that are gone.
  apt install --no-install-recommends "${packages[@]}" && return
  apt update || give_up "apt-get update failed"
  apt install --no-install-recommends "${packages[@]}" || give_up "apt-get install failed"
}
