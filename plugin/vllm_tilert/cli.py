"""`tilertctl`: the command of the data plane. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from vllm_tilert import __version__, verify
from vllm_tilert.decode import config as decode_config


def _make_small_model(arguments: argparse.Namespace) -> int:
    from vllm_tilert.small_model import make_small_model

    try:
        print(make_small_model(arguments.directory))
    except OSError as error:
        print(f"tilertctl make-small-model: {error}", file=sys.stderr)
        return 1
    return 0


def _decode(arguments: argparse.Namespace) -> int:
    from vllm_tilert.decode import server

    return server.run(arguments)


def parser() -> argparse.ArgumentParser:
    """The whole command line; importing no more than the standard library."""
    top = argparse.ArgumentParser(prog="tilertctl", description=__doc__)
    top.add_argument("--version", action="version", version=f"tilertctl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    small = commands.add_parser("make-small-model", help="write the small model of the local cluster")
    small.add_argument("directory", metavar="DIR")
    small.set_defaults(run=_make_small_model)

    node = commands.add_parser("decode", help="run a decode node")
    decode_config.add_arguments(node)
    node.set_defaults(run=_decode)

    check = commands.add_parser("verify", help="compare answers through the ingress with vLLM's own tokens")
    verify.add_arguments(check)
    check.set_defaults(run=verify.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    arguments = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
