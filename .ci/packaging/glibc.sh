#!/usr/bin/env bash
# The newest version of the GNU C library that a file asks for, as `2.34`.
#
#   .ci/packaging/glibc.sh FILE…               prints the newest of all files
#   .ci/packaging/glibc.sh --at-most 2.34 FILE…  fails when one asks for more, and says which symbols do
set -euo pipefail

limit=
if [ "${1:-}" = --at-most ]; then limit=$2; shift 2; fi
[ $# -gt 0 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
command -v readelf >/dev/null || { echo "glibc.sh: readelf is missing (package binutils)" >&2; exit 1; }

newest=0
for file in "$@"; do
    # Captured first: a readelf that fails must not look like a file that asks for nothing.
    symbols=$(readelf --wide --dyn-syms "$file")
    version=$(grep -o '@GLIBC_[0-9.]*' <<<"$symbols" | sed 's/@GLIBC_//' | sort -V | tail -n 1 || true)
    [ -n "$version" ] || { echo "glibc.sh: $file asks for no symbol of the GNU C library: is it built for it?" >&2; exit 1; }
    newest=$(printf '%s\n' "$newest" "$version" | sort -V | tail -n 1)
    if [ -n "$limit" ] && [ "$(printf '%s\n' "$limit" "$version" | sort -V | tail -n 1)" != "$limit" ]; then
        echo "glibc.sh: $file asks for glibc $version, more than $limit:" >&2
        grep -o '[A-Za-z0-9_]*@GLIBC_[0-9.]*' <<<"$symbols" | sort -u | while IFS=@ read -r name wants; do
            wants=${wants#GLIBC_}
            [ "$(printf '%s\n' "$limit" "$wants" | sort -V | tail -n 1)" = "$limit" ] || echo "    $name wants $wants" >&2
        done
        exit 1
    fi
done
echo "$newest"
