#!/usr/bin/env bash
# The README's two commands, word for word, on bare systems made with debootstrap.
#
#   tests/bare.sh [--first] [--keep] [SUITE…] [-- ARGUMENTS]
#
# Without a suite: bookworm and trixie. `--first` leaves the second command (the tests) out. `--keep` keeps a system in which a command
# failed, and says how to enter it. ARGUMENTS are added to the second command, as in `tests/bare.sh trixie -- --no-run`.
# Takes about 5 minutes for each system on two cores, and 10 more for the tests.
#
# As root, on Debian or Ubuntu, with debootstrap, git and Rust under rustup. What is tested is the last commit. Rust comes
# from this machine's rustup, without which a bare system has no Rust; crates and Debian's packages are downloaded. The
# system sees this machine's processors, kernel and network; its processes and mounts end with it.
#
# TOWLINE_BARE_DIR, TOWLINE_BARE_MIRROR: see tests/support/bare_system.sh.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "bare.sh: $*" >&2; exit 1; }

# Inside a mount and process namespace of its own: runs one command in the system at $1.
if [ "${1:-}" = --inside ]; then
    root=$2 command=$3
    mount --make-rprivate /
    mount --bind "$root" "$root" # `ip netns exec` wants / to be a mount point
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/run"
    mount --bind "$RUSTUP_HOME" "$root/opt/rustup"
    mount -o remount,bind,ro "$root/opt/rustup"
    exec chroot "$root" env -i HOME=/root TERM=dumb CARGO_TERM_COLOR=never RUSTUP_HOME=/opt/rustup RUST_BACKTRACE=1 \
        DEBIAN_FRONTEND=noninteractive PATH=/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        ${RUSTUP_TOOLCHAIN:+RUSTUP_TOOLCHAIN="$RUSTUP_TOOLCHAIN"} \
        ${SSL_CERT_FILE:+SSL_CERT_FILE=/opt/certificates.crt} \
        ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} ${no_proxy:+no_proxy="$no_proxy"} \
        bash -c "cd /root/towline && $command"
fi

first_only=
keep=
suites=()
arguments=
while [ $# -gt 0 ]; do
    case $1 in
    --first) first_only=1 ;;
    --keep) keep=1 ;;
    --) shift; arguments=" $*"; break ;;
    -*) fail "no such option: $1" ;;
    *) suites+=("$1") ;;
    esac
    shift
done
[ ${#suites[@]} -gt 0 ] || suites=(bookworm trixie)

[ "$(id -u)" = 0 ] || fail "root is needed, to make a system and enter it"
for tool in debootstrap git unshare; do
    command -v "$tool" >/dev/null || fail "$tool is missing (packages debootstrap, git, util-linux)"
done
export RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup}
cargo_home=${CARGO_HOME:-$HOME/.cargo}
[ -d "$RUSTUP_HOME/toolchains" ] && [ -x "$cargo_home/bin/cargo" ] || fail "Rust under rustup is missing (RUSTUP_HOME, CARGO_HOME)"

# The line behind the comment that begins with these words.
command_of() {
    local found
    found=$(sed -n "/^# $1/{n;p;q;}" "$project/README.md")
    [ -n "$found" ] || fail "README.md has no command below '# $1'"
    printf '%s' "$found"
}
first=$(command_of "a bare ")
second=$(command_of "pass the tests")$arguments

. "$project/tests/support/bare_system.sh"
trap '[ -z "$root" ] || rm -rf --one-file-system "$root"' EXIT
trap 'exit 130' INT TERM

for suite in "${suites[@]}"; do
    unpack_bare "$suite"

    # The way to the network, as this machine goes it: names, certificates, cargo's settings.
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
    mkdir -p "$root/usr/local/share/ca-certificates" "$root/root/.cargo/bin" "$root/opt/rustup"
    find /usr/local/share/ca-certificates -name '*.crt' -exec cp {} "$root/usr/local/share/ca-certificates/" \; 2>/dev/null || true
    [ -z "${SSL_CERT_FILE:-}" ] || cp -L "$SSL_CERT_FILE" "$root/opt/certificates.crt"
    cp -a "$cargo_home/bin/." "$root/root/.cargo/bin/"
    ! [ -e "$cargo_home/config.toml" ] || cp "$cargo_home/config.toml" "$root/root/.cargo/"
    git clone -q --no-hardlinks "$project" "$root/root/towline"

    commands=("$first")
    [ -n "$first_only" ] || commands+=("$second")
    for command in "${commands[@]}"; do
        printf '\n== %s: %s (after %d s)\n' "$suite" "$command" "$SECONDS"
        if ! unshare --mount --pid --fork --kill-child "${BASH_SOURCE[0]}" --inside "$root" "$command" </dev/null; then
            if [ -n "$keep" ]; then
                echo "kept: RUSTUP_HOME=$RUSTUP_HOME unshare --mount --pid --fork --kill-child ${BASH_SOURCE[0]} --inside $root bash"
                root=
            fi
            fail "$suite: FAILED: $command"
        fi
    done
    rm -rf --one-file-system "$root"
    root=
done
printf '\nbare.sh: all passed in %d s: %s\n' "$SECONDS" "${suites[*]}"
