//! Whether a peer is dead or only cut off, once all streams of a connection have ended.
//!
//! The end of a stream proves little. The kernel sends the same packets when a process dies and when a stream is reset
//! deliberately, and so does a firewall that answers for the peer. A process that is stopped, or gets no processor
//! time, cannot answer. But its kernel can: it accepts connections for every process that exists, in whatever state,
//! and refuses them from the moment the process dies. So each side knows the **lifelines** of the other, the listening
//! sockets of its process, one per rail. The connecting side gets them from the handle and the welcome, the listening
//! side from the hello.
//!
//! The sender connects to them anyway when it reconnects its streams. The receiver cannot connect streams, so it
//! **calls**: it connects to every lifeline and reports in a handshake (intent *call*) which stream has ended here.
//! This shows whether the peer is alive, and also notifies it: a reset may reach one side only.
//!
//! What the answers mean, and why:
//!
//! | answer | means | then |
//! |---|---|---|
//! | accepted by the kernel | the process is alive, or another process has its port now | wait on, up to `TOWLINE_PEER_TIMEOUT`: no peer is given up for being late |
//! | refused; reset or closed in the handshake; not Towline | no such process, a process that does not know the connection, or a firewall that answers for it | dead, when all answers agree for long enough |
//! | none, or unreachable | nothing | wait: `TOWLINE_RECONNECT_TIMEOUT` when the last stream was cut, the rest of `TOWLINE_PEER_TIMEOUT` when it fell silent; after streams were cut such a path does not count |
//!
//! - **A refusal alone proves nothing**: a firewall that rejects with resets looks the same, and may also have ended
//!   the streams. It is believed when it comes over every rail, [`REFUSALS`] times in a row, and for as long as the
//!   ends of the streams make likely ([`Terms::refused_for`]). A firewall that rejects everything on every rail for
//!   longer than that cannot be distinguished from a death that must be noticed within a second.
//! - **A path without answers does not count** if some stream ended by an end of file or a reset in the last 5 s and
//!   none has been connected since: its rail may have been down before. Refusals on the other paths then suffice: for
//!   0.6 s after an end of file, which comes from the peer's kernel and not from a firewall, for 1.5 s after a reset
//!   ([`Ended::some_refused_for`]). This also holds when the last stream, on such a rail, ended by silence just after
//!   the others had been cut.
//! - **The remaining streams may use a rail that is silent**, which is not noticed yet: the peer is called at once
//!   ([`PeerInquiry::suspected`]). Both sides have just sent on these streams, so the kernel of a reachable peer has
//!   answered. Refusals count only while nothing comes back on any of them.
//! - **An accepting process need not prove itself** to be waited for: a stopped process could not. If another process
//!   has taken the port, the cost is a longer, bounded wait. A call, and the goodbye to a connection, are believed only
//!   with a proof of the connection's key, like every handshake.
//! - **An accepted call is kept open** until it is answered: if the process dies after all, its kernel resets it.
//! - **This process may have been stopped itself**: a deadline that is found to be long past is extended once, so that
//!   answers which arrived in the meantime are read first. For the same reason refusals are counted as well as timed.
//!
//! A forked child holds no listening socket ([`crate::os::fork`]), so it hides no death. Connections of strangers to
//! the same port are the acceptor's concern; if they fill the kernel's queue, that looks like silence.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::os::error::Error;

/// The first call follows the end of the last stream after this time: a sender that is alive and has noticed reconnects
/// sooner. After a refusal the next call follows after the same time.
pub(crate) const CALL_AFTER: Duration = Duration::from_millis(100);

/// The number of refusals in a row on one path, at least.
pub(crate) const REFUSALS: u32 = 3;

/// How long a peer whose streams were cut may refuse connections.
pub(crate) const CUT_PATIENCE: Duration = Duration::from_millis(800);

