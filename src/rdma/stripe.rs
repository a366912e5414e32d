//! How a message is divided over the queue pairs of a connection.
//!
//! The queue pairs of a connection are numbered so that neighbours are on different devices: queue pair l is on device
//! l modulo the number of devices. A message uses either all queue pairs (`NCCL_IB_SPLIT_DATA_ON_QPS=1`) or one of each
//! device, in turn. Of those it uses no more than it has [`SHARE_MIN`] for, so that a short message is one write.
//!
//! Lost queue pairs are left out, as if they had never existed ([`Stripes::over`]).
//!
//! Shares start at multiples of 128 bytes from the message's start: with NCCL's LL128 protocol the GPU polls flags in
//! every 128 bytes while the buffer is being filled.

/// Shares start at multiples of this many bytes.
pub(crate) const ALIGN: u64 = 128;

/// A message is divided only so far that every share has this many bytes. Below that, the second work request costs
/// more than a second link saves (at 400 Gbit/s 8 KiB take 0.16 µs, about what posting and completing a request takes).
const SHARE_MIN: u64 = 8 << 10;

/// The most queue pairs of a connection: the largest count of shares in an immediate.
pub(crate) const MAX_QPS: usize = 128;

/// The queue pairs of a connection, and which is next.
#[derive(Debug, Clone)]
pub(crate) struct Stripes {
    /// Those that are used, in their order.
    order: Vec<usize>,
    /// The devices of the connection, and how many of them are left.
    all_devices: usize,
    devices: usize,
    split: bool,
    turn: usize,
}

/// The share of a message that one queue pair carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    /// The queue pair: its position among those that are used.
    pub qp: usize,
    /// Where the share starts in the message.
    pub offset: u64,
    /// Its bytes; 0 only for an empty message.
    pub length: u64,
}

/// The shares of a message, in order of their place in it.
#[derive(Debug, Clone)]
pub(crate) struct Shares {
    length: u64,
    piece: u64,
    count: usize,
    next: usize,
    first: usize,
    /// Queue pairs that may be used, from `base` on.
    group: usize,
    base: usize,
}

impl Stripes {
    /// `qps` queue pairs over `devices` devices; both at least 1, the first a multiple of the second.
    pub(crate) fn new(qps: usize, devices: usize, split: bool) -> Self {
        debug_assert!((1..=MAX_QPS).contains(&qps) && qps.is_multiple_of(devices));
        Self { order: (0..qps).collect(), all_devices: devices, devices, split, turn: 0 }
    }

    /// From now on messages use these queue pairs, at least one, in ascending order.
    pub(crate) fn over(&mut self, qps: impl Iterator<Item = usize>) {
        self.order.clear();
        self.order.extend(qps);
        debug_assert!(!self.order.is_empty());
        let mut devices: Vec<usize> = self.order.iter().map(|qp| qp % self.all_devices).collect();
        devices.sort_unstable();
        devices.dedup();
        self.devices = devices.len();
        self.turn = 0;
    }

    /// The queue pair that a [`Share::qp`] means: shares count only queue pairs that are used.
    #[inline]
    pub(crate) fn qp(&self, position: usize) -> usize {
        self.order[position]
    }

    /// Divides a message of `length` bytes, and advances to the next queue pair.
    #[inline]
    pub(crate) fn share(&mut self, length: u64) -> Shares {
        if self.order.len() == 1 {
            return Shares { length, piece: length, count: 1, next: 0, first: 0, group: 1, base: 0 };
        }
        let (group, base, first) = if self.split {
            (self.order.len(), 0, self.turn)
        } else {
            // The turn passes through all queue pairs: short messages use every device, and one group after the other.
            // The last group may be smaller when queue pairs were lost.
            let base = self.turn / self.devices * self.devices;
            (self.devices.min(self.order.len() - base), base, self.turn - base)
        };
        let most = usize::try_from(length / SHARE_MIN).unwrap_or(usize::MAX).clamp(1, group);
        let piece = length.div_ceil(most as u64).next_multiple_of(ALIGN);
        let count = if length == 0 { 1 } else { length.div_ceil(piece) as usize };
        // Within a group the devices take turns; a message that reaches the group's end passes the turn to the next
        // one.
        let step = if self.split { count } else { count.min(group - first) };
        self.turn += step;
        if self.turn >= self.order.len() {
            self.turn %= self.order.len();
        }
        Shares { length, piece, count, next: 0, first, group, base }
    }
}

