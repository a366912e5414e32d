#!/usr/bin/env bash
# The price of recovery on a path where nothing breaks: the same transfers with TOWLINE_RECOVERY=1 and 0.
#
# `towline send-recv` (bandwidth with 8 messages outstanding, and latency) and `towline all-reduce` with two ranks, each at
# several sizes, over the loopback interface. Both ways take turns in blocks, and who begins changes from block to block;
# the ratio is taken within a block. The table shows the medians, the median of the ratios with its 95 % interval, and the
# same for the processor time (user and system, of all processes of a run with its start and its checks, which both ways
# have). On a host that others use, a run is fast or slow by what they do: --best R takes the best of R runs, and of their
# repetitions, for each way and block. Exits with 1 when the upper end of an interval of times lies above 1.03. Needs python3 and a built `towline`:
#
#   cargo build --release && benches/recovery_price.sh [--blocks N] [--scale X] [--best R] [--only send-recv|all-reduce]
#       [--sizes 8,32K,1M,64M] [--interface NAME] [--towline FILE] [--json FILE]
set -euo pipefail
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/recovery_price.py" "$@"