/// The same after an end of file. That comes from the peer's kernel, not from a firewall. A live peer never ends a
/// stream this way without a goodbye, unless it has just abandoned an attempt to connect, or a damaged stream.
const ENDED_PATIENCE: Duration = Duration::from_millis(400);

/// The same when some path gives no answer.
const ENDED_SOMEWHERE: Duration = Duration::from_millis(600);

/// The same when streams were cut in another way: a firewall may have done it on the only remaining rail. This also
/// holds on all paths after the network was in trouble. A firewall that affects one rail after another may for a moment
/// refuse connections after it has ended their streams.
pub(crate) const CUT_SOMEWHERE: Duration = Duration::from_millis(1500);

/// After this time streams on rails without any answer have ended too: their silence had to be noticed first.
const SILENCE_AFTER_END: Duration = Duration::from_secs(5);

/// If a deadline is noticed this long after it has passed, this process did not run in between. The deadline is then
/// extended by twice as much.
const LATE: Duration = Duration::from_millis(500);

/// Whether the other end reported the end of the stream, as the kernel of a dying process does, or a firewall that
/// answers for it.
pub(crate) fn is_cut(error: &io::Error) -> bool {
    // A broken pipe: the end of file arrived before the reset, and a write got both.
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

/// When a stream of a connection was last cut ([`is_cut`]), and when by an end of file.
#[derive(Debug, Default)]
pub(crate) struct Ended(Mutex<Ends>);

#[derive(Debug, Default)]
struct Ends {
    cut: Option<Instant>,
    end_of_file: Option<Instant>,
}

impl Ended {
    /// A stream has ended.
    pub(crate) fn note(&self, error: &io::Error) {
        let now = Some(Instant::now());
        let mut ends = self.ends();
        if is_cut(error) {
            ends.cut = now;
        }
        if error.kind() == io::ErrorKind::UnexpectedEof {
            ends.end_of_file = now;
        }
    }

    /// A stream is connected, or is back: the peer's process is alive, whatever ended before.
    pub(crate) fn forget(&self) {
        *self.ends() = Ends::default();
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a stream was cut recently, and none has been connected since.
    pub(crate) fn is_recent(&self, now: Instant) -> bool {
        self.ends().cut.is_some_and(|at| now - at < SILENCE_AFTER_END)
    }

    /// The same for an end of file.
    pub(crate) fn is_end_of_file(&self, now: Instant) -> bool {
        self.ends().end_of_file.is_some_and(|at| now - at < SILENCE_AFTER_END)
    }

    /// How long a peer may refuse on all paths, given how the last stream has ended. None: refusals prove nothing.
    pub(crate) fn refused_for(&self, now: Instant, last: &io::Error) -> Option<Duration> {
        // All streams of a process that dies have ended within a second, however busy this side is.
        if is_cut(last) && self.ends().end_of_file.is_some_and(|at| now - at < Duration::from_secs(1)) {
            return Some(ENDED_PATIENCE);
        }
        (is_cut(last) || self.is_recent(now)).then_some(CUT_PATIENCE)
    }

    /// How long the peer may refuse on some paths when the others give no answer. None: that proves nothing.
    pub(crate) fn some_refused_for(&self, now: Instant) -> Option<Duration> {
        if self.is_end_of_file(now) { Some(ENDED_SOMEWHERE) } else { self.is_recent(now).then_some(CUT_SOMEWHERE) }
    }
}

/// The result of an attempt to reach the peer's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The kernel has accepted it.
    Accepted,
    /// Refused, or ended by the other side before its handshake was complete.
    Refused,
    /// No answer, or none that shows anything about the process.
    Silent,
}

/// How long to wait before a peer is given up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// If nothing shows that the peer is alive.
    pub patience: Duration,
    /// If its kernel accepts connections.
    pub most: Duration,
    /// If it has refused them on all paths, for this long. None: refusals prove nothing here.
    pub refused_for: Option<Duration>,
    /// If it refuses them on some paths, and the others give no answer. None: that proves nothing.
    pub some_refused_for: Option<Duration>,
    /// Paths to its process.
    pub paths: usize,
}

