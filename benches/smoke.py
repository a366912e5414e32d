#!/usr/bin/env python3
"""A short benchmark for CI: the plugin must not fall below 0.7 of plain TCP, measured in the same run.

Usage: benches/smoke.py target/release/towline

Runs `towline send-recv --compare`, which measures the plugin and plain sockets in turn, and compares the medians of
their bandwidth at each size. A size that falls short is measured again, up to twice: on a machine that is shared with
others a single run says little. Needs python3, standard library only.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

# Bytes: one message of the short path, one that is cut, one that fills several windows.
SIZES = [32 << 10, 256 << 10, 2 << 20, 16 << 20]
LEAST = 0.7
ATTEMPTS = 3


def ratios(report):
    """Bandwidth of the plugin over that of plain TCP, by size."""
    found = {}
    for row in report["results"]:
        ours, raw = (statistics.median(row[way]["bandwidth_gbs"]) for way in ("plugin", "raw_tcp"))
        found[row["size"]] = (ours / raw, ours, raw)
    return found


def measure(program, size):
    """One run at one size."""
    with tempfile.TemporaryDirectory() as directory:
        file = os.path.join(directory, "report.json")
        sizes = ["-b", str(size), "-e", str(size), "-f", "2"]
        command = [program, "send-recv", "--compare", *sizes, "--repetitions", "7", "--timeout", "20", "--json", file]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}")
        with open(file, encoding="utf-8") as report:
            return ratios(json.load(report))[size]


def main(program):
    short = []
    print(f"{'size (B)':>12} {'attempt':>8} {'plugin (GB/s)':>14} {'plain TCP (GB/s)':>17} {'ratio':>6}")
    for size in SIZES:
        for attempt in range(1, ATTEMPTS + 1):
            ratio, ours, raw = measure(program, size)
            print(f"{size:>12} {attempt:>8} {ours:>14.2f} {raw:>17.2f} {ratio:>6.2f}", flush=True)
            if ratio >= LEAST:
                break
        else:
            short.append(size)
    if short:
        sys.exit(f"below {LEAST} of plain TCP in {ATTEMPTS} attempts: {', '.join(map(str, short))} B")
    print(f"at least {LEAST} of plain TCP at every size")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
