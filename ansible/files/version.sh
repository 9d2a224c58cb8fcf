#!/bin/sh
# The way back from an upgrade: what a service ran with is kept, and changes places with what it runs with now.
#   version.sh keep   VENV DIR FILE...   copy stamp and files to DIR.new
#   version.sh settle VENV DIR FILE...   the upgrade is good: DIR.new becomes DIR, unless nothing has changed
#   version.sh undo   VENV DIR FILE...   the upgrade is not: DIR.new and the environment at VENV.old come back
#   version.sh swap   VENV DIR FILE...   roll back: DIR and VENV.old change places with what is there (twice: forward again)
# Prints "changed" when it changed what the service runs with. VENV.old is what role python_venv leaves behind.
set -eu
action=$1 venv=$2 dir=$3
shift 3

keep() { # keep DIR FILE...: DIR is there whole or not at all
  to=$1; shift
  rm -rf "$to" "$to.part"
  mkdir -m 0700 "$to.part"
  [ ! -e "$venv/.stamp" ] || cp -p "$venv/.stamp" "$to.part/stamp"
  for file; do [ ! -e "$file" ] || cp -p "$file" "$to.part/"; done
  mv "$to.part" "$to"
}

differs() { # differs DIR FILE...: whether the service now runs with something else
  from=$1; shift
  cmp -s "$venv/.stamp" "$from/stamp" || return 0
  for file; do
    if [ -e "$file" ] || [ -e "$from/$(basename "$file")" ]; then cmp -s "$file" "$from/$(basename "$file")" || return 0; fi
  done
  return 1
}

must_have() { # must_have DIR: the environment that DIR's files belong to is still there
  if ! cmp -s "$venv/.stamp" "$1/stamp" && ! cmp -s "$venv.old/.stamp" "$1/stamp"; then
    echo "$venv.old is not the environment that $1 belongs to; install the former version by its lock file and wheel" >&2
    exit 4
  fi
}

put_back() { # put_back DIR FILE...
  from=$1; shift
  if ! cmp -s "$venv/.stamp" "$from/stamp"; then
    rm -rf "$venv.undone"
    [ ! -e "$venv" ] || mv "$venv" "$venv.undone"
    mv "$venv.old" "$venv"
    [ ! -e "$venv.undone" ] || mv "$venv.undone" "$venv.old"
  fi
  for file; do
    if [ -e "$from/$(basename "$file")" ]; then cp -p "$from/$(basename "$file")" "$file"; else rm -f "$file"; fi
  done
}

case $action in
  # An upgrade that was cut off has kept the version to go back to; what runs now is half of the new one.
  keep) [ -d "$dir.new" ] || keep "$dir.new" "$@" ;;
  settle)
    if differs "$dir.new" "$@"; then rm -rf "$dir"; mv "$dir.new" "$dir"; else rm -rf "$dir.new"; fi ;;
  undo)
    [ -d "$dir.new" ] || { echo "there is no $dir.new: nothing was kept" >&2; exit 3; }
    must_have "$dir.new"
    if differs "$dir.new" "$@"; then put_back "$dir.new" "$@"; echo changed; fi
    rm -rf "$dir.new" ;;
  swap)
    [ -d "$dir" ] || { echo "there is no $dir: no upgrade has left a former version here" >&2; exit 3; }
    must_have "$dir"
    if differs "$dir" "$@"; then
      keep "$dir.new" "$@"
      put_back "$dir" "$@"
      rm -rf "$dir"
      mv "$dir.new" "$dir"
      echo changed
    fi ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
