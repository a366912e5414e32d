//! This process's share of the host's processors, and how many threads and streams it allows.

use crate::os::cores::Cores;

/// The processors that this process may run on, and those of them that it does not share with other processes of its
/// job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    cores: usize,
    own: usize,
}

impl Share {
    /// Determines the share from the kernel's and the launcher's data.
    pub(crate) fn of_this_process() -> Self {
        let cores = Cores::of_this_process();
        Self { cores: cores.usable, own: cores.own() }
    }

    /// Whether there are so few processors that workers take more processor time from NCCL's threads and from other
    /// processes than they save.
    ///
    /// Measured with eight ranks on 16 cores, where one worker for each was too many. Without workers an all-reduce of
    /// 2 MiB takes 0.63 of the time and of 32 KiB 0.61, an all-gather of 2 MiB 0.62 and of 128 KiB less than half. With
    /// four ranks the opposite holds: without workers, operations take 1.4 to 1.6 times as long from 2 MiB on.
    fn is_small(self) -> bool {
        self.own <= 3
    }

    /// The largest number of worker threads: three quarters of the cores, since NCCL's own threads and the training
    /// program need the rest. Loopback TCP moves about 4 to 5 GB/s per core and direction, so a fast network needs
    /// many; idle workers sleep, and none is started before it is needed. On a 32-core host 24 was best. With 16,
    /// all-reduces of 4 to 64 MiB took 1.04 to 1.24 of the time. With 32, which left no core for NCCL's threads, they
    /// took two and a half times as long at 1 MiB.
    pub(crate) fn workers(self) -> usize {
        (self.own * 3 / 4).clamp(1, 24)
    }

    /// Whether workers poll for more work before they sleep. On very small machines that uses the core which the peer
    /// needs.
    pub(crate) fn has_time_to_poll(self) -> bool {
        self.cores > 4 && !self.is_small()
    }

    /// Streams of one connection over `rails` rails: one for short messages, and one for long ones on each rail.
    pub(crate) fn streams(self, rails: usize) -> usize {
        let automatic = if self.is_small() {
            // The caller's own thread is as fast as a hand-over to a worker that shares its core.
            1
        } else if self.cores < 8 {
            3
        } else {
            // With eight for long messages, all-reduces of 256 KiB to 512 MiB took 1.03 to 1.19 of the time on a
            // 32-core host. Each message went through more workers, and these were less often awake.
            1 + 4
        };
        automatic.max(if rails > 1 { 1 + rails } else { 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share on a host whose processes are not bound to processors.
    fn share(cores: usize, processes: usize) -> Share {
        Share { cores, own: Cores { usable: cores, bound: cores, shared: cores }.of_one_in(processes) }
    }

    #[test]
    fn a_process_alone_takes_most_of_its_host_and_many_take_their_part_each() {
        let workers = [(1, 1), (4, 1), (32, 1), (64, 1), (32, 2), (16, 4), (16, 8), (4, 8), (16, 0)];
        assert_eq!(workers.map(|(cores, n)| share(cores, n).workers()), [1, 3, 24, 24, 12, 3, 1, 1, 12]);
    }

    #[test]
    fn with_few_cores_for_each_one_stream_does_but_every_rail_has_its_own() {
        let of = |cores, processes, rails| share(cores, processes).streams(rails);
        assert_eq!([(2, 1), (4, 1), (8, 1), (16, 4), (16, 5), (16, 8)].map(|(c, n)| of(c, n, 1)), [1, 3, 5, 5, 1, 1]);
        assert_eq!([of(2, 1, 2), of(16, 8, 4), of(16, 1, 2), of(16, 1, 8)], [3, 5, 5, 9]);
        let looks = [(4, 1), (5, 1), (16, 4), (16, 5)].map(|(c, n)| share(c, n).has_time_to_poll());
        assert_eq!(looks, [false, true, true, false]);
    }
}