/// The current verdict about a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Check again at this time, or after the next answer.
    Wait(Instant),
    /// The peer is given up.
    Gone,
}

#[derive(Debug, Clone, Copy, Default)]
struct Path {
    last: Option<Answer>,
    /// When the newest attempt that has a result began.
    newest: Option<Instant>,
    refusals: u32,
    /// The first of these refusals, and the last.
    counted: Option<(Instant, Instant)>,
    /// Streams remain on this path, and nothing comes back on them.
    is_left: bool,
}

impl Path {
    /// Whether every attempt that began since then is without an answer. An older one proves nothing: the network may
    /// have been repaired since.
    fn is_silent_since(&self, then: Instant) -> bool {
        self.is_left || self.last == Some(Answer::Silent) && self.newest.is_some_and(|began| began >= then)
    }
}

/// The inquiry whether a peer's process is alive, while all streams are down or silent. The clock is the caller's.
#[derive(Debug)]
pub(crate) struct PeerInquiry {
    since: Instant,
    limit: Instant,
    most: Instant,
    refused_for: Option<Duration>,
    some_refused_for: Option<Duration>,
    /// Streams remain. Only refusals decide then, and only while nothing comes back on these streams.
    suspected: bool,
    paths: Vec<Path>,
    error: Error,
}

impl PeerInquiry {
    /// Some streams were cut recently, and others have not ended: the paths of the latter, `left`, need not be tried.
    /// `paths`: as in [`Terms`].
    pub(crate) fn suspected(now: Instant, cut: &Ended, paths: usize, left: &[usize], error: Error) -> Self {
        let some_refused_for = cut.some_refused_for(now);
        // Time alone decides nothing. Refusals on all paths decide, although streams remain, while nothing comes back
        // on those.
        let (patience, most) = (Duration::ZERO, Duration::ZERO);
        let terms = Terms { patience, most, refused_for: some_refused_for, some_refused_for, paths };
        let mut inquiry = Self { suspected: true, ..Self::new(now, terms, error) };
        for &path in left {
            inquiry.paths.get_mut(path).into_iter().for_each(|path| path.is_left = true);
        }
        inquiry
    }

    /// Whether streams remain, so that data coming back on them outweighs any answer.
    pub(crate) fn is_suspicion(&self) -> bool {
        self.suspected
    }

    /// The last stream has ended; `error` is returned when the peer is given up.
    pub(crate) fn new(now: Instant, terms: Terms, error: Error) -> Self {
        Self {
            since: now,
            limit: now + terms.patience,
            most: now + terms.most.max(terms.patience),
            refused_for: terms.refused_for,
            some_refused_for: terms.some_refused_for,
            suspected: false,
            paths: vec![Path::default(); terms.paths],
            error,
        }
    }

    /// Whether refusals over some of the paths may be enough.
    pub(crate) fn awaits_refusals(&self) -> bool {
        self.some_refused_for.is_some()
    }

    /// When the last stream ended; it identifies the outage if there are several.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// The error when the peer is given up.
    pub(crate) fn error(&self) -> &Error {
        &self.error
    }

    /// The result of an attempt on a path, and when the attempt began. An attempt without an answer counts for nothing
    /// if another one began later. Attempts that began before streams ended have more time, so they finish among later
    /// ones with a short time limit.
    pub(crate) fn answered(&mut self, began: Instant, now: Instant, path: usize, answer: Answer) {
        let Some(path) = self.paths.get_mut(path) else { return };
        if answer == Answer::Silent && path.newest.is_some_and(|newest| began < newest) {
            return;
        }
        path.newest = path.newest.max(Some(began));
        path.last = Some(answer);
        if answer != Answer::Refused {
            (path.refusals, path.counted) = (0, None);
        } else if path.counted.is_none_or(|(_, last)| now - last >= CALL_AFTER / 2) {
            // Refusals within half the interval of calls count once: several streams may connect at the same time.
            let since = path.counted.map_or(now, |(since, _)| since);
            (path.refusals, path.counted) = (path.refusals + 1, Some((since, now)));
        }
    }

