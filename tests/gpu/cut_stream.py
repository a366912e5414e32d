#!/usr/bin/env python3
"""Cuts the busiest TCP connections of a running process, as a fault in the network would.

    cut_stream.py PID [--count 5] [--every 0.7] [--after 100]

Takes the process's sockets by pidfd_getfd(2) (needs the right to trace it) and shuts down the one that has moved the most
bytes, COUNT times, EVERY seconds, once one has moved AFTER megabytes. Prints what it cut; exit status 1 when nothing
was to be cut.
"""
import argparse
import ctypes
import os
import socket
import struct
import sys
import time

PIDFD_OPEN, PIDFD_GETFD = 434, 438
libc = ctypes.CDLL(None, use_errno=True)


def sockets(pid, pidfd):
    """(bytes moved, own copy of the socket, its name) of each established TCP connection."""
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            if not os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                continue
        except OSError:
            continue
        copy = libc.syscall(PIDFD_GETFD, pidfd, int(entry), 0)
        if copy < 0:
            continue
        held = socket.socket(fileno=copy)
        try:
            here, there = held.getsockname(), held.getpeername()
            info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            held.close()
            continue
        # tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info.
        acked, received = struct.unpack_from("=QQ", info, 120)
        yield acked + received, held, f"{here[0]}:{here[1]} - {there[0]}:{there[1]}"


def busiest(pid, pidfd):
    best = None
    for moved, held, name in sockets(pid, pidfd):
        if best is None or moved > best[0]:
            if best:
                best[1].close()
            best = (moved, held, name)
        else:
            held.close()
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--every", type=float, default=0.7, help="seconds")
    parser.add_argument("--after", type=float, default=100, help="megabytes")
    parser.add_argument("--patience", type=float, default=60, help="seconds")
    options = parser.parse_args()
    pidfd = libc.syscall(PIDFD_OPEN, options.pid, 0)
    if pidfd < 0:
        sys.exit(f"cut_stream: process {options.pid}: {os.strerror(ctypes.get_errno())}")
    cut, deadline = 0, time.monotonic() + options.patience
    while cut < options.count and time.monotonic() < deadline and os.path.exists(f"/proc/{options.pid}/fd"):
        best = busiest(options.pid, pidfd)
        if best and (cut or best[0] >= options.after * 1e6):
            moved, held, name = best
            held.shutdown(socket.SHUT_RDWR)
            cut += 1
            print(f"cut {name} after {moved / 1e6:.0f} MB", flush=True)
            held.close()
            time.sleep(options.every)
        else:
            if best:
                best[1].close()
            time.sleep(0.02)
    sys.exit(0 if cut else "cut_stream: nothing was cut (no right to trace the process, or no traffic)")


main()
