"""Real NCCL over every kind of interface that can be made in two network namespaces, beside NCCL's Socket in the same set-up.

See interfaces.sh for how to run it.
"""

import argparse
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "benches", "nccl"))

from networks import PREFIX, Missing, Network, Shape, Tools  # noqa: E402
from processes import Group  # noqa: E402
from runner import Band  # noqa: E402
from stats import median  # noqa: E402

SHAPES = [
    *(Shape("veth", count, one) for count in (1, 2, 4) for one in (False, True) if count > 1 or not one),
    *(Shape("veth", count, False, gbit) for count in (1, 2) for gbit in (10, 25)),
    Shape("veth", 2, True, 25),
    *(Shape(kind, count) for kind in ("bridge", "macvlan", "ipvlan", "vlan", "bond") for count in (1, 2)),
]
CONTENDERS = {"towline": {"NCCL_NET": "Towline"}, "socket": {"NCCL_NET": "Socket"}}
# Of 8 bytes so many that the first milliseconds of the connections do not decide.
BANDS = [Band.parse("8:8:2:400:100:1"), Band.parse("128K:2M:16:20:5:1"), Band.parse("32M:32M:2:4:1:1")]
# The scatter between two groups of one contender at these sizes is above 5 %.
BOUND = 1.10


def environment(options, contender):
    """What the ranks of a contender see."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "TOWLINE_"))}
    env.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME=PREFIX)
    env.update(CONTENDERS[contender], NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,GRAPH")
    env.update(options.set)
    path = [options.towline, options.nccl, env.get("LD_LIBRARY_PATH")]
    env["LD_LIBRARY_PATH"] = ":".join(part for part in path if part)
    return env


def measure(options, network, contender, log):
    """Times by size, and what went wrong."""
    env = environment(options, contender)
    env["NCCL_DEBUG_FILE"] = log
    group = Group(2, 2, env, 60, wraps=[network.command(0), network.command(1)])
    times, problem = {}, group.problem
    for band in BANDS:
        run = group.run("all_reduce", band, 60, True)
        problem = problem or run.problem
        for row in run.rows:
            times[row.size] = row.time_us
            if row.wrong:
                problem = f"{row.wrong} wrong elements at {row.size} B"
    said = group.said() if problem else ""
    group.end()
    return times, problem, said


def test(options, tools, shape):
    """A row of the table; whether it holds."""
    label = shape.label()
    try:
        network = Network(tools, shape)
    except Missing as missing:
        print(f"| {label} | not made here: {missing} |", flush=True)
        return True
    times = {name: {} for name in CONTENDERS}
    with network:
        if not network.ping():
            print(f"| {label} | FAILED: the hosts do not reach each other |", flush=True)
            return False
        if options.dry_run:
            print(f"| {label} | made |", flush=True)
            return True
        for _ in range(options.groups):
            for name in CONTENDERS:
                log = os.path.join(options.out, f"{label.replace(' ', '-').replace(',', '').replace('/', '')}-{name}.log")
                found, problem, said = measure(options, network, name, log)
                if problem:
                    print(f"| {label} | FAILED: {name}: {problem} {said[-300:]} | log: {log}", flush=True)
                    return False
                for size, time in found.items():
                    times[name].setdefault(size, []).append(time)
    cells, holds = [], True
    for size in sorted(times["towline"]):
        ours, theirs = median(times["towline"][size]), median(times["socket"][size])
        miss = ours > BOUND * theirs
        holds &= not miss
        cells.append(f"{ours:.0f} / {theirs:.0f} = {ours / theirs:.2f}{' MISS' if miss else ''}")
    print(f"| {label} | {' | '.join(cells)} |", flush=True)
    return holds


def main():
    """One row for each set-up; exit status 1 when one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("towline", help="directory of libnccl-net.so")
    parser.add_argument("--nccl", help="directory of libnccl.so.2, if the loader needs it")
    parser.add_argument("--out", default="/tmp", help="where NCCL's logs go")
    parser.add_argument("--groups", type=int, default=3, help="process groups of each contender; the medians are compared")
    parser.add_argument("--only", default="", help="words that a set-up's name must contain, as in 'veth' or '2 macvlan'")
    parser.add_argument("--iproute-debs", help="directory with Debian's iproute2 package and its libraries, where ip and tc are missing")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable for all ranks")
    parser.add_argument("--dry-run", action="store_true", help="only make the set-ups; needs no GPU")
    options = parser.parse_args()
    options.set = dict(pair.split("=", 1) for pair in options.set)
    options.towline = os.path.abspath(options.towline)
    os.makedirs(options.out, exist_ok=True)
    try:
        tools = Tools(options.iproute_debs)
    except Missing as missing:
        sys.exit(str(missing))
    sizes = [size for band in BANDS for size in band.sizes()]
    print("time of an all-reduce over Towline / over Socket, in us, by size in bytes; every element verified")
    print(f"| interfaces of each host | {' | '.join(str(size) for size in sizes)} |")
    print(f"|{'---|' * (len(sizes) + 1)}", flush=True)
    results = [test(options, tools, shape) for shape in SHAPES if options.only in shape.label()]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