    /// When refusals will be enough, if nothing else arrives. All paths must refuse; or, where that suffices, all paths
    /// that answer.
    fn decided(&self) -> Option<Instant> {
        let refusing = || self.paths.iter().filter(|path| path.last == Some(Answer::Refused));
        let (some, all) = (refusing().count(), self.paths.len());
        if some == 0 || self.paths.iter().any(|path| path.last == Some(Answer::Accepted)) {
            return None;
        }
        let least = if some == all { self.refused_for? } else { self.some_refused_for? };
        let times = |path: &Path| path.counted.filter(|_| path.refusals >= REFUSALS);
        let times: Vec<_> = refusing().map(times).collect::<Option<_>>()?;
        let first = times.iter().map(|(first, _)| *first).max()?;
        // The first answer arrives a moment after the end of the stream that it concerns.
        let at = first + least.saturating_sub(CALL_AFTER);
        if some == all {
            return Some(at);
        }
        // The refusing paths may have fallen silent too: they must have refused over the whole period, not only at its
        // beginning. And the others must have been tried in that period, however slow the machine is: a path that was
        // not tried might accept.
        let mut others = self.paths.iter().filter(|path| path.last != Some(Answer::Refused));
        let long = times.iter().all(|(_, last)| *last >= at);
        (long && others.all(|path| path.is_silent_since(first))).then_some(at)
    }

