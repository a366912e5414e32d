#!/usr/bin/env bash
# Installs what .ci/packaging/build.sh has made, and uses each: `towline doctor`, `towline all-reduce`, and a C program that
# opens the library by both of its names, as NCCL does.
#
#   tests/packages.sh [--wheel] [OUT] [SUITE…]    OUT is target/package/out unless given; suites: bookworm trixie
#
# The .deb, the archive and the .rpm (in a root of its own): in bare Debian systems, as tests/bare.sh makes them, without a network.
# The wheel: with pip in a virtual environment of this machine; with --wheel it alone. As root, on Debian or Ubuntu, with
# debootstrap, python3-venv, gcc and (for the .rpm) rpm; the wheel alone needs python3-venv and gcc only. An artefact that is
# not in OUT, or whose tool is missing, is named at the end.
#
#   TOWLINE_BARE_DIR, TOWLINE_BARE_MIRROR   see tests/support/bare_system.sh
#   BESIDE_WHEEL   what pip is to install beside the wheel, as nvidia-nccl-cu12 or torch: `towline doctor` must then find that
#                  NCCL and name the interface that it would use
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "packages.sh: $*" >&2; exit 1; }

# Inside a mount and process namespace of its own: runs a script in the system at $2.
if [ "${1:-}" = --inside ]; then
    root=$2
    mount --make-rprivate /
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount --rbind /dev "$root/dev"
    exec chroot "$root" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin bash -euc "$3"
fi

