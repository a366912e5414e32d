#!/usr/bin/env python3
"""Makes the sample in README.md: what the first command prints.

    benches/readme.py PROGRAM          measures and writes the sample: each row is the fastest of twenty runs
    benches/readme.py --check PROGRAM  fails when PROGRAM prints other columns, sizes or closing lines than the sample shows

PROGRAM is target/release/towline. The sample stands between the two comments that name this script. Nothing but Python's
standard library is needed.
"""

import os
import re
import subprocess
import sys

README = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "README.md")
BEGIN, END = "<!-- sample: benches/readme.py -->\n", "<!-- end of sample -->"
RUNS = 20
# Of eleven sizes, the smallest, a middle one and the largest.
SHOWN = ["8", "32768", "8388608"]


def sample(said):
    """The lines to show of what the program printed, without the columns that are the same in every row."""
    lines = [line for line in said.splitlines() if re.match(r"#? +(size|\(B\)) ", line) or line.split()[:1] and line.split()[0] in SHOWN]
    count = lines[0].index("count") + len("count")
    first, places = lines[0].index("time"), [match.end() for match in re.finditer("#wrong", lines[0])]
    # From the blank before a column of times to the end of its group.
    width = places[0] - first
    cut = [(line[:count] + line[first - 6 : places[0]] + line[places[1] - width - 6 : places[1]]).rstrip() for line in lines]
    return cut + [line for line in said.splitlines() if line.startswith("# Out of bounds")]


def time(line):
    """The sum of a row's two times; 0 for what is no row."""
    cells = line.split()
    return 0 if line.startswith("#") else float(cells[2]) + float(cells[6])


def shape(lines):
    """The same without figures that are measured."""
    return [re.sub(r" +\d+\.\d+", " N", line) for line in lines]


def run(program):
    said = subprocess.run([program, "all-reduce"], stdout=subprocess.PIPE, check=True, text=True).stdout
    return sample(said)


def main(arguments):
    check = arguments[:1] == ["--check"]
    if len(arguments) != 1 + check:
        sys.exit(__doc__)
    program = arguments[-1]
    with open(README, encoding="utf-8") as file:
        before, rest = file.read().split(BEGIN)
    shown, after = rest.split(END)
    if check:
        old = [line for line in shown.strip().splitlines() if line != "```"]
        if shape(old) != shape(run(program)):
            sys.exit("readme.py: README.md shows other lines than the program prints: make the sample again, benches/readme.py PROGRAM")
        return
    best = [min(lines, key=time) for lines in zip(*(run(program) for _ in range(RUNS)))]
    with open(README, "w", encoding="utf-8") as file:
        file.write(before + BEGIN + "```\n" + "\n".join(best) + "\n```\n" + END + after)
    print("\n".join(best))


if __name__ == "__main__":
    main(sys.argv[1:])
