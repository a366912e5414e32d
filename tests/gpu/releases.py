"""What releases.sh runs: the collectives of each release, by the ranks of benches/nccl."""

import ctypes
import os
import re
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "benches", "nccl"))

import contenders  # noqa: E402
import processes  # noqa: E402
import runner  # noqa: E402

COLLECTIVES = os.environ.get("COLLECTIVES", "all_reduce all_gather reduce_scatter broadcast alltoall sendrecv").split()
SIZES = [int(size) for size in os.environ.get("SIZES", "8 32768 131072 524288 2097152 16777216").split()]
LIMIT = float(os.environ.get("LIMIT", "300"))


def release(folder):
    """The version of the library there, as it says itself."""
    number = ctypes.c_int()
    ctypes.CDLL(os.path.join(folder, "libnccl.so.2")).ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def interfaces(log):
    """What NCCL's log says of the interfaces: net, and tuner where one was loaded."""
    net = re.search(r"NET/Plugin: .*?\(v(\d+)\)|Loaded net plugin \S+ \(v(\d+)\)", log)
    own = re.search(r"Towline \S+, interface v(\d+)", log)
    tuner = re.search(r"TUNER/Plugin: Using (?:tuner plugin )?Towline(?: \(v(\d+)\))?", log)
    number = next((group for found in (own, net) if found for group in found.groups() if group), "?")
    return f"net v{number}" + (f", tuner v{tuner.group(1) or '2'}" if tuner else ", no tuner")


def measured(row, folder, out, name):
    """Times and wrong elements by collective and size; NCCL's log; what went wrong."""
    log = os.path.join(out, f"{name}-{row.name}.log")
    common = {"NCCL_SOCKET_IFNAME": os.environ.get("IFNAME", "lo"), "NCCL_DEBUG": "INFO"}
    common.update({"NCCL_DEBUG_SUBSYS": "INIT,NET,TUNING", "NCCL_DEBUG_FILE": log})
    group, times, wrong = processes.Group(2, 2, row.environment(common, folder), LIMIT), {}, 0
    try:
        for collective in COLLECTIVES:
            for size in SIZES:
                count = max(4, min(200, (32 << 20) // size))
                run = group.run(collective, runner.Band(size, size, 2, count, 2, 1), LIMIT, True)
                if not run.rows:
                    return times, wrong, read(log), run.problem + "\n" + run.output
                times[collective, size] = run.rows[0].time_us
                wrong += run.rows[0].wrong or 0
    finally:
        group.end()
    return times, wrong, read(log), ""


def read(path):
    """A file that may be missing."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def main():
    """Exit status 1 when something is wrong."""
    towline, folders = sys.argv[1], sys.argv[2:]
    out = os.environ.get("OUT") or tempfile.mkdtemp(prefix="towline-releases.")
    os.makedirs(out, exist_ok=True)
    known = {row.name: row for row in contenders.builtin(towline)}
    failed = False
    print("| release | interfaces | wrong | collective | bytes | Towline µs | Socket µs | ratio |\n|---|---|---|---|---|---|---|---|")
    for folder in folders:
        name = release(folder)
        own, wrong, log, problem = measured(known["towline"], folder, out, name)
        socket, socket_wrong, _, socket_problem = measured(known["socket"], folder, out, name)
        if not problem and "Using network Towline" not in log:
            problem = "NCCL did not say that it used Towline"
        failed |= bool(problem or wrong)
        for (collective, size), taken in own.items():
            beside = socket.get((collective, size))
            ratio = f"{beside:.1f} | {taken / beside:.2f}" if beside else "- | -"
            print(f"| {name} | {interfaces(log)} | {wrong} | {collective} | {size} | {taken:.1f} | {ratio} |", flush=True)
        for text in (problem, f"Socket: {socket_problem}" if socket_problem or socket_wrong else ""):
            if text:
                print(f"{name}: {text}", flush=True)
    print(f"logs are in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
