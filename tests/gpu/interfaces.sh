#!/usr/bin/env bash
# Real NCCL on two GPUs in two network namespaces with 1, 2 and 4 interfaces: veth, bridge, macvlan, ipvlan, VLAN and bond (those
# that the kernel has), one subnet and several, limited rates. Each set-up must verify and be no slower than NCCL's Socket in it.
# Prints a table; exits 1 when a set-up fails.
#
#   tests/gpu/interfaces.sh TOWLINE_DIR [--nccl DIR] [--groups N] [--only WORDS] [--iproute-debs DIR] [--dry-run] [--out DIR]
#
# As root. `--help` lists the options, `--dry-run` only makes the set-ups and needs no GPU.
exec python3 -B "$(dirname "$0")/interfaces.py" "$@"
