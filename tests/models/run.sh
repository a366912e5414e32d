#!/usr/bin/env bash
# Model-checks Towline's concurrent code: tests/models/run.sh [filter]. TOWLINE_MODELS_TARGET_DIR: where to build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
CARGO_TARGET_DIR=${TOWLINE_MODELS_TARGET_DIR:-$PWD/target} cargo test --quiet --release "$@"
