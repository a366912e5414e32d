#!/usr/bin/env python3
"""Compares Towline with other NCCL networks on real GPUs, with NVIDIA's nccl-tests.

Contenders take turns: in each block every contender runs once, in an order shuffled from a seed, so that a drift of the
machine meets all of them alike. One invocation covers a band of sizes and is one sample for each of them. Every run
verifies its data (`-c 1`), and before the first block one run with NCCL_DEBUG=INFO must prove that the traffic really
takes the network it is measured for. Samples are written as they come; reports can be made again from them at any time.

    compare.py --tests DIR --towline DIR --out DIR [--budget SECONDS] ...
    compare.py --processes [--hosts N] --towline DIR --out DIR ...
    compare.py --report-only --out DIR RAW.jsonl [RAW.jsonl ...]
"""

import argparse
import glob
import json
import os
import platform
import random
import re
import signal
import sys
import time

import contenders
import processes
import report
import runner
import table

DEFAULT_BANDS = "8:2K:16:100:10:15,32K:2M:4:30:5:5,8M:1G:2:4:1:5"
# Time kept back from the budget for the report.
REPORT_S = 5
# A first run of a kind is taken to last this long, its start on two GPUs included.
FIRST_GUESS_S = 12.0
# The same where the processes run already.
FIRST_ORDER_S = 1.0


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", nargs="*", help="with --report-only: samples of earlier calls")
    parser.add_argument("--tests", help="directory of the nccl-tests binaries (all_reduce_perf, ...)")
    parser.add_argument("--towline", help="directory of Towline's libnccl-net.so")
    parser.add_argument("--fastsocket", help="directory of Fast Socket's libnccl-net.so")
    parser.add_argument("--nccl", help="directory of libnccl.so.2, when the loader does not find it")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIR;VAR=VALUE;...", help="one more contender")
    parser.add_argument("--only", help="contenders to run, separated by commas (default: all)")
    parser.add_argument("--collectives", default="all_reduce", help=f"of {', '.join(table.WIRE_BYTES)}")
    parser.add_argument(
        "--bands",
        default=DEFAULT_BANDS,
        help="FIRST:LAST:FACTOR:ITERATIONS:WARMUPS:REPETITIONS, separated by commas (default: %(default)s)",
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--threads", action="store_true", help="one thread for each GPU instead of one for all")
    parser.add_argument("--processes", action="store_true", help="one process for each GPU, without nccl-tests")
    parser.add_argument("--hosts", type=int, default=1, help="with --processes: NCCL takes the ranks to be on so many hosts")
    parser.add_argument(
        "--restart-every",
        type=int,
        default=0,
        metavar="BLOCKS",
        help="with --processes: begin anew with all processes after so many blocks, and take each such group for one sample",
    )
    parser.add_argument(
        "--wait-every",
        type=int,
        default=0,
        metavar="OPERATIONS",
        help="with --processes: wait for the GPU after so many operations, as programs do that need a result, instead of after all",
    )
    parser.add_argument("--env", action="append", default=[], metavar="VAR=VALUE", help="for every contender")
    parser.add_argument("--interface", default="lo", help="NCCL_SOCKET_IFNAME (default: lo)")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="end within this (default: 540)")
    parser.add_argument("--timeout", type=float, default=90, metavar="SECONDS", help="for one invocation (default: 90)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True, help="directory for samples, tables and plots")
    parser.add_argument("--report-only", action="store_true")
    given = parser.parse_args()
    if not given.report_only and not (given.towline and (given.tests or given.processes)):
        parser.error("--towline is needed, and --tests or --processes")
    if given.hosts < 1 or given.gpus % given.hosts or (given.hosts > 1 and not given.processes):
        parser.error("--hosts needs --processes, and as many GPUs on each host")
    if given.restart_every and not given.processes:
        parser.error("--restart-every needs --processes")
    if given.wait_every and not given.processes:
        parser.error("--wait-every needs --processes")
    unknown = [name for name in given.collectives.split(",") if name not in table.WIRE_BYTES]
    if unknown:
        parser.error(f"unknown collective {unknown[0]}: choose of {', '.join(table.WIRE_BYTES)}")
    return given


class Comparison:
    """The state of one call: who still takes part, what time is left, where the samples go."""

    def __init__(self, given, deadline):
        self.given = given
        self.deadline = deadline
        self.collectives = given.collectives.split(",")
        self.bands = [runner.Band.parse(text) for text in given.bands.split(",")]
        self.common = {"NCCL_SOCKET_IFNAME": given.interface, **dict(pair.split("=", 1) for pair in given.env)}
        everyone = contenders.builtin(given.towline, given.fastsocket)
        everyone += [contenders.from_argument(text) for text in given.peer]
        if given.only:
            wanted = given.only.split(",")
            missing = set(wanted) - {c.name for c in everyone}
            if missing:
                raise SystemExit(f"no contender is called {sorted(missing)[0]}; there are {', '.join(c.name for c in everyone)}")
            everyone = [c for c in everyone if c.name in wanted]
        self.contenders = everyone
        self.longest = {}
        self.failures = {}
        self.closed = set()
        self.groups = {}
        self.generation = 0
        self.raw_path = os.path.join(given.out, "raw.jsonl")
        self.raw = open(self.raw_path, "w", encoding="utf-8")

    def write(self, **record):
        """One line of samples, on the disk before the next run starts."""
        self.raw.write(json.dumps(record) + "\n")
        self.raw.flush()

    def left(self):
        """Seconds until the report must be begun."""
        return self.deadline - REPORT_S - time.monotonic()

    def run(self, contender, collective, band, extra_env=None, check_all=True):
        """One invocation under the contender's environment, or one order to its processes."""
        if self.given.processes:
            limit = min(self.given.timeout, self.left())
            return self.group(contender, extra_env).run(collective, band, limit, check_all)
        binary = os.path.join(self.given.tests, f"{collective}_perf")
        environment = contender.environment({**self.common, **(extra_env or {})}, self.given.nccl)
        limit = max(1.0, min(self.given.timeout, self.left()))
        return runner.invoke(binary, band.arguments(self.given.gpus, self.given.threads, 1), environment, limit)

    def group(self, contender, extra_env=None):
        """The contender's processes; the first call starts them."""
        if contender.name not in self.groups:
            environment = contender.environment({**self.common, **(extra_env or {})}, self.given.nccl)
            self.groups[contender.name] = processes.Group(
                self.given.gpus, self.given.hosts, environment, self.given.timeout, wait_every=self.given.wait_every
            )
        return self.groups[contender.name]

    def end(self):
        """Ends all processes."""
        for group in self.groups.values():
            group.end()

    def begin_anew(self, block):
        """Other processes from this block on, if it is their time: two groups of one and the same contender differ by more
        than the blocks of one group do."""
        every = self.given.restart_every
        generation = block // every if every else 0
        if generation > self.generation:
            self.generation = generation
            self.end()
            self.groups = {}

    def prove(self):
        """One short run of each contender with NCCL's log: who does not take the network it stands for is left out."""
        band = runner.Band(1 << 20, 1 << 20, 2, 1, 0, 1)
        able = []
        for contender in self.contenders:
            path = os.path.join(self.given.out, f"nccl-{contender.name}.log")
            for old in glob.glob(path + "*"):
                # What an earlier call left would count as evidence of this one.
                os.unlink(old)
            debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": path + ".%p"}
            run = self.run(contender, self.collectives[0], band, debug)
            log = "".join(map(_read, glob.glob(path + ".*"))) + run.output
            missing = [text for text in contender.evidence if text.lower() not in log.lower()]
            problem = run.problem or (f"NCCL's log does not say {missing[0]!r}" if missing else "")
            version = re.search(r"NCCL version (\S+)", log)
            self.write(
                kind="start",
                contender=contender.name,
                role=contender.role,
                variables=contender.variables,
                problem=problem,
                # A group's start is in none of its samples.
                cpu_s=0.0 if self.given.processes else run.cpu_s,
                wall_s=run.wall_s,
                nccl=version.group(1) if version else "",
            )
            print(f"{contender.name:20} {problem or 'ready'} ({run.wall_s:.1f} s)", flush=True)
            if problem:
                print(runner.tail(run.output), flush=True)
            else:
                able.append(contender)
        self.contenders = able

    def rounds(self):
        """Yields (round, band number): as many blocks as the most repeated band asks for, the others spread evenly."""
        most = max(band.repetitions for band in self.bands)
        for block in range(most):
            for number, band in enumerate(self.bands):
                # The first block holds every band, so that a short budget still gives a sample of each size.
                if -(-(block + 1) * band.repetitions // most) > -(-block * band.repetitions // most):
                    yield block, number

    def measure(self):
        """All blocks, until the budget closes the last band."""
        order = random.Random(self.given.seed)
        for block, number in self.rounds():
            self.begin_anew(block)
            for collective in self.collectives:
                # The turn of each is drawn also where it is not run, so that the order does not depend on the budget.
                turn = order.sample(self.contenders, len(self.contenders))
                key = (collective, number)
                if key in self.closed:
                    continue
                need = sum(self.expected(c, key) for c in turn if self.failures.get((c.name, *key), 0) < 2)
                if need > self.left():
                    print(f"{collective} {self.bands[number].label()}: block {block} would take {need:.0f} s, left out", flush=True)
                    self.closed.add(key)
                    continue
                for place, contender in enumerate(turn):
                    self.sample(contender, collective, number, block, place)

    def expected(self, contender, key):
        """The longest that this kind of run has taken."""
        return self.longest.get((contender.name, *key), FIRST_ORDER_S if self.given.processes else FIRST_GUESS_S)

    def sample(self, contender, collective, number, block, place):
        """One timed run; a contender that failed twice in a band is not asked again there."""
        band = self.bands[number]
        key = (contender.name, collective, number)
        if self.failures.get(key, 0) >= 2 or self.left() < 1:
            return
        # In the first block everything is checked, whatever the time.
        run = self.run(contender, collective, band, check_all=block == 0)
        took = unchecked_time(run, band) if self.given.processes and block == 0 else run.wall_s
        self.longest[key] = max(took, self.longest.get(key, 0))
        if not run.ok:
            self.failures[key] = self.failures.get(key, 0) + 1
            print(f"{contender.name} {collective} {band.label()}: {run.problem}\n{runner.tail(run.output)}", flush=True)
        self.write(
            kind="sample",
            contender=contender.name,
            role=contender.role,
            collective=collective,
            band=band.label(),
            block=block,
            group=self.generation if self.given.restart_every else None,
            place=place,
            problem=run.problem,
            wall_s=run.wall_s,
            cpu_s=run.cpu_s,
            wire_bytes=self.bytes_on_wire(collective, run.rows, band),
            ranks=self.given.gpus,
            rows=[row.as_dict() for row in run.rows] if run.ok else [],
        )


    def bytes_on_wire(self, collective, rows, band):
        """What all ranks together sent in a run."""
        if self.given.processes:
            wire = table.WIRE_BYTES[collective]
            return sum((band.warmups + band.iterations) * wire(row.size, self.given.gpus) for row in rows)
        return table.bytes_on_wire(collective, rows, self.given.gpus, band.iterations, band.warmups, 1)


def unchecked_time(run, band):
    """How long an order will take again that has taken so long with the check of everything, which for large buffers takes far
    longer than the operations."""
    operations = sum(row.time_us for row in run.rows) * (band.iterations + band.warmups) / 1e6
    return min(run.wall_s, FIRST_ORDER_S + operations) if run.ok else run.wall_s


def _read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def machine(given):
    """Where this was measured, for the report."""
    with os.popen("nvidia-smi -L 2>/dev/null") as listing:
        gpus = [re.sub(r" \(UUID.*", "", line.strip()) for line in listing]
    return {
        "gpus": gpus,
        "used": given.gpus,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "interface": given.interface,
        "threads": given.threads,
        "processes": given.processes,
        "hosts": given.hosts,
        "wait_every": given.wait_every,
        "restart_every": given.restart_every,
        "seed": given.seed,
        "env": given.env,
    }


def main():
    """Measures, reports, and says by the exit status whether everything held: 1 for wrong data or a missing Towline."""
    given = arguments()
    os.makedirs(given.out, exist_ok=True)
    paths = given.raw
    if not given.report_only:
        # A SIGTERM ends the measuring as Ctrl-C does: the samples so far are still reported.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        comparison = Comparison(given, time.monotonic() + given.budget)
        comparison.write(kind="machine", **machine(given))
        try:
            comparison.prove()
            comparison.measure()
        except KeyboardInterrupt:
            print("interrupted: reporting what there is", flush=True)
        finally:
            comparison.end()
        paths = [comparison.raw_path]
    elif not paths:
        paths = [os.path.join(given.out, "raw.jsonl")]
    return report.write(paths, given.out)


if __name__ == "__main__":
    sys.exit(main())
