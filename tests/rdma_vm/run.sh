#!/bin/bash
# Runs a command on real verbs without RDMA hardware: in a virtual machine with Debian's kernel and SoftRoCE.
set -euo pipefail

usage() {
    cat <<'TEXT'
Runs a command on real verbs without RDMA hardware.

usage: tests/rdma_vm/run.sh [OPTIONS] -- COMMAND [ARGUMENT…]
       tests/rdma_vm/run.sh [OPTIONS] --shell

A virtual machine (software emulation, no KVM) boots Debian's stock kernel with SoftRoCE. It sees this project, read
only, under the same path as here, starts in its top folder, runs COMMAND as root and ends. COMMAND's output and exit
status become those of this script. Files left in /out come back in the folder named by --out.

One machine has two RDMA devices, rxe0 and rxe1, on the two ends of a veth pair (veth0 10.7.0.1, fd07::1 and veth1
10.7.0.2, fd07::2). With --two-hosts there are two machines with one device each, rxe0 on eth0, 10.7.0.1 and 10.7.0.2
(fd07::1, fd07::2), joined by a socket network; both run COMMAND, with LAB_HOST=0 or 1.
In every machine LAB_ADDR is its (first) address and LAB_PEER the other one.

  --shell           open a shell in the machine (with --two-hosts: in the first; the second one runs COMMAND)
  --two-hosts       boot two machines
  --timeout SEC     end the machine after SEC seconds (default 300; a shell has no limit)
  --mtu BYTES       MTU of the machine's interfaces (default 1500, as Ethernet's; RoCE's follows: 1024, or 4096 at 4200)
  --cpus N          virtual CPUs per machine (default 2)
  --count-time      one virtual CPU whose clock counts instructions: the same times whatever else this computer does
  --memory MIB      memory per machine (default 2048)
  --with PACKAGE    add a Debian package to the machine (valgrind, strace, …); may be repeated
  --out DIR         what the machine leaves in /out goes to DIR (default: thrown away)
  --qemu ARGUMENT   pass ARGUMENT to QEMU; may be repeated
  --build           only build the machine

Everything that can be reused is kept below target/rdma-vm (or $RDMA_VM_CACHE). Exit status 124: time limit; 125: the
machine could not be built or did not come up.
TEXT
}
say() { echo "rdma_vm: $*" >&2; }
die() { say "$*"; exit 125; }

here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
cache=${RDMA_VM_CACHE:-$project/target/rdma-vm}
arguments=("$@")
hosts=1 shell= timeout=300 mtu=1500 cpus=2 memory=2048 out= only_build=
accelerator=(-accel tcg,thread=multi)
packages=() qemu=() command=()
while [ $# -gt 0 ]; do
    case $1 in
    --shell) shell=1 ;;
    --two-hosts) hosts=2 ;;
    --timeout) timeout=$2; shift ;;
    --mtu) mtu=$2; shift ;;
    --cpus) cpus=$2; shift ;;
    --count-time) cpus=1 accelerator=(-accel tcg,thread=single -icount shift=1,sleep=off) ;;
    --memory) memory=$2; shift ;;
    --with) packages+=("$2"); shift ;;
    --out) out=$2; shift ;;
    --qemu) qemu+=("$2"); shift ;;
    --build) only_build=1 ;;
    --) shift; command=("$@"); break ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option $1" ;;
    esac
    shift
