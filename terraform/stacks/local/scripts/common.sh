# shellcheck shell=bash
# What the scripts share: strict mode, one way to fail, podman or a clear word about it.
set -euo pipefail

fail() {
  echo "${0##*/}: $*" >&2
  exit 1
}

need_podman() {
  command -v podman >/dev/null || fail "podman is not installed. Remedy: run bin/demo, which installs it."
  # shellcheck source=terraform/stacks/local/scripts/podman-env.sh
  source "$(dirname "${BASH_SOURCE[0]}")/podman-env.sh"
}
