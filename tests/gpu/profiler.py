"""Network events and the built-in profiler under real NCCL; `profiler.sh --help` says how to run it.

Three parts: what NCCL's example profiler shows of Towline's events; whether Towline's own profiler accounts for every
byte and leaves trace, summary and metrics; and what it costs. Exit status 1 when something does not hold.
"""

import argparse
import glob
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches", "nccl"))

import stats  # noqa: E402
import table  # noqa: E402

COLLECTIVES = ("all_reduce", "sendrecv", "alltoall")

# All of the example's events but ProxyCtrl and KernelCh.
EXAMPLE_MASK = 4095 & ~(1 << 5) & ~(1 << 6)

# What is compared in the third part. The first row is the measure of the others.
LEVELS = (
    ("off", {"TOWLINE_NET_EVENTS": "off"}),
    ("nobody listens", {}),
    ("NetPlugin only", {"TOWLINE_PROFILE": "summary", "TOWLINE_PROFILE_EVENTS": "NetPlugin"}),
    ("everything", {"TOWLINE_PROFILE": "all"}),
    # What NCCL and the profiler cost while the transport is silent, so that what the transport adds is known.
    ("NetPlugin only, silent", {"TOWLINE_PROFILE": "summary", "TOWLINE_PROFILE_EVENTS": "NetPlugin", "TOWLINE_NET_EVENTS": "off"}),
    ("everything, silent", {"TOWLINE_PROFILE": "all", "TOWLINE_NET_EVENTS": "off"}),
)
# What the third part measures unless --bands says otherwise: two sizes in each of two runs, FIRST:LAST:FACTOR:ITERATIONS.
BANDS = "8:128K:16384:400,16M:256M:16:12"
# NCCL's example profiler keeps so many events of one transfer, and so many transfers of one operation.
MOST_EVENTS = 8
MOST_STEPS = 1024


class Example:
    """What NCCL's example profiler wrote of one rank: its operations with their transfers and network events.

    The file is nearly JSON, with a line for each begin and end in the order of nesting, so it is read by lines.
    """

    LINE = re.compile(r'"name": "([^"]*)", "cat": "([A-Z_]+)", "ph": "([be])"')

    def __init__(self, text):
        self.operations = []
        steps = None
        for line in text.splitlines():
            found = self.LINE.search(line)
            if not found:
                continue
            name, category, phase = found.groups()
            if name in ("ProgressSend", "ProgressRecv") and phase == "b":
                told = re.search(r'"transSize": (\d+)', line)
                steps = []
                self.operations.append((name, int(told.group(1)), steps))
            elif name in ("ProgressSend", "ProgressRecv"):
                steps = None
            elif name in ("SendWait", "RecvWait") and category == "NET" and phase == "b" and steps is not None:
                steps.append([])
            elif category in ("NET_SOCK", "NET_IB") and phase == "b":
                length = int(re.search(r'"size": (\d+)', line).group(1))
                operation = re.search(r'"op": (\d+)', line)
                if not steps:
                    raise ValueError("a network event stands outside of a transfer")
                steps[-1].append((length, operation and int(operation.group(1))))

    def faults(self):
        """What does not hold, as sentences."""
        faults = []
        for name, told, steps in self.operations:
            total = sum(length for step in steps for length, _ in step)
            if len(steps) < MOST_STEPS and total != told:
                faults.append(f"{name} of {told} bytes has network events of {total} bytes")
            direction = 0 if name == "ProgressSend" else 1
            for step in steps:
                if not step:
                    faults.append(f"{name}: a transfer without a network event")
                if len(step) > MOST_EVENTS:
                    faults.append(f"{name}: {len(step)} network events of one transfer")
                if any(operation not in (None, direction) for _, operation in step):
                    faults.append(f"{name}: a network event of the other direction")
        return faults

    def counts(self):
        """(operations, transfers, network events, bytes)."""
        steps = [step for _, _, steps in self.operations for step in steps]
        events = [event for step in steps for event in step]
        return len(self.operations), len(steps), len(events), sum(length for length, _ in events)