done
machine=$("$here/build.sh" "$cache" "${packages[@]}")
[ -z "$only_build" ] || { echo "$machine"; exit 0; }
[ -n "$shell" ] || [ ${#command[@]} -gt 0 ] || { usage >&2; die "no command"; }

mkdir -p "$cache/runs"
run=$(mktemp -d "$cache/runs/XXXXXX")
pids=() readers=()
clean() {
    [ ${#pids[@]} = 0 ] || kill "${pids[@]}" "${readers[@]}" 2>/dev/null || true
    rm -rf "$run"
}
trap clean EXIT
trap 'exit 130' INT TERM

# Runs machine number $1 to its end; its output goes through the named pipes in its folder.
boot() {
    local host=$1 dir=$run/host$1 extra=() limit=()
    local words="console=ttyS0 ${RDMA_VM_VERBOSE:-quiet} panic=-1 mitigations=off tsc=reliable random.trust_cpu=on net.ifnames=0 no_timer_check"
    words+=" lab.dir=$project lab.hosts=$hosts lab.host=$host lab.mtu=$mtu"
    if [ -n "$shell" ] && [ "$host" = 0 ]; then
        words+=" lab.shell=1"
        extra+=(-chardev stdio,id=terminal,signal=off -device virtconsole,chardev=terminal)
    else
        limit=(timeout --foreground --signal=KILL "$timeout")
        extra+=(-chardev "file,id=stdout,path=$dir/stdout" -device virtserialport,chardev=stdout,name=stdout)
        extra+=(-chardev "file,id=stderr,path=$dir/stderr" -device virtserialport,chardev=stderr,name=stderr)
    fi
    if [ "$hosts" = 2 ]; then
        # Both machines meet on a UNIX socket: no port of this host is taken. The name is relative, because the
        # kernel limits it to 107 bytes.
        local role=on
        [ "$host" = 0 ] || role=off
        extra+=(-netdev "stream,id=lan,server=$role,addr.type=unix,addr.path=lan")
        extra+=(-device "virtio-net-pci,netdev=lan,romfile=,mac=52:54:00:07:00:0$((host + 1))")
    fi
    cd "$run"
    exec "${limit[@]}" qemu-system-x86_64 "${accelerator[@]}" -cpu max -smp "$cpus" -m "$memory" \
        -nodefaults -no-user-config -no-reboot -display none -vga none \
        -kernel "$machine/vmlinuz" -initrd "$machine/initramfs" -append "$words" -serial "file:$dir/console" \
        -device virtio-serial-pci -device virtio-rng-pci \
        -virtfs "local,path=$dir/out,mount_tag=out,security_model=none,multidevs=remap" \
        -virtfs "local,path=$project,mount_tag=project,security_model=none,readonly=on,multidevs=remap" \
        "${extra[@]}" "${qemu[@]}"
}

# The command line as the machine's shell reads it back, word for word.
quoted=
for word in "${command[@]}"; do quoted+="'${word//\'/\'\\\'\'}' "; done
for ((host = 0; host < hosts; host++)); do
    dir=$run/host$host
    mkdir -p "$dir/out"
    mkfifo "$dir/stdout" "$dir/stderr"
    { echo "cd '$project'"; echo "exec ${quoted:-true}"; } >"$dir/out/command"
done
# Copies stream $2 of machine $1 to here, with the machine's name before each line when there are two.
copy() {
    if [ "$hosts" = 2 ]; then sed -u "s/^/host$1: /" "$run/host$1/$2"; else cat "$run/host$1/$2"; fi
}
readers=()
for ((host = 0; host < hosts; host++)); do
    if [ -z "$shell" ] || [ "$host" != 0 ]; then
        copy "$host" stdout & readers+=($!)
        copy "$host" stderr >&2 & readers+=($!)
    fi
    if [ -n "$shell" ] && [ "$host" = 0 ]; then
        (boot 0) <&3 3<&- & pids+=($!)
    else
        (boot "$host") </dev/null 3<&- & pids+=($!)
    fi
    # The second machine connects to the first one's socket.
    for ((i = 0; hosts == 2 && i < 100; i++)); do [ -S "$run/lan" ] && break; sleep 0.05; done
done 3<&0

# An emulated processor stands still now and then before the machine is up (once in some hundred boots, on a busy computer):
# nothing has run by then, so it is booted again.
is_up() {
    local host
    for ((host = 0; host < hosts; host++)); do
        [ -f "$run/host$host/out/up" ] || ! kill -0 "${pids[$host]}" 2>/dev/null || return 1
    done
}
boot_limit=${RDMA_VM_BOOT_LIMIT:-120}
for ((i = 0; i < boot_limit * 5; i++)); do is_up && break || sleep 0.2; done
if [ -z "$shell" ] && ! is_up; then
    [ "${RDMA_VM_BOOTS:-1}" -lt 3 ] || die "the machine did not come up in $boot_limit s, three times"
    say "the machine did not come up in $boot_limit s; its console said: $(tail -3 "$run/host0/console" 2>/dev/null || true); booting it again"
    clean
    wait "${pids[@]}" "${readers[@]}" 2>/dev/null || true
    RDMA_VM_BOOTS=$((${RDMA_VM_BOOTS:-1} + 1)) exec "$here/run.sh" "${arguments[@]}"
fi

result=0
for ((host = 0; host < hosts; host++)); do
    dir=$run/host$host
    ended=0
    wait "${pids[$host]}" || ended=$?
    # A reader whose machine never opened its pipe gets its end of file here.
    : <>"$dir/stdout" <>"$dir/stderr"
    if [ -f "$dir/out/status" ]; then
        status=$(cat "$dir/out/status")
    elif [ "$ended" = 137 ] || [ "$ended" = 124 ]; then
        say "host $host: ended after $timeout seconds (--timeout)"
        status=124
    else
        say "host $host: the machine ended without a result; its console said:"
        tail -20 "$dir/console" >&2 || true
        status=125
    fi
    [ "$result" != 0 ] || result=$status
    if [ -n "$out" ]; then
        mkdir -p "$out/host$host"
        cp -r "$dir/out/." "$out/host$host/"
        cp "$dir/console" "$out/host$host/"
    fi
done
pids=()
wait "${readers[@]}" 2>/dev/null || true
exit "$result"
