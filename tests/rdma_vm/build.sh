#!/bin/bash
# Builds the machine that run.sh boots: Debian's stock kernel and an initramfs made of Debian packages.
#
# Nothing is installed except QEMU, and that only when it is missing: every package is downloaded by apt-get and
# unpacked below the cache folder. The machine is rebuilt when the scripts or the list of packages change and reused
# otherwise; delete the cache folder to take newer packages.
#
#   build.sh CACHE [PACKAGE…]     prints the folder that holds `vmlinuz` and `initramfs`
#
# Further PACKAGEs (valgrind, strace, …) are added to the machine with what they depend on.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=$1
shift
packages=(libc6 libgcc-s1 bash coreutils busybox-static iproute2 ibverbs-providers ibverbs-utils perftest "$@")
# SoftRoCE with its checksum (the plain one: emulated PCLMULQDQ is slower) and its users, the virtual Ethernet pair, the two-machine network, the shared folders, the console.
modules=(crc32_generic rdma_rxe ib_uverbs rdma_ucm veth dummy sch_tbf sch_netem sch_prio cls_u32 tcp_diag virtio_pci virtio_net virtio_console
    9pnet_virtio 9p virtio_rng)

say() { echo "rdma_vm: $*" >&2; }
die() { say "$*"; exit 125; }

trap 'say "build.sh: line $LINENO failed"' ERR
cache=$(mkdir -p "$cache" && cd "$cache" && pwd)
mkdir -p "$cache/packages" "$cache/resolve/partial"
exec 9>"$cache/lock"
flock 9

key=$({ cat "$here/build.sh" "$here/init"; echo "$@"; } | sha256sum | cut -c1-16)
machine=$cache/machine-$key
if [ -f "$machine/initramfs" ]; then
    echo "$machine"
    exit 0
fi

[ -f /etc/debian_version ] || die "this test machine is built from Debian packages; run it on Debian 12"
# The package lists of a bare container are empty: fetch them once.
if ! apt-cache pkgnames linux-image-amd64 | grep -x linux-image-amd64 >/dev/null; then
    say "updating the package lists"
    apt-get update -qq >&2 || die "apt-get update failed: the packages of the test machine cannot be found"
fi
if ! command -v qemu-system-x86_64 >/dev/null; then
    say "installing qemu-system-x86"
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends qemu-system-x86 \
        >"$cache/qemu-install.log" 2>&1 ||
        die "package qemu-system-x86 is missing and could not be installed (see $cache/qemu-install.log)"
fi

# What the packages need, as if nothing were installed or downloaded yet: apt resolves against an empty status file and
# an empty folder. So it also names the versions that the archive has, not those that are installed here. Sets `kernel`,
# and `files` to what apt calls them; fails when the package lists are older than what is installed.
resolve() {
    local package closure
    kernel=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -1)
    [ -n "$kernel" ] || die "package linux-image-amd64 is missing from the package lists (Debian's stock kernel)"
    for package in "${packages[@]}"; do
        apt-cache pkgnames "$package" | grep -xF "$package" >/dev/null ||
            die "package $package is missing from the package lists"
    done
    closure=$(apt-get "${empty[@]}" --no-install-recommends --print-uris -y install "${packages[@]}" 2>"$cache/resolve.log" |
        sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p") || die "the packages cannot be resolved: $(tail -1 "$cache/resolve.log")"
    # Tools of a package manager that iproute2 and others name in their dependencies; nothing in the machine runs them.
    closure=$(grep -vxE 'perl.*|libperl.*|debconf.*|dpkg|tar|passwd|adduser|usrmerge|udev|lib.*-perl|pci.ids|gcc-12-base|base-files|debianutils' \
        <<<"$closure" | sort)
    apt-get "${empty[@]}" download --print-uris "$kernel" $closure 2>"$cache/download.log" |
        awk '{print $2}' >"$cache/files" || die "a package is missing: $(tail -1 "$cache/download.log")"
    mapfile -t files <"$cache/files"
}
empty=(-o Dir::State::status=/dev/null -o "Dir::Cache::archives=$cache/resolve")