    /// Whether to keep waiting.
    pub(crate) fn verdict(&mut self, now: Instant) -> Verdict {
        let decided = self.decided();
        if decided.is_some_and(|at| now >= at) {
            return Verdict::Gone;
        }
        if self.suspected {
            // If there is no answer by then, the streams' own errors decide.
            return Verdict::Wait(decided.unwrap_or(now + SILENCE_AFTER_END));
        }
        let alive = self.paths.iter().any(|path| path.last == Some(Answer::Accepted));
        let until = if alive { &mut self.most } else { &mut self.limit };
        if now > *until + LATE {
            *until = now + 2 * LATE;
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

    fn inquiry(
        start: Instant,
        refused_for: Option<Duration>,
        some_refused_for: Option<Duration>,
        paths: usize,
    ) -> PeerInquiry {
        let terms = Terms { patience: 10_000 * MS, most: 60_000 * MS, refused_for, some_refused_for, paths };
        PeerInquiry::new(start, terms, Error::remote("the peer is gone"))
    }

    /// When the peer is given up, if each path is tried every 100 ms and answers like this.
    fn given_up(refused_for: Option<Duration>, paths: usize, answer: impl Fn(usize, u32) -> Answer) -> Option<u32> {
        given_up_after(None, refused_for, paths, answer)
    }

    fn given_up_after(
        some_refused_for: Option<Duration>,
        refused_for: Option<Duration>,
        paths: usize,
        answer: impl Fn(usize, u32) -> Answer,
    ) -> Option<u32> {
        let start = Instant::now();
        let mut inquiry = inquiry(start, refused_for, some_refused_for, paths);
        (1..1000).map(|tick| tick * 100).find(|&at| {
            (0..paths).for_each(|path| inquiry.answered(start + at * MS, start + at * MS, path, answer(path, at)));
            inquiry.verdict(start + at * MS) == Verdict::Gone
        })
    }

    #[test]
    fn a_process_that_is_gone_refuses_everywhere() {
        assert_eq!(given_up(Some(800 * MS), 2, |_, _| Answer::Refused), Some(800));
        assert_eq!(given_up(Some(400 * MS), 1, |_, _| Answer::Refused), Some(400));
        // Refusals that prove nothing; one path without an answer.
        assert_eq!(given_up(None, 1, |_, _| Answer::Refused), Some(10_000));
        assert_eq!(given_up(Some(800 * MS), 2, |path, _| [Answer::Refused, Answer::Silent][path]), Some(10_000));
    }

    #[test]
    fn after_an_end_of_file_a_path_without_answers_does_not_count() {
        use Answer::{Accepted, Refused, Silent};
        let two = |answers: [Answer; 2]| {
            given_up_after(Some(ENDED_SOMEWHERE), Some(400 * MS), 2, move |path, _| answers[path])
        };
        assert_eq!(two([Refused, Silent]), Some(600));
        assert_eq!(two([Refused, Refused]), Some(400));
        assert_eq!(two([Refused, Accepted]), Some(60_000));
        assert_eq!(two([Silent, Silent]), Some(10_000));
        // No answer at first; accepted in time.
        let late = |path, at| {
            if path == 0 {
                Refused
            } else if at < 500 {
                Silent
            } else {
                Accepted
            }
        };
        assert_eq!(given_up_after(Some(ENDED_SOMEWHERE), Some(400 * MS), 2, late), Some(60_000));
    }

    #[test]
    fn a_path_that_was_not_tried_yet_may_accept() {
        let start = Instant::now();
        let mut inquiry = inquiry(start, Some(CUT_PATIENCE), Some(ENDED_SOMEWHERE), 2);
        // A machine on which every attempt takes long.
        for ms in [0, 500, 1000] {
            inquiry.answered(start + ms * MS, start + ms * MS, 0, Answer::Refused);
            assert_ne!(inquiry.verdict(start + ms * MS), Verdict::Gone, "after {ms} ms");
        }
        // Perhaps begun when the whole network was silent.
        inquiry.answered(start - MS, start + 1500 * MS, 1, Answer::Silent);
        assert_ne!(inquiry.verdict(start + 1500 * MS), Verdict::Gone);
        inquiry.answered(start + MS, start + 1600 * MS, 1, Answer::Silent);
        assert_eq!(inquiry.verdict(start + 1600 * MS), Verdict::Gone);
    }

    /// An attempt that began when streams were still connected has two seconds, and finishes among those with a short
    /// time limit.
    #[test]
    fn an_old_unanswered_attempt_undoes_no_newer_one() {
        let start = Instant::now();
        let at = |ms| start + ms * MS;
        let mut inquiry = inquiry(start, Some(CUT_PATIENCE), Some(ENDED_SOMEWHERE), 2);
        for ms in [100, 200, 700] {
            inquiry.answered(at(ms), at(ms), 0, Answer::Refused);
        }
        inquiry.answered(at(100), at(400), 1, Answer::Silent);
        inquiry.answered(start - 1500 * MS, at(500), 1, Answer::Silent);
        inquiry.answered(start - 1300 * MS, at(600), 0, Answer::Silent);
        assert_eq!(inquiry.verdict(at(700)), Verdict::Gone);
        // A newer one does: perhaps the rail that refused is down.
        inquiry.answered(at(750), at(900), 0, Answer::Silent);
        assert_ne!(inquiry.verdict(at(900)), Verdict::Gone);
        // Nor does it cancel the proof that the peer is alive.
        inquiry.answered(at(1000), at(1000), 1, Answer::Accepted);
        inquiry.answered(start - MS, at(1100), 1, Answer::Silent);
        assert_eq!(inquiry.verdict(at(1100)), Verdict::Wait(at(60_000)));
    }

    #[test]
    fn a_suspicion_ends_a_connection_only_by_refusals() {
        use Answer::{Accepted, Refused, Silent};
        let given_up = |cause: io::ErrorKind, answers: [Answer; 2]| {
            let start = Instant::now();
            let ended = Ended::default();
            ended.note(&cause.into());
            let error = Error::remote("the peer is gone");
            let mut inquiry = PeerInquiry::suspected(Instant::now(), &ended, 2, &[], error);
            (1..1000_u32).map(|tick| tick * 100).find(|&at| {
                (0..2).for_each(|path| inquiry.answered(start + at * MS, start + at * MS, path, answers[path]));
                inquiry.verdict(start + at * MS) == Verdict::Gone
            })
        };
        for (cause, after) in [(io::ErrorKind::UnexpectedEof, 600), (io::ErrorKind::ConnectionReset, 1500)] {
            assert_eq!(given_up(cause, [Refused, Silent]), Some(after));
            assert_eq!(given_up(cause, [Refused, Refused]), Some(after));
            assert_eq!(given_up(cause, [Refused, Accepted]), None);
            // However long it takes: the remaining streams decide.
            assert_eq!(given_up(cause, [Silent, Silent]), None);
        }
    }

    #[test]
    fn an_end_of_file_counts_until_a_stream_comes() {
        let start = Instant::now();
        let (end, reset) = (io::ErrorKind::UnexpectedEof.into(), io::ErrorKind::ConnectionReset.into());
        let silence = io::ErrorKind::TimedOut.into();
        let ended = Ended::default();
        assert_eq!(ended.refused_for(start, &silence), None);
        assert_eq!(ended.refused_for(start, &reset), Some(CUT_PATIENCE));
        assert_eq!(ended.some_refused_for(start), None);
        ended.note(&reset);
        assert_eq!(ended.refused_for(Instant::now(), &silence), Some(CUT_PATIENCE));
        assert_eq!(ended.some_refused_for(Instant::now()), Some(CUT_SOMEWHERE));
        ended.note(&end);
        assert_eq!(ended.some_refused_for(Instant::now()), Some(ENDED_SOMEWHERE));
        let now = Instant::now();
        assert_eq!(ended.refused_for(now, &reset), Some(ENDED_PATIENCE));
        assert_eq!(ended.refused_for(now + 3000 * MS, &silence), Some(CUT_PATIENCE));
        assert_eq!(ended.refused_for(now + 6000 * MS, &silence), None);
        ended.forget();
        assert_eq!(ended.refused_for(now, &silence), None);
    }

    #[test]
    fn a_process_whose_kernel_accepts_is_waited_for_and_given_up_soon_when_it_dies() {
        assert_eq!(given_up(Some(800 * MS), 2, |path, _| [Answer::Refused, Answer::Accepted][path]), Some(60_000));
        let dies = |_, at| if at < 20_000 { Answer::Accepted } else { Answer::Refused };
        // Past the first limit: from the first refusal on, nothing shows that the peer is alive.
        assert_eq!(given_up(Some(800 * MS), 1, dies), Some(20_700));
    }

    #[test]
    fn one_old_refusal_is_not_enough_however_long_this_process_was_stopped() {
        let start = Instant::now();
        let mut inquiry = inquiry(start, Some(800 * MS), None, 1);
        inquiry.answered(start, start + 100 * MS, 0, Answer::Refused);
        let late = start + 20_000 * MS;
        assert_eq!(inquiry.verdict(late), Verdict::Wait(late + 2 * LATE));
        inquiry.answered(late, late + 10 * MS, 0, Answer::Accepted);
        assert_eq!(inquiry.verdict(late + 20 * MS), Verdict::Wait(start + 60_000 * MS));
    }

    proptest! {
        /// A firewall that rejects for less than the required time, whenever it begins and ends.
        #[test]
        fn a_short_rejection_is_no_death(begin in 0..9000_u32, length in 0..600_u32) {
            let rejects = |_, at| {
                if (begin..begin + length).contains(&at) { Answer::Refused } else { Answer::Accepted }
            };
            prop_assert!(given_up(Some(800 * MS), 1, rejects).is_none_or(|at| at >= 60_000));
        }
    }
}
