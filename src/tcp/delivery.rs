//! Whether streams deliver what they carry.
//!
//! On some paths small packets pass and full ones do not. For example, the hosts have an MTU of 9000, a switch between
//! them has 1500, and no ICMP message reports it. A firewall or a proxy may also let handshakes pass and stop data.
//! There every stream connects, delivers nothing, and is lost; without this module it would be connected again for
//! ever.
//!
//! - An epoch of a stream is **in vain** if it ended with unacknowledged frames and either ended by silence or
//!   delivered nothing. Epochs in vain are counted for each pair of rails. After the first, one that ended by silence
//!   counts only if a handshake had passed on the pair since the last that counted, `PROVEN` or more before the end: in
//!   an outage no handshake passes. Those that ended otherwise within a second count once. The first frame of 16 KiB or
//!   more that arrives on the pair clears the count; shorter ones pass anyhow.
//! - After two such epochs that ended by silence, the next ones over that pair begin with smaller segments
//!   (`SEGMENTS`). That is sooner than the kernel's own cure (`net.ipv4.tcp_mtu_probing=1`), which takes 3 to 6 s. A
//!   stream whose silence was interrupted stays connected long enough for that cure: its segments become smaller
//!   meanwhile, and then long frames arrive. That proves the same as an epoch with smaller segments that delivers.
//! - After four epochs in vain the pair is left out: its streams go over others. Where no other is left, the next epoch
//!   has `LAST_RESORT`, so that the kernel's cure has its time.
//! - From the first epoch in vain on, a clock runs until a frame arrives on any stream; a handshake does not stop it.
//!   Once the clock exceeds the patience for the peer, the connection ends with the next epoch in vain.
//!
//! None of this is on the path of a message: the control thread reads counters while it watches the streams.

use std::time::{Duration, Instant};

use crate::session::frame::MAX_STREAMS;

/// The values of `TCP_MAXSEG` that are tried in turn, in bytes. 1220: IPv6 requires a path to carry 1280, 60 of which
/// are headers. 536: a host accepts 576 over IPv4, 40 of which are headers.
const SEGMENTS: [u32; 2] = [1220, 536];

/// A stream that is silent for this long after a handshake on its path has another reason than an outage. The
/// retransmission timer of a stream that was silent for 2.3 s fires at least every 0.8 s.
const PROVEN: Duration = Duration::from_millis(1500);

/// How long an epoch may stay silent when no other path is left. The kernel tries a smaller MTU after 6 s.
const LAST_RESORT: Duration = Duration::from_secs(15);

/// How an epoch of a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Nothing came back for this long.
    Silent(Duration),
    /// Any other way.
    Cut,
}

/// The conclusion from the end of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lesson {
    /// No conclusion.
    None,
    /// The pair is left out from now on.
    LeftOut,
    /// Nothing has been delivered for this long, and the patience for the peer is over.
    Over(Duration),
}

