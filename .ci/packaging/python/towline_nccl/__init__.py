"""Towline, a network transport for NCCL: where its library is.

    import os, towline_nccl
    os.environ.update(towline_nccl.environment())   # before the first use of NCCL
"""

import os

__all__ = ["directory", "environment", "library"]


def directory():
    """The directory of libnccl-net.so, for LD_LIBRARY_PATH."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "towline")


def library():
    """The path of the library, for NCCL_NET_PLUGIN."""
    return os.path.join(directory(), "libnccl-net.so")


def environment():
    """Variables that make NCCL 2.21 or newer use Towline, also when they are set after the process has started.

    Older releases take no path; for them start the process with what `towline env` prints.
    """
    return {"NCCL_NET_PLUGIN": library(), "NCCL_NET": "Towline"}
