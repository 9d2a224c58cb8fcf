# Shared by bin/*: progress, system packages, environments, wheelhouse, small model. Sourced, not run.
# Everything made here lies in .local/ and .venv*/ (git-ignored), keyed by a hash of what it is made from.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
LOCAL=${TILERT_STATE_DIR:-$ROOT/.local}
WHEELHOUSE=$LOCAL/wheelhouse
MODEL_DIR=$LOCAL/models/small
STACK=$ROOT/terraform/stacks/local
OPS=$ROOT/.venv-ops
mkdir -p "$LOCAL"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# step TITLE COMMAND...: one line a step, with its time; a long one says where it is. The command's output goes to a log,
# whose end is shown on failure.
step() {
  local title=$1 start=$SECONDS log rc watcher; shift
  log=$LOCAL/logs/$(tr -c 'a-z0-9\n' '-' <<<"${title,,}").log
  mkdir -p "$LOCAL/logs"
  printf '  %-46s ' "$title" >&2
  : >"$log"
  _watch "$log" &
  watcher=$!
  # Not inside `if`: there bash would ignore `set -e` in the command's functions.
  set +e
  (set -e; "$@") >"$log" 2>&1
  rc=$?
  kill $watcher; wait $watcher 2>/dev/null
  set -e
  if [ $((SECONDS - start)) -ge 20 ]; then printf '\n  %-46s ' "$title" >&2; fi
  if [ $rc = 0 ]; then
    printf 'ok %4ds\n' $((SECONDS - start)) >&2
  else
    printf 'FAILED after %ds; the end of %s:\n' $((SECONDS - start)) "$log" >&2
    tail -n 40 "$log" >&2
  fi
  return $rc
}
# The task that Ansible is at, or the last line written.
_watch() {
  local start=$SECONDS line
  while sleep 20 >/dev/null 2>&1; do
    kill -0 $$ 2>/dev/null || return 0
    line=$(grep -aE '^(PLAY|TASK|RUNNING HANDLER) ' "$1" | tail -n 1 | tr -d '*') || line=$(grep -av '^ *$' "$1" | tail -n 1) || line=
    printf '\n    %4ds  %.100s' $((SECONDS - start)) "$line" >&2
  done
}

hash_of() { cat "$@" | sha256sum | cut -c1-16; }

# once NAME HASH COMMAND...: run the command unless it has succeeded with this hash before.
once() {
  local stamp=$LOCAL/stamps/$1 hash=$2; shift 2
  mkdir -p "$LOCAL/stamps"
  [ "$(cat "$stamp" 2>/dev/null || true)" = "$hash" ] && return 0
  "$@"
  echo "$hash" >"$stamp"
}

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

python_bin() {
  local p
  for p in ${PYTHON:-} python3.11 python3.12 python3; do
    if command -v "$p" >/dev/null && "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$p"; return
    fi
  done
  die "no Python >= 3.11 with venv; install python3 and python3-venv, or set PYTHON"
}

