"""Reads the table that an nccl-tests binary prints, and knows how many bytes its operations put on the network.

It must not know who ran the binary or why.
"""

import re
from dataclasses import asdict, dataclass
from typing import Optional

# What each test calls its operation, with the bytes that all ranks together send for one operation on `size` bytes
# (`size` as nccl-tests prints it: the larger of the send and the receive buffer of one rank), and the factor from
# size / time to the bus bandwidth that nccl-tests reports.
WIRE_BYTES = {
    "all_reduce": lambda size, ranks: 2 * (ranks - 1) * size,
    "all_gather": lambda size, ranks: (ranks - 1) * size,
    "reduce_scatter": lambda size, ranks: (ranks - 1) * size,
    "alltoall": lambda size, ranks: (ranks - 1) * size,
    "broadcast": lambda size, ranks: (ranks - 1) * size,
    "sendrecv": lambda size, ranks: ranks * size,
}
BUS_FACTOR = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "alltoall": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "sendrecv": lambda ranks: 1.0,
}


@dataclass
class Row:
    """One line of the table: one size, out of place and in place."""

    size: int
    time_us: float
    wrong: Optional[int]
    in_place_time_us: Optional[float]
    in_place_wrong: Optional[int]

    def as_dict(self):
        """The row as plain data, for JSON."""
        return asdict(self)

    def total_wrong(self):
        """Wrong elements in both halves; None when nothing was checked."""
        counts = [count for count in (self.wrong, self.in_place_wrong) if count is not None]
        return sum(counts) if counts else None


def _number(text):
    return None if text == "N/A" else float(text)


def _count(text):
    return None if text == "N/A" else int(float(text))


# size, count, type, redop, root, then (time, algbw, busbw, #wrong) once or twice.
_CELL = r"(N/A|[-+0-9.e]+)"
_LINE = re.compile(
    r"^\s*(\d+)\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+" + r"\s+".join([_CELL] * 4) + r"(?:\s+" + r"\s+".join([_CELL] * 4) + r")?"
)


def parse(output):
    """Every result line in an nccl-tests output, in order."""
    rows = []
    for line in output.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        cells = match.groups()
        rows.append(
            Row(
                size=int(cells[0]),
                time_us=_number(cells[1]),
                wrong=_count(cells[4]),
                in_place_time_us=_number(cells[5]) if cells[5] else None,
                in_place_wrong=_count(cells[8]) if cells[8] else None,
            )
        )
    return rows


def finished(output):
    """Whether the test ran to its end: nccl-tests prints its summary last."""
    return "# Out of bounds values" in output


def parse_size(text):
    """`2K`, `1G`, `128` as bytes, the way nccl-tests reads them."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.strip().upper())
    if not match:
        raise ValueError(f"not a size: {text!r} (write 8, 2K, 128M or 1G)")
    return int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)]


def show_size(size):
    """Bytes as the shortest exact 8, 2K, 128M or 1G."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def bytes_on_wire(collective, rows, ranks, iterations, warmups, checks):
    """Bytes that all ranks together sent in one run of the test.

    Per size and half nccl-tests runs one operation to settle, `iterations` timed ones and `checks` verified ones.
    Before the table it warms up `warmups` times at every power of two from the smallest size to the largest.
    """
    wire = WIRE_BYTES[collective]
    total = 0
    for row in rows:
        halves = 2 if row.in_place_time_us is not None else 1
        total += halves * (1 + iterations + checks) * wire(row.size, ranks)
    if rows:
        size = rows[0].size
        while 0 < size <= rows[-1].size:
            total += warmups * wire(size, ranks)
            size *= 2
    return total


def bus_bandwidth(collective, size, time_us, ranks):
    """GB/s as nccl-tests defines it, without the two decimals it prints."""
    return size / time_us / 1e3 * BUS_FACTOR[collective](ranks)
