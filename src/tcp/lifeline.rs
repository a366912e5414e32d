//! Whether a peer is dead or only cut off, when all streams of a connection have ended.
//!
//! The end of a stream says little: the kernel sends the same when a process dies, when somebody resets the stream, and
//! when a firewall answers for the peer. And a process that is stopped, or gets no processor, cannot say that it lives.
//! But its kernel does: it accepts connections for every process that lives, in whatever state, and refuses them from
//! the moment of its death on. So each side knows the **lifelines** of the other, its process's listening sockets, one
//! per rail: the connecting side's handle and welcome name the listener's, and its hello names its own.
//!
//! The sender asks them anyhow when it connects its streams again. The receiver cannot connect streams, so it **calls**:
//! it connects to every lifeline and says in a handshake (wish *call*) which stream has ended here. That finds out
//! whether the peer lives, and tells it, who may not know: a reset may reach one side only.
//!
//! What the answers mean, and why:
//!
//! | answer | means | then |
//! |---|---|---|
//! | accepted by the kernel | the process lives, or another has its port now | waits on, up to `TOWLINE_PEER_TIMEOUT`: nobody is given up for being late |
//! | refused; reset or closed in the handshake; something else than Towline talks there | no such process, one that knows nothing of the connection, or a firewall that answers for it | dead, when all of them say so long enough |
//! | none, or unreachable | nothing | waits as for a silent network, `TOWLINE_RECONNECT_TIMEOUT` |
//!
//! - **A refusal alone proves nothing**: a firewall that rejects with resets refuses just so, and is then what ended the
//!   streams as well. It is believed when it comes over every rail, [`REFUSALS`] times in a row, and for as long as the
//!   ends of the streams make likely ([`Terms::refused_for`]). A firewall that rejects everything on every rail for longer
//!   than that cannot be told from a death that must be noticed within a second.
//! - **Who accepts need not prove itself** for being waited for: a stopped process could not. If a stranger has the port,
//!   the price is a longer wait, with an end. A call is believed, and a goodbye to the connection is, only with a proof of
//!   the connection's key, like every handshake.
//! - **An accepted call is kept open** until it is answered: should the process die after all, its kernel resets it.
//! - **This process may have been stopped itself**: a deadline that is long over when it is looked at is put off once
//!   more, so that what came meanwhile is seen first. That is why refusals are counted, too.
//!
//! A forked child holds no listening socket ([`crate::os::fork`]), so it hides no death. Strangers who connect to the
//! same port are the acceptor's affair; when they fill the kernel's queue, that reads as silence.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::os::error::Error;

/// The first call comes this long after the end of the last stream: a sender that lives and knows is back before.
pub const CALL_AFTER: Duration = Duration::from_millis(100);

/// From one refusal to the next call.
pub const CALL_AGAIN: Duration = Duration::from_millis(100);

/// After a call that was heard the sender connects at once. If it does not, it is called again.
pub const HEARD_PAUSE: Duration = Duration::from_millis(500);

/// How long an accepted call is kept open. The other side lets go after as long.
pub const HOLD: Duration = super::acceptor::PATIENCE;

/// Refusals in a row on a way, at least.
pub const REFUSALS: u32 = 3;

/// Those that come closer together count once: several streams may be connected at a time.
const APART: Duration = Duration::from_millis(50);

/// How long a peer may refuse whose streams were cut.
pub const CUT_PATIENCE: Duration = Duration::from_millis(800);

/// The same after an end of file. That comes from the peer's kernel, not from a firewall, and a peer that lives ends no
/// stream so without a goodbye, unless it has just abandoned a try to connect, or a damaged stream.
pub const ENDED_PATIENCE: Duration = Duration::from_millis(400);

/// All streams of a process that dies have ended within this time, however busy this side is.
const END_OF_ALL: Duration = Duration::from_secs(1);

/// A deadline that is looked at so long after it was over was missed by a process that did not run.
const LATE: Duration = Duration::from_millis(500);

/// What it is put off by then.
const GRACE: Duration = Duration::from_secs(1);

/// Whether the other end said that the stream is over: as the kernel of a process that dies does, or who stands in for it.
pub fn is_cut(error: &io::Error) -> bool {
    // A broken pipe: the end of file came before the reset, and a write met both.
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

/// When a stream of a connection last ended with an end of file.
#[derive(Debug, Default)]
pub struct Ended(Mutex<Option<Instant>>);

impl Ended {
    /// A stream has ended.
    pub fn note(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
    }

    /// How long a peer may refuse now that the last stream has ended, and so. None: refusals say nothing.
    pub fn refused_for(&self, now: Instant, last: &io::Error) -> Option<Duration> {
        let ended = self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| now - at < END_OF_ALL);
        is_cut(last).then_some(if ended { ENDED_PATIENCE } else { CUT_PATIENCE })
    }
}

/// What an attempt to reach the peer's process has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The kernel has accepted it.
    Accepted,
    /// Refused, or ended by the other side before its handshake was complete.
    Refused,
    /// No answer, or none that says anything about the process.
    Silent,
}

/// How long a peer is waited for.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// When nothing says that it lives.
    pub patience: Duration,
    /// When its kernel accepts connections.
    pub most: Duration,
    /// When it refuses them on all ways, for so long. None: refusals say nothing here.
    pub refused_for: Option<Duration>,
    /// Ways to its process.
    pub ways: usize,
}

/// The last word about a peer, for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// To be asked again then, or after the next answer.
    Wait(Instant),
    /// It is given up.
    Gone,
}

