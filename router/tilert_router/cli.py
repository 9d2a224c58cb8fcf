"""`tilert-router`: serve, and check a configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tilert_router.config import ConfigError, load, reference_markdown
from tilert_router.fields import table_markdown
from tilert_router.parsing import load_parsing


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status: 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="tilert-router", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("serve", "run a router"), ("check", "check a configuration and the files it names")):
        commands.add_parser(name, help=text).add_argument("config", type=Path, metavar="CONFIG.yaml")
    commands.add_parser("fields", help="print what becomes of each request field")
    commands.add_parser("keys", help="print every key of the configuration with its default")
    arguments = parser.parse_args(argv)
    if arguments.command == "fields":
        print(table_markdown(), end="")
        return 0
    if arguments.command == "keys":
        print(reference_markdown(), end="")
        return 0
    try:
        config = load(arguments.config)
        if config.keys_file:
            from tilert_router.keys import Keys

            Keys(config.keys_file)
        if arguments.command == "check":
            load_parsing(config.model)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.command == "check":
        print(f"{arguments.config}: good")
        return 0

    import uvloop

    from tilert_router.serve import serve, set_up_logging

    set_up_logging(config.logs.level)
    try:
        uvloop.run(serve(arguments.config, config))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
