//! The time that events are stamped with: CLOCK_MONOTONIC in nanoseconds, the same for all processes of a host.

/// Now.
#[inline]
pub fn now() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// How far the wall clock is ahead of [`now`], in nanoseconds. Good for a first guess between hosts, no more.
pub fn wall_offset() -> i64 {
    // The smallest of a few differences is the one least disturbed in between.
    (0..5)
        .map(|_| {
            let before = now();
            let wall = read(libc::CLOCK_REALTIME);
            let after = now();
            (after - before, wall as i64 - ((before + after) / 2) as i64)
        })
        .min()
        .map_or(0, |(_, offset)| offset)
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer; both clocks exist on every Linux.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