impl Shares {
    /// How many shares there are.
    pub(crate) fn pieces(&self) -> usize {
        self.count
    }

    /// The queue pair of the first one, as [`Share::qp`].
    #[inline]
    pub(crate) fn first_qp(&self) -> usize {
        self.base + self.first
    }

    /// Bytes of the longest one.
    #[inline]
    pub(crate) fn longest(&self) -> u64 {
        self.piece.min(self.length)
    }
}

impl Iterator for Shares {
    type Item = Share;

    #[inline]
    fn next(&mut self) -> Option<Share> {
        if self.next == self.count {
            return None;
        }
        let offset = self.piece * self.next as u64;
        // Less than twice the group: its queue pairs once around.
        let turn = self.first + self.next;
        let qp = self.base + if turn < self.group { turn } else { turn - self.group };
        self.next += 1;
        Some(Share { qp, offset, length: self.piece.min(self.length - offset) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shares_cover_the_message_once_in_order_on_different_qps(
            devices in 1..=8_usize, per_device in 1..=16_usize, split: bool, lost in prop::collection::vec(any::<bool>(), 128),
            lengths in prop::collection::vec(prop_oneof![0..5000_u64, 0..1_u64 << 22, 0..1_u64 << 42], 1..50),
        ) {
            let qps = devices * per_device;
            let mut stripes = Stripes::new(qps, devices, split);
            let living: Vec<usize> = (0..qps).filter(|qp| *qp == 0 || !lost[*qp] || lost[127]).collect();
            if living.len() < qps {
                stripes.over(living.iter().copied());
            }
            for length in lengths {
                let all = stripes.share(length);
                let (longest, first_qp) = (all.longest(), all.first_qp());
                let shares: Vec<Share> = all.map(|share| Share { qp: stripes.qp(share.qp), ..share }).collect();
                prop_assert_eq!(Some(longest), shares.iter().map(|share| share.length).max());
                prop_assert_eq!(stripes.qp(first_qp), shares[0].qp);
                let mut at = 0;
                let mut seen = vec![false; qps];
                prop_assert!(shares.iter().all(|share| living.contains(&share.qp)), "a lost queue pair");
                for share in &shares {
                    prop_assert_eq!(share.offset, at);
                    prop_assert_eq!(share.offset % ALIGN, 0);
                    prop_assert!(share.length > 0 || length == 0);
                    prop_assert!(shares.len() == 1 || share.length >= SHARE_MIN || at + share.length == length);
                    prop_assert!(!std::mem::replace(&mut seen[share.qp], true), "a queue pair carries two shares");
                    at += share.length;
                }
                prop_assert_eq!(at, length);
                if !split && living.len() == qps {
                    let group = shares[0].qp / devices;
                    prop_assert!(shares.iter().all(|share| share.qp / devices == group), "one queue pair per device");
                }
            }
        }

        #[test]
        fn every_qp_gets_its_turn(
            devices in 1..=8_usize, per_device in 1..=16_usize, split: bool, length in 0..1_u64 << 24,
            lost in prop::option::of(0..128_usize),
        ) {
            let qps = devices * per_device;
            let mut stripes = Stripes::new(qps, devices, split);
            let lost = lost.filter(|lost| *lost < qps && qps > 1);
            if let Some(lost) = lost {
                stripes.over((0..qps).filter(|qp| *qp != lost));
            }
            let mut bytes = vec![0; qps];
            for _ in 0..qps * 2 {
                stripes.share(length.max(1)).for_each(|share| bytes[stripes.qp(share.qp)] += share.length);
            }
            prop_assert!(bytes.iter().enumerate().all(|(qp, bytes)| (*bytes > 0) != (Some(qp) == lost)), "{:?}", bytes);
        }
    }
}