# Brings all packages into the cache with one call of apt-get; says which one it could not bring.
fetch() {
    local file missing=()
    for file in "${files[@]}"; do
        [ -f "$cache/packages/$file" ] || missing+=("${file%%_*}")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "downloading ${#missing[@]} packages"
    (cd "$cache/packages" && apt-get -q "${empty[@]}" -o APT::Sandbox::User=root download "${missing[@]}" \
        >"$cache/download.log" 2>&1) || true
    for file in "${files[@]}"; do
        [ -f "$cache/packages/$file" ] || { echo "${file%%_*}"; return 1; }
    done
}

resolve
if ! missing=$(fetch); then
    # The archive keeps only the newest version: lists that are some days old name files that are gone.
    say "updating the package lists"
    apt-get update -qq >&2 || true
    resolve
    missing=$(fetch) || die "package $missing is missing: $(tail -1 "$cache/download.log")"
fi

say "building the test machine ($kernel)"
work=$cache/work
rm -rf "$work"
mkdir -p "$work/kernel" "$work/root"/{usr/{bin,sbin,lib,lib64},etc,dev,proc,sys,tmp,run,out,root}
for merged in bin sbin lib lib64; do ln -s "usr/$merged" "$work/root/$merged"; done
for file in "${files[@]}"; do
    case $file in
    linux-image-*) dpkg-deb -x "$cache/packages/$file" "$work/kernel" ;;
    *) dpkg-deb --fsys-tarfile "$cache/packages/$file" | tar -x -C "$work/root" --keep-directory-symlink ;;
    esac
done
(cd "$work/root" && rm -rf usr/share/{doc,man,locale,bash-completion,lintian,zoneinfo,info,i18n} \
    usr/lib/x86_64-linux-gnu/{gconv,audit} usr/lib/locale etc/{init.d,systemd} usr/lib/systemd)

# Debian's busybox prefers its own applets to the commands of its PATH, iproute2's among them; bash and coreutils
# (env, timeout, nice, …) do not.
ln -sf bash "$work/root/usr/bin/sh"
# Commands of busybox for everything that no package brought.
busybox=$work/root/usr/bin/busybox
[ -x "$busybox" ] || die "package busybox-static did not bring /bin/busybox"
for applet in $("$busybox" --list); do
    [ -e "$work/root/usr/bin/$applet" ] || [ -e "$work/root/usr/sbin/$applet" ] ||
        ln -s busybox "$work/root/usr/bin/$applet"
done

# The kernel's modules, only the wanted ones and what they need.
release=$(ls "$work/kernel/lib/modules")
"$busybox" depmod -b "$work/kernel" "$release" 2>/dev/null
folder=$work/kernel/lib/modules/$release
wanted=$(for module in "${modules[@]}"; do
    line=$(grep -E "(^|/)${module//_/[-_]}\.ko:" "$folder/modules.dep" || true)
    [ -n "$line" ] || die "kernel package $kernel has no module $module"
    tr -d ':' <<<"$line" | tr ' ' '\n'
done | sed "s,^/lib/modules/$release/,," | sort -u)
for module in $wanted; do
    install -D -m 644 "$folder/$module" "$work/root/lib/modules/$release/$module"
done
"$busybox" depmod -b "$work/root" "$release" 2>/dev/null
echo "${modules[*]}" >"$work/root/etc/modules"
# Debian lays the drivers' names out below /etc/libibverbs.d; the dynamic linker needs no cache for its own folders.
printf 'root:x:0:0:root:/root:/bin/sh\n' >"$work/root/etc/passwd"
printf 'root:x:0:\n' >"$work/root/etc/group"
printf '127.0.0.1 localhost\n10.7.0.1 a\n10.7.0.2 b\n' >"$work/root/etc/hosts"
install -m 755 "$here/init" "$work/root/init"

# A machine with the same packages from an earlier version of the scripts is of no more use.
for old in "$cache"/machine-*; do
    [ "$(cat "$old/packages" 2>/dev/null)" = "${packages[*]}" ] && rm -rf "$old"
done
mkdir -p "$machine"
echo "${packages[*]}" >"$machine/packages"
cp "$work/kernel/boot/vmlinuz-$release" "$machine/vmlinuz"
(cd "$work/root" && find . | "$busybox" cpio -o -H newc 2>/dev/null) >"$machine/initramfs.new"
mv "$machine/initramfs.new" "$machine/initramfs"
rm -rf "$work"
say "built $(du -sh "$machine/initramfs" | cut -f1) initramfs, kernel $release"
echo "$machine"