# apt_install PACKAGE...: install what is missing, touching apt only then.
apt_install() {
  local missing=() p
  # A name may be one that another package provides (libcurl4t64 is Ubuntu 24.04's libcurl4).
  local have; have=$(dpkg-query -W -f '${db:Status-Abbrev}${Package} ${Provides}\n' | sed -n 's/^ii //p' | tr -s ' ,' '\n')
  for p in "$@"; do grep -qxF "$p" <<<"$have" || missing+=("$p"); done
  [ ${#missing[@]} = 0 ] && return 0
  command -v apt-get >/dev/null || die "missing packages: ${missing[*]}; this system has no apt-get, install them by hand"
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

TRANSPORT_LIBS=(libibverbs1 librdmacm1 libnuma1 libcurl4)   # what Mooncake's wheel links against
CLUSTER_PACKAGES=(podman runc netavark aardvark-dns debootstrap iptables nftables catatonit git)

# promtool checks the rules that are rendered. Debian's package starts a server: only its program is taken.
promtool_program() { command -v promtool >/dev/null || once promtool 1 _promtool; }
_promtool() {
  rm -rf "$LOCAL/tools"; mkdir -p "$LOCAL/tools"
  as_root apt-get update -qq
  (cd "$LOCAL/tools" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb)
}

# The cluster's hosts are containers, which need namespaces of their own.
can_have_hosts() { as_root unshare --mount --net --pid --fork true 2>/dev/null; }

# make_venv DIR LOCK: a virtual environment holding exactly the lock file's packages.
make_venv() {
  local dir=$1 lock=$2
  once "$(basename "$dir")" "$(hash_of "$lock")-$dir" _fill_venv "$dir" "$lock"
}
_fill_venv() {
  "$(python_bin)" -m venv --clear "$1"
  "$1/bin/pip" install --quiet --disable-pip-version-check --no-deps $(torch_index "$1/bin/pip" "$2") -r "$2"
}

# PyPI's torch is the CUDA build, gigabytes with what it needs; PyTorch's own index, or a mirror of it, has the CPU build.
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
# torch_index PIP LOCK: the option without which pip would not find the CPU build of the lock's torch, if there is one.
torch_index() {
  local torch; torch=$(grep -x 'torch==.*' "$2") || return 0
  "$1" install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps --report - "$torch" 2>/dev/null |
    grep -q '"version": ".*+cpu"' || echo "--extra-index-url=$TORCH_CPU_INDEX"
}

ops_venv() { make_venv "$OPS" "$ROOT/requirements/ops.txt"; }
# By itself: checkov pins what Ansible needs otherwise.
checkov_venv() { make_venv "$ROOT/.venv-checkov" "$ROOT/requirements/checkov.txt"; }
test_venv() {
  make_venv "$ROOT/.venv" "$ROOT/requirements/test.txt"
  once test-editable "$(hash_of "$ROOT/pyproject.toml")-$ROOT" "$ROOT/.venv/bin/pip" install --quiet --disable-pip-version-check \
    --no-deps --no-build-isolation -e "$ROOT"
}

HOST_LOCKS=("$ROOT"/requirements/{prefill-cpu,decode-reference,router}.txt)

# wheelhouse: every wheel the cluster's hosts install, and our own. Hosts never reach an index.
wheelhouse() {
  local lock
  mkdir -p "$WHEELHOUSE"
  for lock in "${HOST_LOCKS[@]}"; do
    once "wheels-$(basename "$lock" .txt)" "$(hash_of "$lock")-$WHEELHOUSE" \
      wheels_of "$lock"
  done
  once wheel-own "$(own_hash)" own_wheel
}
wheels_of() { # LOCK
  "$OPS/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --find-links "$WHEELHOUSE" $(torch_index "$OPS/bin/pip" "$1") \
    -w "$WHEELHOUSE" -r "$1"
}
own_hash() { cd "$ROOT"; find plugin router pyproject.toml -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*' | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-16; }
own_wheel() {
  # Built in a copy: setuptools leaves build folders beside the source.
  local tmp; tmp=$(mktemp -d)
  cp -r "$ROOT"/{plugin,router,pyproject.toml,README.md,LICENSE} "$tmp"
  "$OPS/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$tmp/out" "$tmp"
  rm -f "$WHEELHOUSE"/vllm_tilert-*.whl
  mv "$tmp"/out/vllm_tilert-*.whl "$WHEELHOUSE"/
  rm -rf "$tmp"
}

# small_model: the few-megabyte DeepSeek-V3-type model of the local cluster.
small_model() {
  make_venv "$LOCAL/venv-model" "$ROOT/requirements/decode-reference.txt"
  once small-model "$(hash_of "$ROOT/plugin/vllm_tilert/small_model.py")-$MODEL_DIR" _small_model
}
_small_model() {
  rm -rf "$MODEL_DIR"; mkdir -p "$(dirname "$MODEL_DIR")"
  PYTHONPATH=$ROOT/plugin "$LOCAL/venv-model/bin/python" -m vllm_tilert.cli make-small-model "$MODEL_DIR"
}

tf() { "$ROOT/bin/terraform" -chdir="$STACK" "$@"; }

# ---- the local cluster -------------------------------------------------------------------------------------------

host_image() { "$STACK/scripts/build-image.sh" >"$LOCAL/host-image"; }
remove_images() {
  [ -s "$LOCAL/host-image" ] || return 0
  . "$STACK/scripts/podman-env.sh"
  podman image rm --force "$(cat "$LOCAL/host-image")"
}

# What the stack is told on this machine; by hand one would write it into terraform.tfvars.
write_tfvars() {
  local file=$STACK/demo.auto.tfvars.json new
  new=$(printf '{"image": "%s", "wheelhouse_dir": "%s", "models_dir": "%s"}' "$(cat "$LOCAL/host-image")" "$WHEELHOUSE" "$LOCAL/models")
  [ "$(cat "$file" 2>/dev/null)" = "$new" ] || printf '%s' "$new" >"$file"
}
cluster_hosts() { tf output -json nodes | "$OPS/bin/python" -c 'import json, sys; print(*json.load(sys.stdin))'; }
cluster_apply() {
  write_tfvars
  tf init -input=false -no-color
  tf apply -input=false -no-color -auto-approve
  # Terraform does not see that this machine was rebooted.
  "$STACK/scripts/start.sh" $(cluster_hosts)
}
cluster_destroy() {
  tf destroy -input=false -no-color -auto-approve
  rm -f "$STACK/demo.auto.tfvars.json"
}

# playbook ARGS...: ansible-playbook on the local cluster's inventory.
playbook() {
  (cd "$ROOT/ansible" && . "$STACK/scripts/podman-env.sh" && PATH="$OPS/bin:$PATH" "$OPS/bin/ansible-playbook" -i ../inventory/local "$@")
}
cluster_deploy() { playbook site.yml "$@"; }
cluster_verify() { playbook smoke.yml "$@"; }
