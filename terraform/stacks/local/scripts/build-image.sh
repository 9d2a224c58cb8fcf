#!/usr/bin/env bash
# Builds the image of the local cluster's hosts (systemd, Python, the libraries the transports load) and prints its name.
#
#   build-image.sh                      debootstrap of this machine's own release; needs a package mirror, no container registry
#   build-image.sh --base-image IMAGE   on a public Debian or Ubuntu image; needs a container registry
#   build-image.sh --rootfs DIR         from a tree that is bootstrapped already (an air-gapped site)
#   build-image.sh --name               only prints the name the image has or would have
#
# The name carries the hash of everything that goes in; an image that exists is not built again.
# The release is this machine's, so that hosts run the Python for which the machine's wheelhouse was filled.
# TILERT_MIRROR names another package mirror than debootstrap's own.
source "$(dirname "$0")/common.sh"

repository=localhost/tilert-host
base_image="" rootfs="" name_only=""
while (($#)); do
  case $1 in
    --base-image) base_image=${2:?IMAGE} && shift 2 ;;
    --rootfs) rootfs=${2:?DIR} && shift 2 ;;
    --name) name_only=1 && shift ;;
    *) fail "unknown argument '$1'. See the head of this script." ;;
  esac
done

# shellcheck source=/dev/null
. /etc/os-release
packages=(systemd systemd-sysv dbus python3 python3-venv python3-apt sudo iproute2 ca-certificates openssh-server procps curl
  nftables libibverbs1 libnuma1 nginx-light prometheus-node-exporter)
case $ID:$VERSION_CODENAME in
  debian:bookworm) packages+=(librdmacm1 libcurl4) components=main ;;
  # The libraries whose time_t grew have new names, and debootstrap does not follow Provides.
  debian:*) packages+=(librdmacm1t64 libcurl4t64) components=main ;;
  ubuntu:jammy) packages+=(librdmacm1 libcurl4) components=main,universe ;;
  ubuntu:*) packages+=(librdmacm1t64 libcurl4t64) components=main,universe ;;
  *) fail "cannot build hosts from $ID ${VERSION_CODENAME:-}. Remedy: --base-image debian:bookworm, or --rootfs." ;;
esac

# Services of the image stay off: the roles turn on what a host is to run.
finish=$(
  cat <<'SH'
set -eu
# By the tree's own systemctl: the machine that builds may have none.
root=${1:-/}
off() { chroot "$root" systemctl --quiet "$@"; }
off disable nginx.service prometheus-node-exporter.service ssh.service nftables.service
off mask apt-daily.timer apt-daily-upgrade.timer systemd-networkd-wait-online.service getty.target console-getty.service
# Each host makes its own identity at its first boot.
: >"$1/etc/machine-id"
rm -rf "$1"/etc/ssh/ssh_host_* "$1"/var/cache/apt/archives/*.deb "$1"/var/log/*.log
SH
)

hash=$(printf '%s\n' "$ID" "$VERSION_CODENAME" "$components" "$base_image" "${packages[@]}" "$finish" | sha256sum | cut -c1-12)
image=$repository:$hash
if [ -n "$name_only" ]; then
  echo "$image"
  exit 0
fi

if [ -n "$rootfs" ]; then
  missing=$(comm -23 <(printf '%s\n' "${packages[@]}" | sort) \
    <(sed -n 's/^Package: //p' "$rootfs/var/lib/dpkg/status" 2>/dev/null | sort) | paste -sd,)
  [ -z "$missing" ] || fail "'$rootfs' lacks $missing. Remedy: debootstrap it with --include=$(IFS=, && echo "${packages[*]}")."
fi

need_podman
if podman image exists "$image"; then
  echo "$image"
  exit 0
fi

[ "$(id -u)" = 0 ] || fail "building the image needs root. Remedy: run it with sudo."
work=$(mktemp -d "${TMPDIR:-/var/tmp}/tilert-image.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

import() { # TREE
  bash -c "$finish" finish "$1"
  tar -C "$1" --exclude=./proc/* --exclude=./sys/* --exclude=./dev/* -c . |
    podman import --change 'CMD ["/lib/systemd/systemd"]' --change 'STOPSIGNAL SIGRTMIN+3' - "$image" >/dev/null
}

if [ -n "$base_image" ]; then
  printf '%s' "$finish" >"$work/finish.sh"
  cat >"$work/Containerfile" <<EOC
FROM $base_image
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install -y --no-install-recommends ${packages[*]} && rm -rf /var/lib/apt/lists/*
COPY finish.sh /tmp/finish.sh
RUN sh /tmp/finish.sh "" && rm /tmp/finish.sh
STOPSIGNAL SIGRTMIN+3
CMD ["/lib/systemd/systemd"]
EOC
  podman build -q -t "$image" "$work" >/dev/null || fail "podman could not build on '$base_image'. Remedy: without a container registry leave --base-image out."
elif [ -n "$rootfs" ]; then
  cp -a --reflink=auto "$rootfs" "$work/rootfs"
  import "$work/rootfs"
else
  command -v debootstrap >/dev/null || fail "debootstrap is not installed. Remedy: run bin/demo, which installs it."
  state=${TILERT_STATE_DIR:-$(cd "$(dirname "$0")/../../../.." && pwd)/.local}
  mkdir -p "$state/debootstrap"
  echo "build-image: bootstrapping $ID $VERSION_CODENAME, a few minutes" >&2
  debootstrap --variant=minbase --components="$components" --cache-dir="$state/debootstrap" \
    --include="$(IFS=, && echo "${packages[*]}")" "$VERSION_CODENAME" "$work/rootfs" ${TILERT_MIRROR:+"$TILERT_MIRROR"} >"$state/debootstrap.log" 2>&1 || {
    tail -n 20 "$state/debootstrap.log" >&2
    fail "debootstrap failed; its last lines are above, all of them in $state/debootstrap.log. Remedy: if the mirror cannot be reached, name one in TILERT_MIRROR."
  }
  import "$work/rootfs"
fi
echo "$image"
