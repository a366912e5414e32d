"""Who is compared: a contender is a name, a set of variables and what NCCL's log must say when it really ran.

It must not know how the runs are scheduled or reported.
"""

import os
from dataclasses import dataclass, field
from typing import Optional

# Without these NCCL would go over NVLink or shared memory between GPUs of one host, and no network would be measured.
THROUGH_THE_NETWORK = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}


@dataclass
class Contender:
    """One row of the comparison."""

    name: str
    variables: dict = field(default_factory=dict)
    library_dir: Optional[str] = None
    # "towline", "peer" or "reference" (measured, drawn, never the best peer).
    role: str = "peer"
    # What the log must contain for the run to count.
    evidence: tuple = ()
    # Variables of THROUGH_THE_NETWORK that this contender does without.
    without: tuple = ()

    def environment(self, common, nccl_dir):
        """The whole environment of a run: the caller's, with every variable of NCCL, Towline and PyTorch's NCCL replaced by ours."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TOWLINE_", "TORCH_NCCL_"))}
        env.update({k: v for k, v in THROUGH_THE_NETWORK.items() if k not in self.without})
        env.update(common)
        env.update(self.variables)
        path = [p for p in (self.library_dir, nccl_dir, env.get("LD_LIBRARY_PATH")) if p]
        if path:
            env["LD_LIBRARY_PATH"] = ":".join(path)
        return env


def _network(name):
    return (f"Using network {name}", f"via NET/{name}")


def _socket(name, **variables):
    return Contender(name, {"NCCL_NET": "Socket", **variables}, evidence=_network("Socket"))


def builtin(towline_dir, fastsocket_dir=None):
    """The contenders that need nothing but NCCL, Towline's library and, when given, Fast Socket's."""
    towline = os.path.abspath(towline_dir)
    rows = [
        Contender("towline", {"NCCL_NET": "Towline"}, towline, "towline", _network("Towline")),
        Contender(
            "towline-norecovery",
            {"NCCL_NET": "Towline", "TOWLINE_RECOVERY": "0"},
            towline,
            "towline",
            _network("Towline"),
        ),
        _socket("socket"),
        _socket("socket-2x8", NCCL_SOCKET_NTHREADS="2", NCCL_NSOCKS_PERTHREAD="8"),
        _socket("socket-4x4", NCCL_SOCKET_NTHREADS="4", NCCL_NSOCKS_PERTHREAD="4"),
        _socket("socket-4x1-4ch", NCCL_SOCKET_NTHREADS="4", NCCL_NSOCKS_PERTHREAD="1", NCCL_MIN_NCHANNELS="4"),
    ]
    if fastsocket_dir:
        rows.append(
            Contender(
                "fastsocket",
                {"NCCL_NET": "FastSocket"},
                os.path.abspath(fastsocket_dir),
                evidence=_network("FastSocket"),
            )
        )
    rows.append(
        Contender(
            "shm",
            {"NCCL_NET": "Socket"},
            role="reference",
            evidence=("via SHM",),
            without=("NCCL_SHM_DISABLE",),
        )
    )
    return rows


def from_argument(text):
    """`NAME=DIR;VAR=VALUE;...`: DIR may be empty; a NAME that begins with `towline` is a variant of Towline.

    The network that the log must name is taken from NCCL_NET when that is among the variables.
    """
    name, separator, rest = text.partition("=")
    if not separator or not name:
        raise ValueError(f"not a peer: {text!r} (write NAME=DIR;VAR=VALUE;...)")
    first, *others = rest.split(";")
    variables = dict(pair.split("=", 1) for pair in others if "=" in pair)
    network = variables.get("NCCL_NET")
    return Contender(
        name,
        variables,
        os.path.abspath(first) if first else None,
        "towline" if name.startswith("towline") else "peer",
        _network(network) if network else ("via NET/",),
    )
