"""The program `towline` of this wheel."""

import os
import sys


def main():
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "towline")
    try:
        os.execv(program, [program, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"towline: {program} does not start: {error}")


if __name__ == "__main__":
    main()
