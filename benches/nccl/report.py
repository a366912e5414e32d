"""Turns samples into a CSV of all of them, a CSV and Markdown tables of medians, and one plot for each collective.

It reads only the samples' files: reports of several calls can be made together.
"""

import csv
import json
import os
from collections import defaultdict
from statistics import median

import plot
import stats
import table

# Bands that move less than this in one run say nothing about the cost of a gigabyte.
ENOUGH_BYTES = 1e9


class Samples:
    """All samples of the given files, by collective, size and contender."""

    def __init__(self, paths):
        self.machines, self.starts, self.runs = [], {}, []
        self.roles = {}
        for number, path in enumerate(paths):
            with open(path, encoding="utf-8") as file:
                for line in file:
                    record = json.loads(line)
                    # Blocks of different calls are different blocks.
                    record["call"] = number
                    self._take(record)
        # times[collective][size][contender][block] = microseconds, out of place. The blocks of a group of processes that
        # gave way to another are one, with their median: they have in common what two groups differ in.
        self.times = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
        every = defaultdict(list)
        self.wrong, self.unchecked = 0, 0
        for run in self.runs:
            for row in run["rows"]:
                counts = [row[k] for k in ("wrong", "in_place_wrong") if row[k] is not None]
                self.wrong += sum(counts)
                self.unchecked += not counts
                # nccl-tests rounds tiny sizes of some collectives down to nothing.
                if row["size"] > 0:
                    group = run.get("group")
                    block = (run["call"], run["band"], run["block"] if group is None else f"group {group}")
                    every[run["collective"], row["size"], run["contender"], block].append(row["time_us"])
        for (collective, size, contender, block), times in every.items():
            self.times[collective][size][contender][block] = median(times)

    def _take(self, record):
        kind = record["kind"]
        if kind == "machine":
            self.machines.append(record)
            return
        self.roles[record["contender"]] = record["role"]
        if kind == "start":
            self.starts.setdefault(record["contender"], []).append(record)
        else:
            self.runs.append(record)

    def names(self, *roles):
        """Contenders of these roles, in the order in which they were first seen."""
        return [name for name, role in self.roles.items() if role in roles]

    def ranks(self):
        """GPUs in a run."""
        return self.runs[0]["ranks"] if self.runs else 0


def best_peer(by_contender, peers):
    """The peer with the smallest median at one size, or None."""
    medians = {name: median(by_contender[name].values()) for name in peers if by_contender.get(name)}
    return min(medians, key=medians.get) if medians else None


