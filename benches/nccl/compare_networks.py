"""Makes networks between two pretended hosts, runs all contenders on each in turn, and names what is slower than Socket.

With --peer, other rows than Socket's tunings are run, as two builds or two settings of Towline: --against says which of them the
others are compared with.

Each round runs every contender once, in a rotating order, so that what drifts on the machine meets all of them alike. Ratios
are taken within a round; a miss is a median ratio above 1, or an interval that reaches beyond --margin.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import contenders
import processes
import runner
import stats
import table
from networks import PREFIX, Missing, Network, Shape, Tools, congestion

# How the hosts are joined; None: they are one.
NETWORKS = {
    "loopback": None,
    "veth": Shape(),
    "veth10": Shape(gbit=10),
    "veth25": Shape(gbit=25),
    "veth100": Shape(gbit=100),
    "two10": Shape(count=2, one_subnet=True, gbit=10),
    "two25": Shape(count=2, one_subnet=True, gbit=25),
}
SIZES = "8,2K,32K,128K,512K,2M,16M,128M"
OTHER_SIZES = "128K,2M,64M"
COLLECTIVES = "all_reduce,all_gather,reduce_scatter,alltoall,sendrecv"
# Steps of a training: how it is spread, and the parameters of its model.
TRAININGS = (("fsdp", 365_000_000), ("ddp", 365_000_000))
TRAINING_RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "training_rank.py")
SOCKETS = ("socket", "socket-2x8", "socket-4x1-4ch")


def arguments(words=None):
    """What the caller asked for."""
    parser = argparse.ArgumentParser(prog="nccl_networks.sh", description=__doc__)
    parser.add_argument("--towline", required=True, metavar="DIR", help="directory of libnccl-net.so")
    parser.add_argument("--nccl", metavar="DIR", help="directory of libnccl.so.2, if the loader needs it")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of %(default)s")
    parser.add_argument("--collectives", default=COLLECTIVES, help="of %(default)s")
    parser.add_argument("--sizes", default=SIZES, help="for all_reduce; default %(default)s")
    parser.add_argument("--other-sizes", default=OTHER_SIZES, help="for the rest; default %(default)s")
    parser.add_argument("--training", action="store_true", help="steps of an FSDP and a DDP training instead; needs PyTorch with CUDA")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each contender; default %(default)s")
    parser.add_argument("--margin", type=float, default=1.05, help="how far an interval may reach; default %(default)s")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=DIR;VAR=VALUE;...",
        help="run this instead of the tunings of Socket; may be given several times, towline is always run",
    )
    parser.add_argument("--against", metavar="NAME,...", help="the rows to compare with; the tunings of Socket unless given")
    parser.add_argument("--rails", action="store_true", help="also Towline with TOWLINE_RAILS=all, where there are two links")
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks of each host, which share its interfaces; default %(default)s")
    parser.add_argument("--congestion", metavar="NAME", help="TCP's congestion control, for this machine until the end; default: as it is")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no round begins; default %(default)s")
    parser.add_argument("--iproute-debs", metavar="DIR", help="Debian's iproute2 package and its libraries, where ip and tc are missing")
    parser.add_argument("--out", metavar="FILE", help="every sample, a line of JSON each")
    options = parser.parse_args(words)
    try:
        options.peer = [contenders.from_argument(text) for text in options.peer]
    except ValueError as error:
        parser.error(str(error))
    if options.peer and not options.against:
        parser.error("--peer needs --against")
    options.against = options.against.split(",") if options.against else SOCKETS
    options.networks = options.networks.split(",")
    unknown = [name for name in options.networks if name not in NETWORKS]
    if unknown:
        parser.error(f"no such network: {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    return options


def work(options):
    """The collectives and sizes to measure."""
    if options.training:
        yield from TRAININGS
        return
    for collective in options.collectives.split(","):
        sizes = options.sizes if collective == "all_reduce" else options.other_sizes
        for text in sizes.split(","):
            yield collective, table.parse_size(text)


def iterations(count):
    """Operations of one sample: many of what is short."""
    return max(4, min(400, (64 << 20) // max(count, 1)))


@contextlib.contextmanager
def network(options, name):
    """The command to run each rank in, and the interfaces there."""
    shape = NETWORKS[name]
    if shape is None:
        yield None, "lo"
        return
    with Network(Tools(options.iproute_debs), shape) as made:
        if options.congestion not in (None, made.congestion()):
            raise Missing(f"networks made here have {made.congestion()}; set {options.congestion} on the host of this container")
        yield [made.command(0), made.command(1)], PREFIX


def rows(options, shape):
    """The contenders."""
    known = {row.name: row for row in contenders.builtin(options.towline)}
    if options.peer:
        return [*options.peer, known["towline"]]
    chosen = [known[name] for name in (*SOCKETS, "towline")]
    if options.rails and shape and shape.count > 1:
        rails = contenders.Contender("towline-rails", {"NCCL_NET": "Towline", "TOWLINE_RAILS": "all"}, options.towline, "towline")
        chosen.append(rails)
    return chosen


def measure(options, name, deadline, keep):
    """Samples by collective, size and contender, each by round: microseconds, and seconds of processor time."""
    samples, wrong, problems = {}, 0, []
    script = TRAINING_RANK if options.training else processes.RANK
    with network(options, name) as (wraps, interfaces), contextlib.ExitStack() as groups:
        started = {}
        common = {"NCCL_SOCKET_IFNAME": interfaces}
        ranks = 2 * options.per_host
        wraps = wraps and [wrap for wrap in wraps for _ in range(options.per_host)]
        for row in rows(options, NETWORKS[name]):
            # Each rank is on a host of its own for NCCL, so that ranks can share a GPU.
            group = processes.Group(ranks, ranks, row.environment(common, options.nccl), 120, script=script, wraps=wraps)
            groups.callback(group.end)
            if group.problem:
                problems.append(f"{name}, {row.name}: {group.problem}\n{group.said()}")
            else:
                started[row.name] = group
        for number in range(options.rounds):
            if time.monotonic() > deadline:
                problems.append(f"{name}: out of time after {number} rounds")
                break
            order = sorted(started)
            order = order[number % len(order) :] + order[: number % len(order)] if order else []
            for collective, count in work(options):
                band = runner.Band(count, count, 2, iterations(count), 2, 1)
                for who in order:
                    run = started[who].run(collective, band, 120, number == 0)
                    if not run.rows:
                        problems.append(f"{name}, {who}, {collective} {count}: {run.problem}")
                        continue
                    taken = run.rows[0].time_us
                    wrong += run.rows[0].wrong or 0
                    samples.setdefault((collective, count), {}).setdefault(who, {})[number] = (taken, run.cpu_s)
                    sample = {"network": name, "collective": collective, "size": count, "contender": who}
                    keep({**sample, "round": number, "time_us": taken, "cpu_s": run.cpu_s})
    return samples, wrong, problems


def report(title, samples, margin, against=SOCKETS):
    """Prints a network's table; gives the misses. The last column is the processor time by that of the row compared with."""
    misses = []
    best_title = "best Socket" if tuple(against) == SOCKETS else "beside"
    print(f"\n## {title}\n\n| collective | bytes | {best_title} | µs | Towline µs | ratio | interval | CPU |\n|---|---|---|---|---|---|---|---|")
    for (collective, count), both in samples.items():
        by, cpu = ({who: {number: pair[which] for number, pair in rounds.items()} for who, rounds in both.items()} for which in (0, 1))
        sockets = [(stats.median_interval(list(by[who].values())).median, who) for who in against if who in by]
        for who in sorted(by.keys() - set(against)):
            if not sockets:
                continue
            best, best_name = min(sockets)
            own = stats.median_interval(list(by[who].values())).median
            ratio = stats.paired_ratio(by[who], by[best_name])
            shown = "- | -" if ratio is None else f"{ratio.median:.2f} | {ratio.low:.2f} to {ratio.high:.2f}"
            work = stats.paired_ratio(cpu[who], cpu[best_name])
            used = "-" if work is None else f"{work.median:.2f}"
            print(f"| {collective} | {count} | {best_name} | {best:.1f} | {who}: {own:.1f} | {shown} | {used} |")
            if ratio and (ratio.median > 1.0 or ratio.high > margin):
                misses.append(f"{title}: {collective} of {count} bytes, {who}: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
    return misses


def main():
    """Exit status 1 when something was slower, wrong, or did not run."""
    options = arguments()
    deadline = time.monotonic() + options.budget
    misses, problems, wrong = [], [], 0
    with contextlib.ExitStack() as files:
        file = files.enter_context(open(options.out, "w", encoding="utf-8")) if options.out else None
        try:
            control = files.enter_context(congestion(options.congestion))
        except Missing as missing:
            sys.exit(f"nccl_networks.sh: {missing}")

        def keep(sample):
            if file:
                print(json.dumps({**sample, "congestion": control}), file=file, flush=True)

        for name in options.networks:
            if time.monotonic() > deadline:
                problems.append(f"{name}: out of time")
                continue
            try:
                samples, bad, trouble = measure(options, name, deadline, keep)
            except Missing as missing:
                problems.append(f"{name}: not made here: {missing}")
                continue
            misses += report(f"{name}, {control}", samples, options.margin, options.against)
            wrong += bad
            problems += trouble
    print(f"\n{len(misses)} misses, {wrong} wrong elements, {len(problems)} problems")
    for line in misses + problems:
        print(f"- {line}")
    return 1 if misses or wrong or problems else 0


if __name__ == "__main__":
    sys.exit(main())
