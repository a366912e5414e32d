"""The work of recovery_price.sh; what it measures stands there."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from statistics import median

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "benches"))

from nccl import stats  # noqa: E402
from nccl.table import parse_size, show_size  # noqa: E402

BOUND = 1.03
# Messages, or all-reduces, of one measurement by size: about half a second for a whole run on two cores.
COUNTS = {"send-recv": (20000, 1 << 30), "all-reduce": (4000, 1 << 29)}
REPETITIONS = 5


def count_for(work, size):
    """How many of that size make a measurement: bounded by their number where they are short, by bytes where not."""
    number, total = COUNTS[work]
    # A short message costs about as much as 16 KiB.
    return max(2, min(number, total // (REPETITIONS * max(size, 16 << 10))))


def run(given, work, size, recovery):
    """One run: its times in µs by name, and its processor time in seconds."""
    count = max(2, int(count_for(work, size) * given.scale))
    words = [given.towline, work, "-b", str(size), "-e", str(size), "-n", str(count)]
    if work == "send-recv":
        words += ["--repetitions", str(REPETITIONS)]
    else:
        words += ["-w", str(max(2, count // 10))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TOWLINE_", "NCCL_"))}
    environment |= {"TOWLINE_RECOVERY": recovery, "NCCL_SOCKET_IFNAME": f"={given.interface}"}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        before = os.times()
        done = subprocess.run([*words, "--json", file.name], env=environment, capture_output=True, text=True, timeout=600)
        after = os.times()
        if done.returncode != 0:
            sys.exit(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")
        result = json.load(open(file.name))["results"][0]
    processor = after.children_user - before.children_user + after.children_system - before.children_system
    if work == "all-reduce":
        return {"all-reduce": result["out_of_place"]["time_us"]}, processor
    plugin = result["plugin"]
    pick = min if given.best > 1 else median
    return {
        "bandwidth": pick([1e6 / rate for rate in plugin["messages_per_s"]]),
        "latency": pick(plugin["latency_us"]),
    }, processor


def measure(given, work, size):
    """All blocks of a size: a row for each time, and for the processor."""
    times = {}
    for block in range(given.blocks):
        for recovery in ("10" if block % 2 else "01") * given.best:
            named, processor = run(given, work, size, recovery)
            for name, value in {**named, "processor": processor}.items():
                by_block = times.setdefault(name, {}).setdefault(recovery, {})
                by_block[block] = min(value, by_block.get(block, value))
    rows = []
    for name, by_way in times.items():
        ratio = stats.paired_ratio(by_way["1"], by_way["0"])
        middle = {way: median(values.values()) for way, values in by_way.items()}
        row = {"work": work, "what": name, "size": size, "on": middle["1"], "off": middle["0"]}
        rows.append(row | {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "blocks": ratio.samples})
    return rows


def show(row):
    unit = "s" if row["what"] == "processor" else "µs"
    dear = " **above the bound**" if unit == "µs" and row["high"] > BOUND else ""
    what = row["what"] if row["work"] == row["what"] else f"{row['work']}, {row['what']}"
    times = " | ".join(f"{row[way]:.3g} {unit}" for way in ("on", "off"))
    print(
        f"| {show_size(row['size'])} | {what} | {times} | {row['ratio']:.3f} | {row['low']:.3f} – {row['high']:.3f}{dear} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description="The price of recovery: see recovery_price.sh")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--scale", type=float, default=1.0, help="how many messages, compared with the usual number")
    parser.add_argument("--best", type=int, default=1, metavar="R", help="the best of R runs in each block, for a busy host")
    parser.add_argument("--only", choices=list(COUNTS))
    parser.add_argument("--sizes", default="8,32K,1M,64M")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--towline", default=os.path.join(ROOT, "target", "release", "towline"))
    parser.add_argument("--json", help="write the rows to this file, too")
    given = parser.parse_args()
    rows = []
    print("| size | what | recovery on | off | on / off | 95 % interval |\n|---|---|---|---|---|---|", flush=True)
    for work in [given.only] if given.only else COUNTS:
        for size in map(parse_size, given.sizes.split(",")):
            for row in measure(given, work, size):
                show(row)
                rows.append(row)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)
    sys.exit(any(row["high"] > BOUND for row in rows if row["what"] != "processor"))


main()