class Bench:
    """Runs nccl-tests with the environment that forces traffic onto Towline."""

    def __init__(self, args):
        self.args = args
        base = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TOWLINE_"))}
        paths = [os.path.abspath(args.towline), args.nccl, base.get("LD_LIBRARY_PATH")]
        base["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        base.update(NCCL_NET="Towline", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_NVLS_ENABLE="0")
        base["NCCL_SOCKET_IFNAME"] = args.interface
        self.base = base

    def run(self, name, collective, first, last, factor, iterations, variables, checks=0):
        """One run; returns its rows, or raises RuntimeError with the end of its output."""
        binary = os.path.join(self.args.tests, f"{collective}_perf")
        given = ["-b", first, "-e", last, "-f", factor, "-n", iterations, "-w", 2, "-c", checks, "-g", self.args.gpus]
        log = os.path.join(self.args.out, f"{name}.log")
        with open(os.path.join(self.args.out, f"{name}.txt"), "w+", encoding="utf-8", errors="replace") as out:
            environment = {**self.base, **variables, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": log}
            command = [binary, *(str(word) for word in given)]
            try:
                status = subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                    timeout=self.args.limit, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = "none: it hung"
            out.seek(0)
            text = out.read()
        with open(log, encoding="utf-8", errors="replace") as said:
            network = "NET/Towline" in said.read()
        if status != 0 or not table.finished(text):
            raise RuntimeError(f"{name}: exit status {status}\n" + "\n".join(text.splitlines()[-8:]))
        if not network:
            raise RuntimeError(f"{name}: NCCL did not use Towline, see {log}")
        rows = table.parse(text)
        if checks and any(row.total_wrong() for row in rows):
            raise RuntimeError(f"{name}: wrong data")
        return rows


def example_part(bench):
    """NCCL's own profiler shows our events under its transfers."""
    faults = []
    for collective in COLLECTIVES:
        name = f"example-{collective}"
        dump = os.path.join(bench.args.out, name)
        for old in glob.glob(dump + "_*.json"):
            os.remove(old)
        pools = {f"NCCL_PROFILE_{what}_POOL_SIZE": "48" for what in ("GROUP_API", "COLL_API", "P2P_API", "COLL", "P2P")}
        variables = {
            "NCCL_PROFILER_PLUGIN": os.path.abspath(bench.args.example),
            "NCCL_PROFILE_EVENT_MASK": str(EXAMPLE_MASK),
            "NCCL_PROFILE_DUMP_FILE": dump,
            **pools,
        }
        try:
            bench.run(name, collective, 1 << 10, 16 << 20, 128, 2, variables, checks=1)
        except RuntimeError as problem:
            faults.append(str(problem))
            continue
        files = sorted(glob.glob(dump + "_*.json"))
        if len(files) != bench.args.gpus:
            faults.append(f"{name}: {len(files)} files for {bench.args.gpus} ranks")
        # With both ranks in one process the example keeps the transfers of all of them in one of its files.
        transfers = 0
        for path in files:
            with open(path, encoding="utf-8", errors="replace") as file:
                example = Example(file.read())
            operations, steps, events, total = example.counts()
            transfers += steps
            print(f"  {os.path.basename(path)}: {operations} ProxyOps, {steps} ProxySteps, {events} NetPlugin events, {total} bytes")
            faults.extend(f"{os.path.basename(path)}: {fault}" for fault in example.faults()[:5])
            if os.path.getsize(path) > 8 << 20:
                os.remove(path)
        if not transfers:
            faults.append(f"{name}: there is no transfer in any file")
    return faults


def own_part(bench):
    """Our own profiler: every byte accounted for, and all three outputs."""
    faults = []
    tool = os.path.join(bench.args.towline, "towline")
    for collective in COLLECTIVES:
        name = f"own-{collective}"
        place = os.path.join(bench.args.out, name)
        shutil.rmtree(place, ignore_errors=True)
        os.makedirs(place)
        variables = {"TOWLINE_PROFILE": "all", "TOWLINE_PROFILE_DIR": place, "TOWLINE_PROFILE_BUFFER": "256"}
        try:
            bench.run(name, collective, 8, 64 << 20, 8, 5, variables, checks=1)
        except RuntimeError as problem:
            faults.append(str(problem))
            continue
        found = {ending: glob.glob(os.path.join(place, f"*.{ending}")) for ending in ("pftrace", "summary.txt", "prom")}
        for ending, files in found.items():
            if not files or not all(os.path.getsize(path) for path in files):
                faults.append(f"{name}: no .{ending}")
        if not found["pftrace"]:
            continue
        check = subprocess.run([tool, "trace", "check", *found["pftrace"]], capture_output=True, text=True, check=False)
        print("  " + (check.stdout + check.stderr).strip().replace("\n", "\n  "))
        if check.returncode != 0:
            faults.append(f"{name}: towline trace check failed")
        report = subprocess.run([tool, "trace", "report", *found["pftrace"]], capture_output=True, text=True, check=False)
        with open(os.path.join(bench.args.out, f"{name}-report.txt"), "w", encoding="utf-8") as file:
            file.write(report.stdout + report.stderr)
        for path in found["prom"]:
            with open(path, encoding="utf-8") as file:
                metrics = file.read()
            moved = re.findall(r"^towline_wire_bytes_total\{.*\} (\d+)", metrics, re.M)
            if not any(int(value) for value in moved):
                faults.append(f"{name}: the metrics know of no bytes")
    return faults


def overhead_part(bench, deadline):
    """What each level costs against the first: medians over rounds in which all take turns."""
    levels = [level for level in LEVELS if not bench.args.levels or level[0] in bench.args.levels.split("; ")]
    bands = []
    for text in bench.args.bands.split(","):
        first, last, factor, iterations = text.split(":")
        bands.append((table.parse_size(first), table.parse_size(last), int(factor), int(iterations)))
    sizes = []
    for size, last, factor, _ in bands:
        while size <= last:
            sizes.append(size)
            size *= factor
    times = {level: {size: [] for size in sizes} for level, _ in levels}
    faults = []
    rounds = 0
    longest = 0
    scratch = os.path.join(bench.args.out, "overhead")
    while rounds < bench.args.rounds and (rounds < 3 or time.monotonic() + longest < deadline):
        began = time.monotonic()
        # Each level comes first, second, … in turn.
        order = [levels[(rounds + i) % len(levels)] for i in range(len(levels))]
        for level, variables in order:
            shutil.rmtree(scratch, ignore_errors=True)
            os.makedirs(scratch)
            name = "overhead-" + level.replace(" ", "-")
            given = {**variables, "TOWLINE_PROFILE_DIR": scratch} if "TOWLINE_PROFILE" in variables else variables
            found = {}
            for first, last, factor, iterations in bands:
                rows = bench.run(name, "all_reduce", first, last, factor, iterations, given)
                found.update({row.size: row.time_us for row in rows})
            for size in sizes:
                times[level][size].append(found[size])
        rounds += 1
        longest = max(longest, time.monotonic() - began)
    shutil.rmtree(scratch, ignore_errors=True)
    print(
        f"  all_reduce, out of place, {rounds} rounds in alternation: median time, and median of the ratios to the first row "
        "with its interval of 95 % or what so few rounds allow"
    )
    print("  | | " + " | ".join(table.show_size(size) for size in sizes) + " |")
    print("  |---|" + "---|" * len(sizes))
    first = levels[0][0]
    for level, _ in levels:
        cells = []
        for size in sizes:
            median, ratio = compare(times[level][size], times[first][size])
            spread = stats.median_interval([a / b for a, b in zip(times[level][size], times[first][size])])
            cells.append(f"{median:.1f} µs" + ("" if level == first else f" ({ratio:.3f}, {spread.low:.3f} to {spread.high:.3f})"))
        print(f"  | {level} | " + " | ".join(cells) + " |")
    for level in ("NetPlugin only", "everything"):
        if level not in times or level + ", silent" not in times:
            continue
        silent = times[level + ", silent"]
        for size in sizes:
            _, ratio = compare(times[level][size], silent[size])
            extra = statistics.median(a - b for a, b in zip(times[level][size], silent[size]))
            spread = stats.median_interval([a / b for a, b in zip(times[level][size], silent[size])])
            print(
                f"  the transport's part of {level} at {table.show_size(size)}: {extra:+.2f} µs, {100 * (ratio - 1):+.1f} % "
                f"({100 * (spread.low - 1):+.1f} to {100 * (spread.high - 1):+.1f})"
            )
            too_much = extra > 1.0 if size < 4096 else ratio > 1.02
            if too_much:
                what = f"{extra:+.2f} µs (at most 1)" if size < 4096 else f"{100 * (ratio - 1):+.1f} % (at most 2)"
                print(f"  missed: {level} at {table.show_size(size)}: {what}")
    return faults


def compare(times, base):
    """(median time, median of the ratios round by round)."""
    return statistics.median(times), statistics.median(a / b for a, b in zip(times, base))


def main():
    """Parses the command line and runs the parts."""
    parser = argparse.ArgumentParser(prog="profiler.sh", description=__doc__)
    parser.add_argument("--tests", required=True, help="directory of all_reduce_perf, sendrecv_perf, alltoall_perf")
    parser.add_argument("--towline", required=True, help="directory of libnccl-net.so and the program towline")
    parser.add_argument("--nccl", help="directory of libnccl.so.2, if the loader needs it (2.28 or later)")
    parser.add_argument("--example", help="NCCL's libnccl-profiler-example.so; without it the first part is left out")
    parser.add_argument("--out", default="profiler-results", help="where outputs go (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--parts", default="example,own,overhead", help="which of the three (default: all)")
    parser.add_argument("--budget", type=float, default=170, help="seconds after which no further round is begun")
    parser.add_argument("--rounds", type=int, default=11, help="most rounds of the third part")
    parser.add_argument("--levels", help='rows of the third part, separated by "; " (default: all; the first is the measure)')
    parser.add_argument("--bands", default=BANDS, help="its sizes, FIRST:LAST:FACTOR:ITERATIONS,… (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one run")
    args = parser.parse_args()
    began = time.monotonic()
    os.makedirs(args.out, exist_ok=True)
    bench = Bench(args)
    parts = args.parts.split(",")
    faults = []
    if "example" in parts and args.example:
        print("NCCL's example profiler:", flush=True)
        faults += example_part(bench)
    if "own" in parts:
        print("Towline's own profiler:", flush=True)
        faults += own_part(bench)
    if "overhead" in parts:
        print("What it costs:", flush=True)
        try:
            faults += overhead_part(bench, began + args.budget)
        except RuntimeError as problem:
            faults.append(str(problem))
    for fault in faults:
        print(f"FAILED: {fault}")
    print(f"{'FAILED' if faults else 'ok'} after {time.monotonic() - began:.0f} s; outputs in {args.out}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