#[derive(Debug, Clone, Copy, Default)]
struct Way {
    last: Option<Answer>,
    refusals: u32,
    /// The first of these refusals, and the last.
    counted: Option<(Instant, Instant)>,
}

/// A connection without streams. The clock is the caller's.
#[derive(Debug)]
pub struct Alone {
    since: Instant,
    limit: Instant,
    most: Instant,
    refused_for: Option<Duration>,
    ways: Vec<Way>,
    error: Error,
}

impl Alone {
    /// The last stream has ended; `error` is what is said when the peer is given up.
    pub fn new(now: Instant, terms: Terms, error: Error) -> Self {
        Self {
            since: now,
            limit: now + terms.patience,
            most: now + terms.most.max(terms.patience),
            refused_for: terms.refused_for,
            ways: vec![Way::default(); terms.ways],
            error,
        }
    }

    /// When the last stream ended: which of several such times this is.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// What is said when the peer is given up.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// What came of an attempt on a way.
    pub fn answered(&mut self, now: Instant, way: usize, answer: Answer) {
        let Some(way) = self.ways.get_mut(way) else { return };
        way.last = Some(answer);
        if answer != Answer::Refused {
            (way.refusals, way.counted) = (0, None);
        } else if way.counted.is_none_or(|(_, last)| now - last >= APART) {
            let since = way.counted.map_or(now, |(since, _)| since);
            (way.refusals, way.counted) = (way.refusals + 1, Some((since, now)));
        }
    }

    /// Since when all ways refuse.
    fn refused_since(&self) -> Option<Instant> {
        let since = |way: &Way| way.counted.filter(|_| way.refusals >= REFUSALS).map(|(since, _)| since);
        self.ways.iter().map(since).collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    /// Whether to wait on.
    pub fn verdict(&mut self, now: Instant) -> Verdict {
        // The first answer comes a moment after the end that it is about.
        let refused = self.refused_for.zip(self.refused_since());
        let decided = refused.map(|(least, since)| since + least.saturating_sub(CALL_AFTER));
        if decided.is_some_and(|at| now >= at) {
            return Verdict::Gone;
        }
        let lives = self.ways.iter().any(|way| way.last == Some(Answer::Accepted));
        let until = if lives { &mut self.most } else { &mut self.limit };
        if now > *until + LATE {
            *until = now + GRACE;
        }
        if now >= *until {
            return Verdict::Gone;
        }
        Verdict::Wait(decided.map_or(*until, |at| at.min(*until)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn alone(start: Instant, refused_for: Option<Duration>, ways: usize) -> Alone {
        let terms = Terms { patience: 10_000 * MS, most: 60_000 * MS, refused_for, ways };
        Alone::new(start, terms, Error::remote("the peer is gone"))
    }

    /// When the peer is given up, if each way is asked every 100 ms and answers so.
    fn given_up(refused_for: Option<Duration>, ways: usize, answer: impl Fn(usize, u32) -> Answer) -> Option<u32> {
        let start = Instant::now();
        let mut alone = alone(start, refused_for, ways);
        (1..1000).map(|tick| tick * 100).find(|&at| {
            (0..ways).for_each(|way| alone.answered(start + at * MS, way, answer(way, at)));
            alone.verdict(start + at * MS) == Verdict::Gone
        })
    }

    #[test]
    fn a_process_that_is_gone_refuses_everywhere() {
        assert_eq!(given_up(Some(800 * MS), 2, |_, _| Answer::Refused), Some(800));
        assert_eq!(given_up(Some(400 * MS), 1, |_, _| Answer::Refused), Some(400));
        // Refusals that say nothing; one way that says nothing.
        assert_eq!(given_up(None, 1, |_, _| Answer::Refused), Some(10_000));
        assert_eq!(given_up(Some(800 * MS), 2, |way, _| [Answer::Refused, Answer::Silent][way]), Some(10_000));
    }

    #[test]
    fn a_process_whose_kernel_accepts_is_waited_for_and_given_up_soon_when_it_dies() {
        assert_eq!(given_up(Some(800 * MS), 2, |way, _| [Answer::Refused, Answer::Accepted][way]), Some(60_000));
        let dies = |_, at| if at < 20_000 { Answer::Accepted } else { Answer::Refused };
        // Beyond the first limit: with the first refusal nothing says any more that it lives.
        assert_eq!(given_up(Some(800 * MS), 1, dies), Some(20_700));
    }

    #[test]
    fn one_old_refusal_is_not_enough_however_long_this_process_was_stopped() {
        let start = Instant::now();
        let mut alone = alone(start, Some(800 * MS), 1);
        alone.answered(start + 100 * MS, 0, Answer::Refused);
        let late = start + 20_000 * MS;
        assert_eq!(alone.verdict(late), Verdict::Wait(late + GRACE));
        alone.answered(late + 10 * MS, 0, Answer::Accepted);
        assert_eq!(alone.verdict(late + 20 * MS), Verdict::Wait(start + 60_000 * MS));
    }

    proptest! {
        /// A firewall that rejects for less than the time that counts, whenever it begins and ends.
        #[test]
        fn a_short_rejection_is_no_death(begin in 0..9000_u32, length in 0..600_u32) {
            let rejects = |_, at| {
                if (begin..begin + length).contains(&at) { Answer::Refused } else { Answer::Accepted }
            };
            prop_assert!(given_up(Some(800 * MS), 1, rejects).is_none_or(|at| at >= 60_000));
        }
    }
}