wheel_only=
[ "${1:-}" != --wheel ] || { wheel_only=1; shift; }
out=$(realpath "${1:-$project/target/package/out}")
[ $# -eq 0 ] || shift
tools=(python3 gcc)
if [ -n "$wheel_only" ]; then
    [ $# -eq 0 ] || fail "--wheel tries no systems: $*"
else
    [ $# -gt 0 ] || set -- bookworm trixie
    [ "$(id -u)" = 0 ] || fail "root is needed, to make a system and enter it"
    tools+=(debootstrap unshare)
fi
for tool in "${tools[@]}"; do command -v "$tool" >/dev/null || fail "$tool is missing"; done
(cd "$out" && sha256sum --quiet --check SHA256SUMS) || fail "$out is not what .ci/packaging/build.sh made: checksums differ"

one() { # the single file in OUT that fits a pattern; nothing if there is none
    local found
    found=$(find "$out" -maxdepth 1 -name "$1" -not -name '*-debug.tar.gz')
    [ "$(wc -l <<<"$found")" = 1 ] || fail "more than one $1 in $out"
    printf '%s' "$found"
}
deb=$(one 'towline_*.deb') archive=$(one 'towline-*-linux-*.tar.gz') rpm=$(one 'towline-*.rpm') wheel=$(one 'towline_nccl-*.whl')
left_out=()
tried=0

# What dnf would have to find for the .rpm: the C runtime and nothing else. `rpm` itself does not look: in an empty root nothing
# is installed.
if [ -n "$rpm" ] && command -v rpm >/dev/null; then
    wants=$(rpm -qp --requires "$rpm" | grep -v '^rpmlib(\|^rtld(GNU_HASH)' | sed 's/(.*//' | sort -u | tr '\n' ' ')
    [ "${wants#ld-linux-*.so.[0-9] }" = "libc.so.6 libgcc_s.so.1 libm.so.6 " ] || fail "$rpm requires $wants"
fi

# What a user does: the variables, then a run whose log must say which library was taken.
use='
run_from() {
    eval "$("$1" env)"
    echo "$LD_LIBRARY_PATH" | grep -q "^$2\(:\|$\)" || { echo "LD_LIBRARY_PATH is $LD_LIBRARY_PATH, not $2"; exit 1; }
    said=$("$1" all-reduce -b 8 -e 64K -f 16 -n 3 -w 1) || { echo "$said"; exit 1; }
    echo "$said" | grep -q "$2/libnccl-net.so" || { echo "$said"; exit 1; }
    echo "$said" | grep "Out of bounds"
    # With these variables there is no problem, and no advice about the loader.
    said=$("$1" doctor) || { echo "$said"; exit 1; }
    ! echo "$said" | grep "NCCL would" || exit 1
    echo "$said" | tail -n 1
    if [ -n "${opens:-}" ]; then "$opens"; fi
    unset LD_LIBRARY_PATH NCCL_NET
}
# The links of the documentation lead to what is there.
documents_in() {
    cd "$1"
    find docs/running.md docs/examples/mpi.sh >/dev/null
    for page in README.md docs/*.md docs/examples/*.md; do
        grep -o "](\\([^)#:]*\\)[)#]" "$page" | sed "s/^](//; s/[)#]\$//" | while read -r link; do
            [ -e "$(dirname "$page")/$link" ] || { echo "$1/$page: $link is not there"; exit 1; }
        done
    done
    cd /
}
completions_in() {
    find "$1/bash-completion/completions/towline" "$1"/zsh/*/_towline "$1"/fish/vendor_completions.d/towline.fish >/dev/null
}'

. "$project/tests/support/bare_system.sh"
work=$(mktemp -d)
opens=$work/opens
trap 'rm -rf --one-file-system "$work" ${root:+"$root"}' EXIT
trap 'exit 130' INT TERM

# What NCCL does: the library by its name alone, then the newest table, whose first member is the network's name.
gcc -x c - -o "$opens" -ldl <<'C'
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    const char* names[] = {"libnccl-net.so", "libnccl-net-towline.so"};
    for (int i = 0; i < 2; i++) {
        void* library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
        const char** table = dlsym(library, "ncclNetPlugin_v12");
        if (!table || strcmp(*table, "Towline")) return fprintf(stderr, "%s has no table of Towline's\n", names[i]), 1;
        printf("a C program opens %s: Towline\n", names[i]);
    }
    return 0;
}
C

for suite in "$@"; do
    unpack_bare "$suite"
    script="opens=/root/opens; $use"
    cp "$opens" "$root/root/opens"
    if [ -n "$deb" ]; then
        cp "$deb" "$root/root/towline.deb"
        # dpkg alone: what the package depends on is there already, in the smallest system.
        script+='
        echo "== .deb"; dpkg -i /root/towline.deb >/dev/null
        run_from towline /usr/lib/towline
        find /usr/share/man/man1/towline-doctor.1.gz /usr/share/doc/towline/copyright >/dev/null || { grep -r share/man /etc/dpkg/dpkg.cfg.d; exit 1; }
        completions_in /usr/share; documents_in /usr/share/doc/towline
        dpkg -r towline >/dev/null; ! [ -e /usr/lib/towline ] || { echo "dpkg -r leaves /usr/lib/towline"; exit 1; }'
        tried=$((tried + 1))
    fi
    if [ -n "$archive" ]; then
        cp "$archive" "$root/root/towline.tar.gz"
        script+='
        echo "== archive"; tar -C /opt -xzf /root/towline.tar.gz
        run_from "$(echo /opt/towline-*/bin/towline)" "$(echo /opt/towline-*/lib/towline)"
        completions_in "$(echo /opt/towline-*/share)"; documents_in "$(echo /opt/towline-*/share/doc/towline)"
        ln -s /opt/towline-*/bin/towline /usr/local/bin/towline
        run_from /usr/local/bin/towline "$(echo /opt/towline-*/lib/towline)"; rm /usr/local/bin/towline'
        tried=$((tried + 1))
    fi
    if [ -n "$rpm" ] && command -v rpm >/dev/null; then
        mkdir -p "$root/opt/rpm"
        rpm --root "$root/opt/rpm" --install --nodeps "$rpm"
        script+='
        echo "== .rpm"; run_from /opt/rpm/usr/bin/towline /opt/rpm/usr/lib/towline
        find /opt/rpm/usr/share/man/man1/towline-doctor.1.gz >/dev/null; completions_in /opt/rpm/usr/share; documents_in /opt/rpm/usr/share/doc/towline'
        tried=$((tried + 1))
    fi
    echo "==== $suite"
    unshare --mount --pid --fork --kill-child "${BASH_SOURCE[0]}" --inside "$root" "$script" </dev/null || fail "$suite: see above"
    rm -rf --one-file-system "$root"
    root=
done

if [ -n "$wheel" ]; then
    echo "==== wheel"
    unset TOWLINE_BARE_DIR TOWLINE_BARE_MIRROR LD_LIBRARY_PATH
    python3 -m venv "$work/venv" || fail "python3 -m venv failed (package python3-venv)"
    "$work/venv/bin/pip" install --quiet --no-index --disable-pip-version-check "$wheel"
    if [ -n "${BESIDE_WHEEL:-}" ]; then
        "$work/venv/bin/pip" install --quiet --no-deps --disable-pip-version-check "$BESIDE_WHEEL"
        VIRTUAL_ENV=$work/venv "$work/venv/bin/towline" doctor >"$work/doctor" || true
        grep "libnccl.so.2: .*would use the plugin's v" "$work/doctor" || fail "towline doctor does not find the NCCL of $BESIDE_WHEEL"
    fi
    lib=$("$work/venv/bin/python" -c 'import towline_nccl; print(towline_nccl.directory())')
    bash -euc "opens=$opens; $use; run_from '$work/venv/bin/towline' '$lib'"
    tried=$((tried + 1))
fi

[ -n "$wheel" ] || left_out+=("wheel: not in $out")
if [ -n "$wheel_only" ]; then
    left_out+=("all but the wheel, as --wheel asks")
else
    [ -n "$deb" ] || left_out+=(".deb: not in $out")
    [ -n "$archive" ] || left_out+=("archive: not in $out")
    if [ -z "$rpm" ]; then left_out+=(".rpm: not in $out"); elif ! command -v rpm >/dev/null; then left_out+=(".rpm: rpm is missing"); fi
fi
[ $tried -gt 0 ] || fail "nothing to install in $out"
for what in "${left_out[@]}"; do echo "packages.sh: LEFT OUT: $what"; done
echo "packages.sh: $tried installations passed"
