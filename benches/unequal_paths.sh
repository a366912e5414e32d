#!/usr/bin/env bash
# Unequal paths: does one connection use what its rails can carry together?
#
#   rails     two rails shaped to 1 and 4 Gbit/s: Towline must move at least 0.9 of what plain TCP moves over each alone,
#             added up.
#   throttled eight rails with a stream each, all of 400 Mbit/s but one, which has a tenth: at least 0.95.
#
# Makes two network namespaces of its own with veth pairs between them, shapes every rail in both directions (tc, token
# bucket), and lets `towline send-recv` move messages of 16 MiB, 8 outstanding. Plain TCP (one socket for each rail, one
# rail after the other) and Towline take turns; the table shows the median of each and of the ratio. Exits with 1 when a
# median is below its bound. Needs root, iproute2 (ip and tc), python3, and a built `towline`:
#
#   cargo build --release && sudo benches/unequal_paths.sh [--rounds N] [--seconds S] [--only rails|throttled]
#       [--towline FILE]
set -euo pipefail
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/unequal_paths.py" "$@"