/// How many frames of a stream have arrived, through all its epochs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Arrived {
    /// All of them.
    pub frames: u64,
    /// Those that need packets of full size.
    pub long: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Epoch {
    pair: Option<usize>,
    /// `TCP_MAXSEG` with which the epoch began.
    segment: Option<u32>,
    /// The largest segments that the kernel used.
    largest: u32,
    /// The frames that had arrived at the last check.
    seen: Arrived,
    delivered: bool,
    /// A long frame has arrived.
    delivered_long: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct RailPair {
    /// Epochs in vain since a long frame arrived, and how many of them ended by silence.
    in_vain: u32,
    silent: u32,
    /// When the last one was counted.
    counted: Option<Instant>,
    /// When the last epoch began.
    begun: Option<Instant>,
    /// How many of [`SEGMENTS`] are or were in use.
    smaller: usize,
    left_out: bool,
}

#[derive(Debug, Clone, Copy)]
struct Stall {
    since: Instant,
    until: Instant,
}

/// What the streams of one sending connection deliver. The caller provides the time.
#[derive(Debug)]
pub(crate) struct Deliveries {
    epochs: [Epoch; MAX_STREAMS],
    pairs: Vec<RailPair>,
    stall: Option<Stall>,
}

impl Deliveries {
    /// A connection with this many paths to its peer.
    pub(crate) fn new(pairs: usize) -> Self {
        Self { epochs: Default::default(), pairs: vec![RailPair::default(); pairs], stall: None }
    }

    /// An epoch of stream `index` begins over a pair of rails, if that is known; `seen`: what had arrived before.
    pub(crate) fn begins(&mut self, index: usize, pair: Option<usize>, seen: Arrived, now: Instant) {
        let segment = pair.and_then(|pair| self.segment(pair));
        if let Some(pair) = pair.and_then(|pair| self.pairs.get_mut(pair)) {
            pair.begun = Some(now);
        }
        self.epochs[index] = Epoch { pair, segment, seen, ..Epoch::default() };
    }

    /// The control thread's count for stream `index`; `using`: the size of its segments, if that is known. Returns the
    /// pair and the segment size that deliver where full segments did not.
    pub(crate) fn reached(&mut self, index: usize, arrived: Arrived, using: Option<u32>) -> Option<(usize, u32)> {
        let epoch = &mut self.epochs[index];
        epoch.largest = epoch.largest.max(using.unwrap_or(0));
        let (some, long) = (arrived.frames > epoch.seen.frames, arrived.long > epoch.seen.long);
        if some {
            epoch.delivered = true;
            self.stall = None;
        }
        epoch.seen = arrived;
        if !long {
            return None;
        }
        let is_first = !std::mem::replace(&mut epoch.delivered_long, true);
        let at = epoch.pair?;
        let pair = self.pairs.get_mut(at)?;
        let shrunk = using.filter(|using| pair.in_vain > 0 && *using < epoch.largest);
        (pair.in_vain, pair.silent, pair.counted) = (0, 0, None);
        // The kernel's own cure begins with 1024 (`net.ipv4.tcp_base_mss`) and grows later, so a size below 1220 does
        // not mean that 1220 is too much.
        let cured = shrunk.map(|using| SEGMENTS[usize::from(using < 1024)]);
        epoch.segment.or(cured).filter(|_| is_first).map(|segment| (at, segment))
    }

    /// The epoch of stream `index` ended with frames in doubt. `patience`: how long the peer may stay away after such
    /// an end.
    pub(crate) fn ended(&mut self, index: usize, now: Instant, how: End, patience: Duration) -> Lesson {
        let epoch = &mut self.epochs[index];
        let silence = match how {
            End::Silent(silence) => silence,
            End::Cut if epoch.delivered => return Lesson::None,
            End::Cut => Duration::ZERO,
        };
        let since = self.stall.map_or_else(|| now.checked_sub(silence).unwrap_or(now), |stall| stall.since);
        let is_first = self.stall.replace(Stall { since, until: since + patience }).is_none();
        // The first epoch in vain may be an outage that was noticed late. It is not known yet whether later epochs
        // deliver.
        if !is_first && now >= since + patience {
            return Lesson::Over(now - since);
        }
        let Epoch { pair: Some(at), segment, .. } = *epoch else { return Lesson::None };
        let current = self.segment(at);
        let Some(pair) = self.pairs.get_mut(at) else { return Lesson::None };
        if let Some(counted) = pair.counted {
            let begun = pair.begun.unwrap_or(counted);
            let counts = match how {
                End::Silent(_) => begun > counted && now.saturating_duration_since(begun) >= PROVEN,
                // Streams that are cut within a second count once: the cause may have passed by then.
                End::Cut => now.saturating_duration_since(counted) >= Duration::from_secs(1),
            };
            if !counts {
                return Lesson::None;
            }
            // An epoch of a minute ends for another reason than those before it.
            if now.saturating_duration_since(begun) >= Duration::from_secs(60) {
                (pair.in_vain, pair.silent) = (0, 0);
            }
        }
        pair.counted = Some(now);
        pair.in_vain += 1;
        pair.silent += u32::from(matches!(how, End::Silent(_)));
        // Another stream may have switched to the next size since this epoch began.
        if pair.silent >= 2 && segment == current {
            pair.smaller = (pair.smaller + 1).min(SEGMENTS.len());
        }
        // Two epochs with the path's own segments, and one with each of `SEGMENTS`.
        if pair.in_vain as usize >= 2 + SEGMENTS.len() && !pair.left_out {
            pair.left_out = true;
            return Lesson::LeftOut;
        }
        Lesson::None
    }

    /// `TCP_MAXSEG` for new streams over a pair of rails. None: the path's own.
    pub(crate) fn segment(&self, pair: usize) -> Option<u32> {
        SEGMENTS.get(self.pairs.get(pair)?.smaller.checked_sub(1)?).copied()
    }

    /// Whether streams go over other pairs than this one.
    pub(crate) fn is_left_out(&self, pair: usize) -> bool {
        let left_out = |pair: &RailPair| pair.left_out;
        self.pairs.get(pair).is_some_and(left_out) && !self.pairs.iter().all(left_out)
    }

    /// How long a stream may stay silent beyond the usual time.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        let last_resort = !self.pairs.is_empty() && self.pairs.iter().all(|pair| pair.left_out);
        let rest = self.stall.map(|stall| stall.until.saturating_duration_since(now));
        rest.filter(|rest| last_resort && !rest.is_zero()).map_or(Duration::ZERO, |_| LAST_RESORT)
    }

    /// How long to wait before stream `index` is connected again: 50 ms for each epoch in vain, at most 1 s.
    pub(crate) fn pause(&self, index: usize) -> Duration {
        let pair = self.epochs[index].pair.and_then(|pair| self.pairs.get(pair));
        Duration::from_millis(50) * pair.map_or(0, |pair| pair.in_vain.min(20))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SILENT: End = End::Silent(Duration::from_millis(2300));
    const PATIENCE: Duration = Duration::from_secs(60);

    /// This many frames, each long.
    fn long(frames: u64) -> Arrived {
        Arrived { frames, long: frames }
    }

    /// Epochs of one stream, each lost after 2.4 s of silence; the conclusion, and the segments of the next epoch.
    fn lose(deliveries: &mut Deliveries, start: Instant, epochs: u32) -> Vec<(Lesson, Option<u32>)> {
        let epoch = |number: u32| {
            deliveries.begins(0, Some(0), long(7), start + 2400 * MS * (number - 1) + MS);
            let lesson = deliveries.ended(0, start + 2400 * MS * number, SILENT, PATIENCE);
            (lesson, deliveries.segment(0))
        };
        (1..=epochs).map(epoch).collect()
    }

    #[test]
    fn segments_become_smaller_after_the_second_epoch_in_vain_and_then_the_pair_is_left_out() {
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(2));
        let learnt = lose(&mut deliveries, start, 4);
        let expected =
            [(Lesson::None, None), (Lesson::None, Some(1220)), (Lesson::None, Some(536)), (Lesson::LeftOut, Some(536))];
        assert_eq!(learnt, expected);
        assert!(deliveries.is_left_out(0) && !deliveries.is_left_out(1) && deliveries.segment(1).is_none());
    }

    #[test]
    fn smaller_segments_that_deliver_stay_and_are_told_of_once() {
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
        lose(&mut deliveries, start, 2);
        deliveries.begins(0, Some(0), long(7), start + 4801 * MS);
        assert_eq!(deliveries.reached(0, long(7), None), None, "nothing has arrived");
        assert_eq!(deliveries.reached(0, Arrived { frames: 8, long: 7 }, None), None, "short frames pass anyhow");
        assert_eq!(deliveries.reached(0, long(8), None), Some((0, 1220)));
        assert_eq!(deliveries.reached(0, long(9), None), None);
        // An outage long after that: the path's own segments do not pass now either.
        assert_eq!(deliveries.ended(0, start + PATIENCE * 3, SILENT, PATIENCE), Lesson::None);
        assert_eq!(deliveries.segment(0), Some(1220));
    }

    /// With `net.ipv4.tcp_mtu_probing=1`, while another stream's silence was the second in vain.
    #[test]
    fn the_kernels_own_cure_teaches_the_same() {
        for (using, expected) in [(1024, Some((0, 1220))), (1423, Some((0, 1220))), (512, Some((0, 536))), (8948, None)]
        {
            let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
            deliveries.begins(1, Some(0), long(0), start);
            assert_eq!(deliveries.reached(1, long(0), Some(8948)), None);
            lose(&mut deliveries, start, 1);
            assert_eq!(deliveries.reached(1, long(1), Some(using)), expected, "{using}");
            assert_eq!(deliveries.reached(1, long(2), Some(using)), None, "once");
        }
        // Smaller segments without an epoch in vain: a router has reported its MTU.
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
        deliveries.begins(0, Some(0), long(0), start);
        assert_eq!(deliveries.reached(0, long(0), Some(8948)), None);
        assert_eq!(deliveries.reached(0, long(1), Some(1448)), None);
    }

    #[test]
    fn where_there_is_one_way_it_stays_and_the_kernels_own_cure_has_its_time() {
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
        assert_eq!(deliveries.silence(start), Duration::ZERO);
        lose(&mut deliveries, start, 4);
        assert!(!deliveries.is_left_out(0), "there is no other");
        assert_eq!(deliveries.silence(start + 10_000 * MS), LAST_RESORT);
        assert_eq!(deliveries.silence(start + PATIENCE * 2), Duration::ZERO, "but not for ever");
    }

    #[test]
    fn an_outage_that_is_noticed_late_is_not_the_end() {
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
        deliveries.begins(0, Some(0), long(0), start);
        assert_eq!(deliveries.ended(0, start, End::Silent(PATIENCE * 2), PATIENCE), Lesson::None);
        deliveries.begins(0, Some(0), long(0), start);
        assert_eq!(deliveries.reached(0, Arrived { frames: 1, long: 0 }, None), None);
        assert_eq!(deliveries.ended(0, start + PATIENCE, SILENT, PATIENCE), Lesson::None);
    }

    #[test]
    fn streams_that_are_lost_together_teach_one_lesson() {
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
        for epoch in 1..=2 {
            (0..4).for_each(|index| deliveries.begins(index, Some(0), long(0), start + 2400 * MS * (epoch - 1) + MS));
            (0..4).for_each(|index| {
                deliveries.ended(index, start + 2400 * MS * epoch, SILENT, PATIENCE);
            });
        }
        assert_eq!(deliveries.segment(0), Some(1220));
    }

    /// The path may have been out until that handshake.
    #[test]
    fn a_silence_that_ends_soon_after_another_streams_handshake_teaches_nothing_yet() {
        for (late, expected) in [(800, Some(1220)), (1000, None)] {
            let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
            lose(&mut deliveries, start, 1);
            deliveries.begins(0, Some(0), long(7), start + 2401 * MS);
            deliveries.begins(1, Some(0), long(7), start + MS * (2400 + late));
            deliveries.ended(0, start + 4800 * MS, SILENT, PATIENCE);
            assert_eq!(deliveries.segment(0), expected, "{late} ms");
        }
    }

    /// A message goes from stream to stream: each is silent once, while others reconnect.
    #[test]
    fn streams_that_are_silent_by_turns_teach_what_one_does() {
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
        (0..3).for_each(|index| deliveries.begins(index, Some(0), long(0), start));
        (1..3).for_each(|index| {
            deliveries.ended(index, start + 10_000 * MS, SILENT, PATIENCE);
            deliveries.begins(index, Some(0), long(0), start + 10_050 * MS);
        });
        deliveries.ended(0, start + 12_400 * MS, SILENT, PATIENCE);
        assert_eq!(deliveries.segment(0), Some(1220));
    }

    /// Streams notice an outage at different times, and no handshake passes in between.
    #[test]
    fn an_outage_that_streams_notice_one_after_the_other_makes_no_segment_smaller() {
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
        (0..8).for_each(|index| deliveries.begins(index, Some(0), long(0), start));
        for index in 0..7 {
            deliveries.ended(index, start + 10_000 * MS + 1200 * MS * index as u32, SILENT, PATIENCE);
        }
        // The path works again, and this side gives up a stream whose timer has not fired yet.
        deliveries.begins(0, Some(0), long(0), start + 20_000 * MS);
        deliveries.ended(7, start + 20_800 * MS, SILENT, PATIENCE);
        assert_eq!((deliveries.segment(0), deliveries.silence(start + 21_000 * MS)), (None, Duration::ZERO));
    }

    #[test]
    fn a_stream_that_is_cut_after_it_delivered_teaches_nothing() {
        let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
        for epoch in 1..=100_u32 {
            deliveries.begins(0, Some(0), long(u64::from(epoch)), start + 10_000 * MS * (epoch - 1));
            deliveries.reached(0, long(u64::from(epoch) + 1), None);
            assert_eq!(deliveries.ended(0, start + 10_000 * MS * epoch, End::Cut, PATIENCE), Lesson::None);
        }
        assert_eq!((deliveries.segment(0), deliveries.pause(0)), (None, Duration::ZERO));
    }

    proptest! {
        /// If no frame arrives, the connection ends with the first epoch that ends after the patience is over. It does
        /// not matter how the epochs end or what connects in between. Cuts alone make no segment smaller.
        #[test]
        fn a_handshake_stops_no_clock(ends in proptest::collection::vec((1..5000_u64, any::<bool>()), 200..300)) {
            let (start, mut deliveries) = (Instant::now(), Deliveries::new(1));
            let only_cuts = ends.iter().all(|(_, silent)| !silent);
            let (mut now, mut first, mut over) = (start + PATIENCE, None, false);
            for (length, silent) in ends {
                deliveries.begins(0, Some(0), long(7), now);
                now += MS * length as u32;
                let how = if silent { End::Silent(MS * length as u32) } else { End::Cut };
                let since = *first.get_or_insert(if silent { now - MS * length as u32 } else { now });
                let lesson = deliveries.ended(0, now, how, PATIENCE);
                over |= matches!(lesson, Lesson::Over(_));
                prop_assert_eq!(over, now >= since + PATIENCE);
            }
            prop_assert!(!only_cuts || deliveries.segment(0).is_none());
        }

        /// As long as each epoch delivers something, nothing ends and no path is left out.
        #[test]
        fn epochs_that_deliver_are_recoveries(ends in proptest::collection::vec((1..50_000_u64, any::<bool>()), 1..300)) {
            let (start, mut deliveries) = (Instant::now(), Deliveries::new(2));
            let (mut now, mut frames) = (start + PATIENCE, 0);
            for (length, silent) in ends {
                deliveries.begins(0, Some(0), long(frames), now);
                frames += 1;
                prop_assert!(deliveries.reached(0, long(frames), None).is_none());
                now += MS * length as u32;
                let how = if silent { SILENT } else { End::Cut };
                prop_assert_eq!(deliveries.ended(0, now, how, PATIENCE), Lesson::None);
                prop_assert!(deliveries.segment(0).is_none() && !deliveries.is_left_out(0));
            }
        }
    }
}
