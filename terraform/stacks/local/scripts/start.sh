#!/usr/bin/env bash
# Starts hosts that were stopped (this machine rebooted). usage: start.sh HOST...
# Terraform's state does not see a host that was removed by hand: those are named, with what to do.
source "$(dirname "$0")/common.sh"
need_podman

gone=()
for host in "$@"; do
  if ! podman container exists "$host"; then
    gone+=("$host")
  elif [ "$(podman container inspect "$host" --format '{{.State.Running}}')" != true ]; then
    podman start "$host" >/dev/null
  fi
done
((${#gone[@]} == 0)) || fail "no such host: ${gone[*]}. Remedy: terraform apply$(printf " -replace='terraform_data.host[\"%s\"]'" "${gone[@]}")"
