//! The limit for damaged chunks: a chunk that arrives damaged is resent, but not for ever.
//!
//! Bits that flip at random do not hit the same chunk twice. If a chunk arrives damaged again and again, there is
//! broken hardware on its path, or an attacker who modifies the traffic: further attempts would only hide it.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::counters::Counters;
use crate::os::error::Error;
use crate::os::log::{Limiter, NET};
use crate::session::peer::{Broken, Peer};

/// How often the same chunk may arrive damaged within a minute.
pub(crate) const MOST_REPEATS: u32 = 8;
/// How many chunks are remembered, at most; more than that within a minute also exceed the limit.
const CHUNKS: usize = 256;

/// Which chunk is damaged: tag, order and offset of the chunk, or None for a header.
pub(crate) type ChunkId = Option<(i32, u64, u64)>;

/// The chunks that have arrived damaged recently on one connection.
#[derive(Debug, Default)]
pub(crate) struct Damage(Mutex<Recent>);

static REPORTED: Limiter = Limiter::new();

impl Damage {
    /// Something arrived damaged: counts and logs it, and decides how to go on. With recovery the stream is reconnected
    /// and lost data is resent. Without recovery, or when damage occurs again and again, the connection ends.
    pub(crate) fn found(&self, chunk: ChunkId, recovery: bool, peer: &Peer, counters: &Counters) -> Broken {
        Counters::bump(&counters.damaged);
        let is_tolerable = self.0.lock().unwrap_or_else(PoisonError::into_inner).note(chunk, Instant::now());
        if recovery && is_tolerable {
            REPORTED.tell(|more| {
                tracing::warn!(target: NET, "data from {peer} arrived damaged or was changed on its way; it travels again{more}");
            });
            return Broken::Lost(io::Error::new(io::ErrorKind::InvalidData, "data arrived damaged"));
        }
        let hint = if recovery {
            "that happened again and again: look for a failing network card, cable, switch or memory, or a middlebox"
        } else {
            "with TOWLINE_RECOVERY=1 it would travel again; look for a failing network card, cable, switch or memory"
        };
        let what = "data arrived damaged or was changed on its way (its checksum or tag is wrong)";
        Broken::Fatal(Error::remote(what).with_hint(hint))
    }
}

#[derive(Debug, Default)]
struct Recent(HashMap<ChunkId, (u32, Instant)>);

impl Recent {
    /// Something arrived damaged. Returns whether that is still within the limit.
    fn note(&mut self, chunk: ChunkId, now: Instant) -> bool {
        self.0.retain(|_, (_, last)| now.duration_since(*last) < Duration::from_secs(60));
        let (count, last) = self.0.entry(chunk).or_insert((0, now));
        *count += 1;
        *last = now;
        *count < MOST_REPEATS && self.0.len() < CHUNKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_chunk_again_and_again_is_too_much() {
        let mut damage = Recent::default();
        let start = Instant::now();
        for _ in 1..MOST_REPEATS {
            assert!(damage.note(Some((0, 7, 128)), start));
            assert!(damage.note(None, start));
        }
        assert!(damage.note(Some((0, 7, 256)), start), "another chunk");
        assert!(!damage.note(Some((0, 7, 128)), start));
    }

    #[test]
    fn old_damage_is_forgotten() {
        let mut damage = Recent::default();
        let start = Instant::now();
        for hour in 0..100 {
            assert!(damage.note(None, start + Duration::from_secs(3600 * hour)));
        }
        assert_eq!(damage.0.len(), 1);
    }

    #[test]
    fn very_many_damaged_chunks_are_too_much_and_memory_is_bounded() {
        let mut damage = Recent::default();
        let start = Instant::now();
        let tolerated = (0..10_000).take_while(|order| damage.note(Some((0, *order, 0)), start)).count();
        assert_eq!(tolerated, CHUNKS - 1);
    }
}
