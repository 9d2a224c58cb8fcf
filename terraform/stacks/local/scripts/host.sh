#!/usr/bin/env bash
# Boots or removes one host: a container that runs systemd.
# ACTION=create|destroy HOST=name; for create NETWORK ADDRESS IMAGE WHEELHOUSE MODELS SHM_SIZE
# CPU_SHARES, and MEMORY, PUBLISH or empty.
source "$(dirname "$0")/common.sh"
: "${ACTION:?create or destroy}" "${HOST:?name of the host}"
boot_timeout_s=60

create() {
  need_podman
  podman image exists "$IMAGE" || fail "image '$IMAGE' is missing. Remedy: run bin/demo, or terraform/stacks/local/scripts/build-image.sh and set the variable image to what it prints."
  for dir in "$WHEELHOUSE" "$MODELS"; do
    [ -d "$dir" ] || fail "folder '$dir' is missing. Remedy: run bin/demo, or set the variables wheelhouse_dir and models_dir."
  done

  # A container of this name is a left-over of an apply that was cut short: the state knows nothing of it.
  podman rm -f -t 2 "$HOST" >/dev/null 2>&1 || true
  args=(--name "$HOST" --hostname "$HOST" --network "$NETWORK" --ip "$ADDRESS" --shm-size "$SHM_SIZE" --cpu-shares "$CPU_SHARES"
    --systemd=always --privileged --stop-timeout 10
    --volume "$WHEELHOUSE:/srv/wheelhouse:ro" --volume "$MODELS:/srv/models:ro")
  [ -z "${MEMORY:-}" ] || args+=(--memory "$MEMORY")
  [ -z "${PUBLISH:-}" ] || args+=(--publish "$PUBLISH")
  if ! error=$(podman run -d "${args[@]}" "$IMAGE" /lib/systemd/systemd 2>&1 >/dev/null); then
    podman rm -f -t 0 "$HOST" >/dev/null 2>&1 || true
    fail "cannot start host '$HOST': $error"
  fi

  # "degraded" is up as well: a unit that a container cannot run does not keep the host from serving.
  deadline=$((SECONDS + boot_timeout_s))
  until state=$(podman exec "$HOST" systemctl is-system-running 2>/dev/null) || [ "$state" = degraded ]; do
    if ((SECONDS >= deadline)); then
      podman logs --tail 20 "$HOST" >&2 || true
      podman rm -f -t 0 "$HOST" >/dev/null 2>&1 || true
      fail "host '$HOST' did not boot within $boot_timeout_s s (systemd: ${state:-no answer}); its last log lines are above."
    fi
    sleep 0.5
  done
}

case $ACTION in
  create) create ;;
  destroy)
    command -v podman >/dev/null || exit 0
    need_podman
    # Removed, with the anonymous volumes it made.
    ! podman container exists "$HOST" || podman rm -f -v -t 5 "$HOST" >/dev/null
    ;;
  *) fail "ACTION=$ACTION: use create or destroy" ;;
esac
