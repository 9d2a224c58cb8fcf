# shellcheck shell=bash
# Lets podman run on this machine. Source it; or run it to see the setting as NAME=VALUE (nothing: podman's own defaults do).
#
# podman's defaults are right on an ordinary cgroup v2 host. Two things break them, and are detected here:
#   cgroup v1 or hybrid      crun refuses it ("cgroups in hybrid mode not supported"): use runc, and cgroupfs without systemd
#   no CAP_SYS_RESOURCE      the default ulimits cannot be raised ("setrlimit ... Operation not permitted"): stay within ours
# A CONTAINERS_CONF that is set already is left alone.

_tilert_podman_env() {
  local state conf text="" nofile nproc
  [ -z "${CONTAINERS_CONF:-}" ] || return 0
  state=${TILERT_STATE_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)/.local}

  # Bit 24 of the effective set is CAP_SYS_RESOURCE.
  if (((0x$(awk '/^CapEff:/ {print $2}' /proc/self/status) >> 24 & 1) == 0)); then
    nofile=$(ulimit -Hn) nproc=$(ulimit -Hu)
    [ "$nofile" != unlimited ] || nofile=1048576
    [ "$nproc" != unlimited ] || nproc=1048576
    ((nproc < 32768)) || nproc=32768
    text+="[containers]"$'\n'"default_ulimits = [\"nofile=$nofile:$nofile\", \"nproc=$nproc:$nproc\"]"$'\n'
  fi
  if [ "$(stat -fc %T /sys/fs/cgroup)" != cgroup2fs ]; then
    if ! command -v runc >/dev/null; then
      echo "podman-env: this machine has cgroup v1 or hybrid, where containers need runc, and runc is missing. Remedy: run bin/demo, or install the package runc." >&2
      return 1
    fi
    text+="[engine]"$'\n'"runtime = \"runc\""$'\n'"cgroup_manager = \"cgroupfs\""$'\n'"events_logger = \"file\""$'\n'
    text+="[network]"$'\n'"network_backend = \"netavark\""$'\n'
  fi
  [ -n "$text" ] || return 0

  conf=$state/containers.conf
  mkdir -p "$state"
  # Replaced as a whole: hosts are made side by side and each of them comes through here.
  if [ "$(cat "$conf" 2>/dev/null)" != "${text%$'\n'}" ]; then
    printf '%s' "$text" >"$conf.$$" && mv "$conf.$$" "$conf"
  fi
  export CONTAINERS_CONF=$conf
}

_tilert_podman_env || { [ "${BASH_SOURCE[0]}" = "$0" ] && exit 1; return 1; }
unset -f _tilert_podman_env
if [ "${BASH_SOURCE[0]}" = "$0" ] && [ -n "${CONTAINERS_CONF:-}" ]; then
  echo "CONTAINERS_CONF=$CONTAINERS_CONF"
fi
