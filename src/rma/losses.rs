//! Puts that are dropped without an error, because an abort must not wait for them. The log reports them, once for each
//! rank.

use super::loud::say;

/// The losses of one group.
#[derive(Default)]
pub(crate) struct Losses {
    /// Ranks to which a put was dropped. Later ones are dropped, too: their signals would promise bytes that were
    /// dropped.
    ranks: Vec<u32>,
}

impl Losses {
    /// Whether puts to this rank are dropped.
    pub(crate) fn has(&self, rank: u32) -> bool {
        self.ranks.contains(&rank)
    }

    /// A put reads from memory whose registration has ended: NCCL's abort ends one window after another.
    pub(crate) fn source_has_ended(&mut self, rank: u32) {
        self.note(
            rank,
            &format!("a put to rank {rank} reads memory whose registration has ended"),
            "end a window after the puts from it",
        );
    }

    /// A rank has closed its side, as in an abort, before it had all puts.
    pub(crate) fn target_has_left(&mut self, rank: u32) {
        self.note(
            rank,
            &format!("rank {rank} has closed its side before a put to it was done"),
            "end a communicator when all ranks' puts are done",
        );
    }

    fn note(&mut self, rank: u32, what: &str, advice: &str) {
        if self.has(rank) {
            return;
        }
        self.ranks.push(rank);
        say(&format!(
            "{what}: neither it nor any later put or signal to that rank goes anywhere, and none fails, as an abort needs it; else \
             {advice}"
        ));
    }
}
