#!/usr/bin/env bash
# Creates or destroys the cluster's podman network. ACTION=create|destroy NETWORK=name SUBNET=a.b.c.0/24
source "$(dirname "$0")/common.sh"
: "${ACTION:?create or destroy}" "${NETWORK:?name of the network}"

case $ACTION in
  create)
    need_podman
    : "${SUBNET:?private IPv4 network}"
    if podman network exists "$NETWORK"; then
      has=$(podman network inspect "$NETWORK" --format '{{range .Subnets}}{{.Subnet}}{{end}}')
      [ "$has" = "$SUBNET" ] && exit 0
      fail "network '$NETWORK' exists with subnet $has, not $SUBNET. Remedy: bin/demo --destroy, or give the stack another name."
    fi
    if ! error=$(podman network create --subnet "$SUBNET" "$NETWORK" 2>&1 >/dev/null); then
      fail "cannot create network '$NETWORK' ($SUBNET): $error. Remedy: if the subnet is in use, set the variable subnet to a free private one."
    fi
    ;;
  destroy)
    # No podman, no network.
    command -v podman >/dev/null || exit 0
    need_podman
    ! podman network exists "$NETWORK" || podman network rm -f "$NETWORK" >/dev/null
    ;;
  *) fail "ACTION=$ACTION: use create or destroy" ;;
esac