def write(paths, out):
    """Writes every report; gives the process's exit status."""
    samples = Samples(paths)
    _samples_csv(samples, os.path.join(out, "samples.csv"))
    summary = list(_summary(samples))
    with open(os.path.join(out, "summary.csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=SUMMARY_FIELDS)
        writer.writeheader()
        writer.writerows(summary)
    text = markdown(samples, summary)
    with open(os.path.join(out, "report.md"), "w", encoding="utf-8") as file:
        file.write(text)
    for collective, sizes in samples.times.items():
        drawing = plot.draw(collective, sizes, samples.roles, samples.ranks())
        with open(os.path.join(out, f"{collective}.svg"), "w", encoding="utf-8") as file:
            file.write(drawing)
    print(text)
    towline_ran = any(samples.roles[run["contender"]] == "towline" and run["rows"] for run in samples.runs)
    return 0 if towline_ran and samples.wrong == 0 and not _towline_failed(samples) else 1


def _towline_failed(samples):
    records = samples.runs + [start for starts in samples.starts.values() for start in starts]
    return any(record["role"] == "towline" and record["problem"] for record in records)


def _samples_csv(samples, path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow("call,collective,contender,band,block,place,size,time_us,wrong,in_place_time_us,in_place_wrong".split(","))
        for run in samples.runs:
            head = [run[k] for k in ("call", "collective", "contender", "band", "block", "place")]
            for row in run["rows"]:
                writer.writerow(head + [row[k] for k in ("size", "time_us", "wrong", "in_place_time_us", "in_place_wrong")])


SUMMARY_FIELDS = (
    "collective,size,contender,samples,time_us,time_low_us,time_high_us,busbw_gbs,"
    "best_peer,peer_over_this,ratio_low,ratio_high,ratio_confidence"
).split(",")


def _summary(samples):
    """One record for each collective, size and contender."""
    peers = samples.names("peer")
    for collective, sizes in samples.times.items():
        for size in sorted(sizes):
            by_contender = sizes[size]
            peer = best_peer(by_contender, peers)
            for name in samples.roles:
                times = by_contender.get(name)
                if not times:
                    continue
                spread = stats.median_interval(list(times.values()))
                ratio = stats.paired_ratio(by_contender[peer], times) if peer else None
                yield {
                    "collective": collective,
                    "size": size,
                    "contender": name,
                    "samples": spread.samples,
                    "time_us": f"{spread.median:.2f}",
                    "time_low_us": f"{spread.low:.2f}",
                    "time_high_us": f"{spread.high:.2f}",
                    "busbw_gbs": f"{table.bus_bandwidth(collective, size, spread.median, samples.ranks()):.6g}",
                    "best_peer": peer or "",
                    "peer_over_this": f"{ratio.median:.4f}" if ratio else "",
                    "ratio_low": f"{ratio.low:.4f}" if ratio else "",
                    "ratio_high": f"{ratio.high:.4f}" if ratio else "",
                    "ratio_confidence": f"{ratio.confidence:.4f}" if ratio else "",
                }


def markdown(samples, summary):
    """The whole report as Markdown."""
    parts = ["# NCCL networks compared\n", _where(samples)]
    for collective in samples.times:
        parts.append(f"## {collective}\n")
        parts.append(_against_best(samples, summary, collective))
        parts.append(_all_medians(samples, collective))
    parts.append(_recovery(samples))
    parts.append(_processor(samples))
    parts.append(_health(samples))
    return "\n".join(part for part in parts if part)


def _rows(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _where(samples):
    text = ""
    for record in samples.machines:
        gpus = f"{record['used']} of {len(record['gpus'])} GPUs ({record['gpus'][0]})" if record["gpus"] else f"{record['used']} GPUs"
        drive = "one thread for each GPU" if record["threads"] else "one thread for all GPUs"
        if record.get("processes"):
            drive = f"one process for each GPU, on {record['hosts']} hosts as far as NCCL knows" if record["hosts"] > 1 else "one process for each GPU"
        if record.get("wait_every"):
            drive += f", which waits after every {record['wait_every']} operations"
        text += f"- {gpus}, {record['cores']} cores, kernel {record['kernel']}, interface `{record['interface']}`, {drive}, seed {record['seed']}\n"
    nccl = sorted({start["nccl"] for starts in samples.starts.values() for start in starts if start["nccl"]})
    text += f"- NCCL {', '.join(nccl) or 'of unknown version'}; peer-to-peer, shared memory and NVLS off (shared memory on for `shm`)\n"
    return text


def _against_best(samples, summary, collective):
    """Towline against the best peer at each size."""
    rows = []
    for record in summary:
        if record["collective"] != collective or record["contender"] != "towline" or not record["best_peer"]:
            continue
        peer = record["best_peer"]
        peer_time = median(samples.times[collective][record["size"]][peer].values())
        interval = f"{float(record['ratio_low']):.2f} – {float(record['ratio_high']):.2f}" if record["ratio_low"] else ""
        confidence = f"{float(record['ratio_confidence']):.1%}" if record["ratio_confidence"] else ""
        rows.append(
            [
                table.show_size(record["size"]),
                f"{float(record['time_us']):.1f}",
                f"{float(record['busbw_gbs']):.3g}",
                peer,
                f"{peer_time:.1f}",
                f"{float(record['peer_over_this']):.2f}" if record["peer_over_this"] else "",
                interval,
                f"{confidence} (n={record['samples']})",
            ]
        )
    if not rows:
        return ""
    header = ["size", "towline µs", "busbw GB/s", "best peer", "peer µs", "peer / towline", "interval", "confidence"]
    return _rows(header, rows) + "\nA ratio above 1 means that Towline is faster. The ratio is the median of the blocks' ratios.\n"


def _all_medians(samples, collective):
    """Every contender's median time."""
    names = [name for name in samples.roles if any(sizes.get(name) for sizes in samples.times[collective].values())]
    rows = []
    for size in sorted(samples.times[collective]):
        by_contender = samples.times[collective][size]
        cells = [f"{median(by_contender[name].values()):.1f}" if by_contender.get(name) else "" for name in names]
        rows.append([table.show_size(size), *cells])
    return "Median time in µs, out of place:\n\n" + _rows(["size", *names], rows)


def _recovery(samples):
    """What recovery costs on the healthy path."""
    rows = []
    for collective, sizes in samples.times.items():
        for size in sorted(sizes):
            with_it, without = sizes[size].get("towline", {}), sizes[size].get("towline-norecovery", {})
            cost = stats.paired_ratio(with_it, without)
            if cost:
                interval = f"{cost.low - 1:+.1%} – {cost.high - 1:+.1%} ({cost.confidence:.1%}, n={cost.samples})"
                rows.append([collective, table.show_size(size), f"{cost.median - 1:+.1%}", interval])
    return "## Time that recovery adds\n\n" + _rows(["collective", "size", "median", "interval"], rows) if rows else ""


def _processor(samples):
    """Processor seconds of the whole process for each GB that all ranks together sent."""
    runs = defaultdict(list)
    for run in samples.runs:
        if run["rows"] and run["wire_bytes"] >= ENOUGH_BYTES:
            start = median(record["cpu_s"] for record in samples.starts[run["contender"]])
            runs[run["collective"], run["band"], run["contender"]].append((run, start))
    rows = []
    for (collective, band, name), pairs in runs.items():
        whole = median(run["cpu_s"] / run["wire_bytes"] * 1e9 for run, _ in pairs)
        moving = median(max(0.0, run["cpu_s"] - start) / run["wire_bytes"] * 1e9 for run, start in pairs)
        busy = median(run["cpu_s"] / run["wall_s"] for run, _ in pairs)
        rows.append([collective, band, name, f"{whole:.3f}", f"{moving:.3f}", f"{busy:.2f}", str(len(pairs))])
    if not rows:
        return ""
    header = ["collective", "sizes", "contender", "s/GB, whole process", "s/GB, less start-up", "cores busy", "runs"]
    return (
        "## Processor time\n\nUser and system seconds of the process (nccl-tests' own waiting thread included) for each GB "
        "that all ranks together sent; start-up is what a run of one operation took.\n\n" + _rows(header, rows)
    )


def _health(samples):
    """Wrong elements, failed runs, contenders that could not take part."""
    text = "## Checks\n\n"
    text += f"- {len(samples.runs)} runs, {samples.wrong} wrong elements, {samples.unchecked} results unchecked\n"
    for name, starts in samples.starts.items():
        for start in starts:
            if start["problem"]:
                text += f"- `{name}` took no part: {start['problem']}\n"
    failed = defaultdict(int)
    for run in samples.runs:
        if run["problem"]:
            failed[run["contender"], run["collective"], run["band"], run["problem"]] += 1
    for (name, collective, band, problem), count in failed.items():
        text += f"- `{name}`, {collective} {band}: {problem} ({count} times)\n"
    return text
