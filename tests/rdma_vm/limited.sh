#!/bin/bash
# Runs a command in the test machine, for so many seconds at most. When it takes longer, says what every process waits
# for, in the kernel too, and ends it: a process that hangs inside the kernel heeds neither its own watchdog nor a signal.
#
#   tests/rdma_vm/limited.sh SECONDS COMMAND [ARGUMENT…]
#
# The exit status is the command's; 124 when it took too long.
limit=$1
shift

# What the threads of every process do: state, place in the kernel, system call with its arguments.
report() {
    local process task
    for process in /proc/[0-9]*; do
        # Kernel threads have no command line; the kernel reports those that are blocked below.
        [ -n "$(tr -d '\0' <"$process/cmdline" 2>/dev/null)" ] || continue
        printf -- '-- process %s: %s\n' "${process##*/}" "$(tr '\0' ' ' <"$process/cmdline")"
        for task in "$process"/task/*; do
            printf 'thread %s (%s), %s, system call %s\n' "${task##*/}" "$(<"$task/comm")" \
                "$(sed -n 's/^State:\t//p' "$task/status")" "$(<"$task/syscall")"
            sed 's/^/    /' "$task/stack"
        done
    done 2>/dev/null
    echo "-- what the processors do, what is blocked in the kernel, and its words about such things:"
    echo l >/proc/sysrq-trigger
    echo w >/proc/sysrq-trigger
    sleep 1
    dmesg | grep -i -A 40 'lockup\|stall' | head -n 120
    dmesg | sed -n '/sysrq: Show backtrace/,$p'
}

# Seconds since the start of the machine; tests set its clock.
uptime() { read -r up _ </proc/uptime && echo "${up%.*}"; }

"$@" &
child=$!
end=$(($(uptime) + limit))
while kill -0 "$child" 2>/dev/null; do
    if [ "$(uptime)" -ge "$end" ]; then
        printf 'HANGS: after %s s: %s\n' "$limit" "$*"
        report
        kill -KILL "$child"
        # Whoever waits for one that hangs in the kernel waits for ever.
        exit 124
    fi
    sleep 0.2
done
wait "$child"
