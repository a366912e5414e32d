//! Detecting a path that has failed silently.
//!
//! TCP retransmits unacknowledged data for about a quarter of an hour before it reports an error. So while something is
//! outstanding on a connection, the control thread reads every [`TICK`] what the kernel has received on each stream.
//! The kernel's own retransmissions, window probes and keepalive probes serve as queries: a peer's kernel answers them
//! even when its process is stopped or does not read. So the criterion is not how long the peer takes, but how long
//! nothing at all has come back although the kernel has sent probes.
//!
//! None of this is on the path of a message, and a connection with nothing outstanding is not watched: there the
//! kernel's keepalive probes suffice.
//!
//! # Implementation notes
//!
//! From `TCP_INFO` (tcp(7), `linux/tcp.h`): `tcpi_retransmits` counts timeouts of the retransmission timer and
//! `tcpi_probes` the window and keepalive probes, both since the last acknowledgement. `tcpi_last_ack_recv` is the time
//! since the last segment that acknowledged anything, new or old. TCP_USER_TIMEOUT is not suitable: it also ends a
//! connection whose peer answers every window probe but does not read. The interval of window probes grows up to two
//! minutes; where the kernel supports it, since 6.15, `TCP_RTO_MAX_MS` limits it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::engine::poller::{Poller, Progress, Registration, Source};
use crate::os::error::{Error, Result};

/// How often streams are checked while something is outstanding.
pub(crate) const TICK: Duration = Duration::from_millis(400);

/// How often they are checked when one of them waits for an answer.
pub(crate) const SOON: Duration = Duration::from_millis(100);

/// A stream over a short path is lost when nothing has come back for this long, in spite of several probes. With a
/// retransmission timer of 200 ms, Linux's minimum, the probes are sent after 0.2, 0.6 and 1.4 s.
pub(crate) const SILENCE: Duration = Duration::from_millis(2300);

/// A stream without any answer for this long is probed if the peer's kernel has its frames but the peer has not
/// acknowledged them: their acknowledgement may be lost.
pub(crate) const PROBE_AFTER: Duration = Duration::from_millis(500);

/// The kernel's data about a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TcpSample {
    /// How long ago the peer's kernel last answered anything.
    pub silent: Duration,
    /// Probes since then.
    pub probes: u8,
    /// Whether the peer's kernel has not acknowledged everything.
    pub outstanding: bool,
    /// The path's round trip, smoothed by the kernel.
    pub round_trip: Duration,
    /// How many bytes of data a full packet carries now.
    pub segment: u32,
}

/// `TCP_INFO` of a socket. None when the kernel does not provide it.
fn info(sock: &impl AsRawFd) -> Option<libc::tcp_info> {
    // SAFETY: all zeroes is a valid value of this struct of numbers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    // SAFETY: any bytes are a valid value of it.
    unsafe { read_info(sock, &mut info) }.map(|_| info)
}

/// Reads the kernel's data about a socket, as much as fits. Returns how many bytes; None when the kernel does not
/// provide it.
///
/// # Safety
/// Any bytes are a valid `T`.
unsafe fn read_info<T>(sock: &impl AsRawFd, room: &mut T) -> Option<usize> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes of `room`, and the caller promises that it may write any.
    let answer = unsafe {
        let room = std::ptr::from_mut(room).cast();
        libc::getsockopt(sock.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, room, &raw mut length)
    };
    (answer == 0).then_some(length as usize)
}

/// The round trip that the kernel has measured on a socket. Zero if it has measured none: without timestamps, a first
/// packet that was repeated gives no measurement.
pub(crate) fn round_trip(sock: &impl AsRawFd) -> Duration {
    info(sock).map_or(Duration::ZERO, |info| Duration::from_micros(u64::from(info.tcpi_rtt)))
}

/// The shortest round trip that the kernel has measured on a socket: that of the path, without the time its ends took
/// to answer. If the kernel does not provide it, as [`round_trip`].
pub(crate) fn distance(sock: &impl AsRawFd) -> Duration {
    let us = number(sock, 148).map(u32::from_ne_bytes).filter(|us| !matches!(*us, 0 | u32::MAX));
    us.map_or_else(|| round_trip(sock), |us| Duration::from_micros(us.into()))
}

/// The smoothed round trip of a socket less the shortest of the last minutes: the time in queues, those of the hosts
/// included.
pub(crate) fn queue(sock: &impl AsRawFd) -> Duration {
    round_trip(sock).saturating_sub(distance(sock))
}

/// How many bytes the peer's kernel has acknowledged on a socket (`tcpi_bytes_acked`). None when the kernel does not
/// provide it.
pub(crate) fn acknowledged(sock: &impl AsRawFd) -> Option<u64> {
    number(sock, 120).map(u64::from_ne_bytes)
}

/// The bytes at `offset` in the kernel's `tcp_info` (`linux/tcp.h`), of which libraries declare only the beginning.
/// None when the kernel provides less.
fn number<const BYTES: usize>(sock: &impl AsRawFd, offset: usize) -> Option<[u8; BYTES]> {
    // Up to and including `tcpi_min_rtt`.
    let mut bytes = [0_u8; 152];
    // SAFETY: any bytes are bytes.
    let length = unsafe { read_info(sock, &mut bytes) }?;
    bytes.get(..length)?.get(offset..offset + BYTES)?.try_into().ok()
}

impl TcpSample {
    /// Reads the kernel's data about a socket. None when the kernel does not provide it.
    pub(crate) fn of(sock: &impl AsRawFd) -> Option<Self> {
        info(sock).map(|info| Self {
            silent: Duration::from_millis(u64::from(info.tcpi_last_ack_recv)),
            probes: info.tcpi_retransmits.max(info.tcpi_probes),
            outstanding: info.tcpi_unacked > 0 || super::wire::unsent(sock.as_raw_fd()) > 0,
            round_trip: Duration::from_micros(u64::from(info.tcpi_rtt)),
            segment: info.tcpi_snd_mss,
        })
    }
}

impl TcpSample {
    /// What the distance adds to the time that an answer takes. Twice the round trip: keepalive probes are sent once a
    /// second however long the path is, so on a long path several are always unanswered. At most 8 s: this side does
    /// not wait longer for a queue on the path that holds seconds of traffic.
    pub(crate) fn answering(&self) -> Duration {
        (2 * self.round_trip).min(Duration::from_secs(8))
    }
}

/// The result of checking a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finding {
    /// Nothing is wrong.
    Well,
    /// The kernel has sent a probe and waits for the answer.
    Probing,
    /// Nothing has come back for this long.
    Lost(Duration),
}

/// The liveness monitor of one stream. The clock is the caller's.
#[derive(Debug, Default)]
pub(crate) struct LivenessMonitor {
    unanswered_since: Option<Instant>,
    /// Whether the kernel probes this stream often.
    probing: bool,
    /// When the stream ended, until it is back.
    away_since: Option<Instant>,
}

impl LivenessMonitor {
    /// The stream has ended.
    pub(crate) fn ended(&mut self, now: Instant) {
        self.away_since.get_or_insert(now);
    }

    /// Whether the stream ended less than `patience` ago and is not connected: it may still reconnect.
    pub(crate) fn may_return(&self, now: Instant, patience: Duration) -> bool {
        self.away_since.is_some_and(|since| now - since < patience)
    }

    /// Whether the stream has been disconnected for longer than the end of a process takes to reach all its streams.
    /// Streams that end later have another reason.
    pub(crate) fn is_long_away(&self, now: Instant) -> bool {
        // By then the kernel has ended all streams of a dying process, and this side has noticed.
        self.away_since.is_some_and(|since| now - since > SOON * 3 / 2)
    }

    /// Checks the stream once.
    pub(crate) fn check(&mut self, now: Instant, sample: TcpSample) -> Finding {
        if sample.probes == 0 {
            self.unanswered_since = None;
            return Finding::Well;
        }
        let since = *self.unanswered_since.get_or_insert(now);
        let answering = sample.answering();
        // A stream that was idle was already silent before the first probe, so the control thread must also have seen
        // it unanswered.
        let unanswered = now - since >= 4 * TICK + answering;
        if sample.probes >= 2 && sample.silent >= SILENCE + answering && unanswered {
            return Finding::Lost(sample.silent);
        }
        Finding::Probing
    }

    /// Whether at the last check the kernel had sent a probe without an answer.
    pub(crate) fn awaits_answer(&self) -> bool {
        self.unanswered_since.is_some()
    }

    /// How long nothing has come back although the kernel sends probes; to be called after [`LivenessMonitor::check`].
    /// Zero while the probe is new: a peer that had nothing to send has been silent for a long time when the probe is
    /// sent.
    pub(crate) fn silence(&self, now: Instant, sample: TcpSample) -> Duration {
        self.unanswered_since.filter(|since| now - *since >= SOON).map_or(Duration::ZERO, |_| sample.silent)
    }

    /// Makes the kernel probe a stream that is silent although frames are in doubt, and stop when none are.
    pub(crate) fn probe(
        &mut self,
        sock: &impl AsRawFd,
        sample: TcpSample,
        in_doubt: bool,
        often: &Probes,
        seldom: &Probes,
    ) {
        let wanted = in_doubt && (self.probing || sample.silent >= PROBE_AFTER);
        if wanted != self.probing {
            self.probing = wanted;
            if wanted { often } else { seldom }.set(sock);
        }
    }

    /// The stream is no longer watched.
    pub(crate) fn stop_probing(&mut self, sock: &impl AsRawFd, seldom: &Probes) {
        if std::mem::take(&mut self.probing) {
            seldom.set(sock);
        }
    }
}

/// Keepalive probes of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Probes {
    /// The idle time before the first probe.
    pub idle: Duration,
    /// From one probe to the next.
    pub interval: Duration,
    /// How many unanswered probes end the connection.
    pub count: i32,
}

impl Probes {
    /// Once a second, while frames are in doubt. The control thread decides, not the kernel.
    pub(crate) const OFTEN: Self = Self { idle: Duration::from_secs(1), interval: Duration::from_secs(1), count: 127 };

    /// For an idle connection, so that the kernel ends it within `limit`, a little before. The sending side probes
    /// first: it is the side that reconnects when a firewall has forgotten the flow and answers with a reset.
    pub(crate) fn within(limit: Duration, sending: bool) -> Self {
        let second = Duration::from_secs(1);
        let first = if sending { limit / 4 } else { limit / 3 };
        let idle = first.max(second * if sending { 1 } else { 2 });
        let interval = (limit / 9).max(second);
        let room = (limit * 9 / 10).saturating_sub(idle);
        let count = (room.as_secs_f64() / interval.as_secs_f64()).floor().clamp(1.0, 100.0) as i32;
        Self { idle, interval, count }
    }

    /// Sets the probes. Optional: if the kernel refuses, the socket still carries the data.
    pub(crate) fn set(&self, sock: &impl AsRawFd) {
        let fd = sock.as_raw_fd();
        set_option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, self.count);
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, self.interval.as_secs().max(1) as i32);
        // Set last, because it starts the timer.
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, self.idle.as_secs().max(1) as i32);
    }
}

/// `TCP_RTO_MAX_MS` of `linux/tcp.h`, since Linux 6.15.
const TCP_RTO_MAX_MS: libc::c_int = 44;

/// `TCP_RTO_MIN_US` of `linux/tcp.h`, since Linux 6.16.
const TCP_RTO_MIN_US: libc::c_int = 45;

/// The earliest time after which the kernel retransmits a lone lost packet, where it supports that. Otherwise it waits
/// 200 ms, while all ranks wait. Ten times what two busy hosts take to answer, so that few packets are retransmitted in
/// vain. An older kernel at the other end may delay an acknowledgement for 40 ms. Then the retransmission is a probe
/// that it answers at once.
const REPEAT_AFTER_US: libc::c_int = 20_000;

/// Makes the kernel retransmit lost packets soon.
pub(crate) fn repeat_soon(sock: &impl AsRawFd) {
    set_option(sock.as_raw_fd(), libc::IPPROTO_TCP, TCP_RTO_MIN_US, REPEAT_AFTER_US);
}

/// Makes the kernel repeat its probes often, where it supports that: a tenth of `limit` apart at most. It gives up
/// after fifteen probes (`net.ipv4.tcp_retries2`), which is still not before `limit`.
pub(crate) fn probe_often(sock: &impl AsRawFd, limit: Duration) {
    let most = (limit / 10).as_millis().clamp(1000, 120_000) as libc::c_int;
    set_option(sock.as_raw_fd(), libc::IPPROTO_TCP, TCP_RTO_MAX_MS, most);
}

/// Limits how many bytes the kernel accepts before it can send them.
pub(crate) fn hold_back_from(sock: &impl AsRawFd, bytes: u32) {
    set_option(sock.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes as i32);
}

/// Makes the next close drop unsent data and reset the connection: data under way is in doubt anyhow.
pub(crate) fn close_hard(sock: &impl AsRawFd) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: the kernel reads the struct, which outlives the call.
    unsafe {
        libc::setsockopt(
            sock.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        );
    }
}

fn set_option(fd: RawFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) {
    // SAFETY: the kernel reads one int. A refusal leaves the kernel's own value.
    unsafe {
        libc::setsockopt(fd, level, name, (&raw const value).cast(), size_of::<libc::c_int>() as libc::socklen_t);
    }
}

/// The error for a stream that was given up because of silence.
pub(crate) fn silent(silence: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, Silent(silence))
}

/// The silence in the error of [`silent`].
pub(crate) fn silence_of(error: &io::Error) -> Option<Duration> {
    error.get_ref()?.downcast_ref::<Silent>().map(|silent| silent.0)
}

#[derive(Debug)]
struct Silent(Duration);

impl std::fmt::Display for Silent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "nothing came back for {:.1} s", self.0.as_secs_f64())
    }
}

impl std::error::Error for Silent {}

/// The error for a stream that was given up because its interface went down.
pub(crate) fn link_down() -> io::Error {
    io::Error::new(io::ErrorKind::NetworkDown, "its network interface is down")
}

/// A connection that the control thread watches.
pub(crate) trait Kept: Send + Sync + 'static {
    /// The control thread's work when it was called, or when a check is due.
    fn do_chores(&self) -> Progress;

    /// As [`Source::fail`].
    fn fail(&self, error: Error);
}

/// The control thread's reference to such a connection.
struct Chore<C>(Weak<C>);

impl<C: Kept> Source for Chore<C> {
    fn poll(&self) -> Progress {
        self.0.upgrade().map_or_else(Progress::default, |conn| conn.do_chores())
    }

    fn fail(&self, error: Error) {
        if let Some(conn) = self.0.upgrade() {
            conn.fail(error);
        }
    }
}

/// A connection's registration at the control thread, made when it is first needed.
#[derive(Default)]
pub(crate) struct Chores {
    registration: Mutex<Option<Registration>>,
    ticking: AtomicBool,
    /// When the next check is due.
    due: Mutex<Option<Instant>>,
}

impl Chores {
    /// Makes the control thread check soon.
    ///
    /// # Errors
    /// When there is no control thread.
    pub(crate) fn call<C: Kept>(&self, poller: &Poller, conn: &Weak<C>) -> Result<()> {
        let mut registration = self.registration.lock().unwrap_or_else(PoisonError::into_inner);
        if registration.is_none() {
            *registration = Some(poller.control_thread()?.register(Arc::new(Chore(Weak::clone(conn))), None)?);
        }
        if let Some(registration) = &*registration {
            registration.kick();
        }
        Ok(())
    }

    /// Starts the checks. Returns whether the caller must wake the control thread.
    pub(crate) fn begin(&self) -> bool {
        !self.ticking.load(Ordering::Relaxed) && !self.ticking.swap(true, Ordering::SeqCst)
    }

    /// Whether a check is due; if not, when it will be. The first comes a [`TICK`] after the start, so that a transfer
    /// which succeeds before that is never checked.
    pub(crate) fn is_due(&self, now: Instant) -> std::result::Result<(), Instant> {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        match *due.get_or_insert(now + TICK) {
            at if at <= now => Ok(()),
            at => Err(at),
        }
    }

    /// The next check follows `after` this one.
    pub(crate) fn again(&self, now: Instant, after: Duration) -> Progress {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = Some(now + after);
        Progress { moved: false, again: Some(now + after) }
    }

    /// The checks end, until they are started again.
    pub(crate) fn end(&self) {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.ticking.store(false, Ordering::SeqCst);
    }

    /// Whether checks are under way.
    pub(crate) fn is_ticking(&self) -> bool {
        self.ticking.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The round trip of a data centre.
    const NEAR: Duration = Duration::from_micros(50);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A path that fails at time 0, checked every `tick`: when the monitor reports it. `idle` is how long before that
    /// the peer last answered; the kernel sends probes at 0.2, 0.6, 1.4, 3.0 s.
    fn noticed(idle: Duration, phase: Duration) -> Duration {
        let start = Instant::now() + ms(100_000);
        let mut monitor = LivenessMonitor::default();
        let mut at = phase;
        loop {
            let probes = [200, 600, 1400, 3000, 6200].iter().filter(|probes| at >= ms(**probes)).count() as u8;
            match monitor.check(
                start + at,
                TcpSample { silent: idle + at, probes, outstanding: true, round_trip: NEAR, segment: 1448 },
            ) {
                Finding::Well => at += TICK,
                Finding::Probing => at += SOON,
                Finding::Lost(_) => return at,
            }
        }
    }

    #[test]
    fn a_new_probe_proves_nothing_about_the_silence_before_it() {
        let (start, mut monitor) = (Instant::now(), LivenessMonitor::default());
        let mut silence = |at: u64, probes: u8, silent: u64| {
            let (now, sample) = (
                start + ms(at),
                TcpSample { silent: ms(silent), probes, outstanding: false, round_trip: NEAR, segment: 1448 },
            );
            monitor.check(now, sample);
            monitor.silence(now, sample)
        };
        assert_eq!(silence(0, 0, 2000), ms(0), "no probe was sent");
        assert_eq!(silence(10, 1, 2010), ms(0), "the answer may be on its way");
        assert_eq!(silence(20, 0, 5), ms(0), "it has come");
        assert_eq!(silence(2030, 1, 2015), ms(0), "the next probe");
        assert_eq!(silence(2130, 1, 2115), ms(2115), "which has no answer");
    }

    proptest! {
        #[test]
        fn silent_loss_is_noticed_within_three_seconds_and_not_at_once(idle in 0..3_600_000_u64, phase in 0..400_u64) {
            let after = noticed(ms(idle), ms(phase));
            prop_assert!(after >= ms(1800) && after <= ms(2700), "{after:?}");
        }

        /// Over a long path every keepalive probe is answered a round trip later, when the next ones have gone out.
        #[test]
        fn a_peer_far_away_is_not_lost_while_its_answers_are_on_the_way(round_trip in 1..3000_u64, phase in 0..1000_u64) {
            let (start, mut monitor) = (Instant::now(), LivenessMonitor::default());
            for at in (phase..60_000).step_by(100) {
                // Probes at 1 s, 2 s, …; the kernel resets its count with each answer.
                let answered = at.saturating_sub(round_trip) / 1000 * 1000;
                let heard = if answered == 0 { 0 } else { answered + round_trip };
                let probes = ((at / 1000) - (heard / 1000).min(at / 1000)) as u8;
                let sample = TcpSample { silent: ms(at - heard), probes, outstanding: true, round_trip: ms(round_trip), segment: 1448 };
                prop_assert!(!matches!(monitor.check(start + ms(at), sample), Finding::Lost(_)), "{at}: {sample:?}");
            }
        }

        /// A receiver that does not read: the window is shut, and its kernel answers each probe, late or not.
        #[test]
        fn a_peer_whose_kernel_answers_is_never_lost(answers in proptest::collection::vec(1..1500_u64, 1..200)) {
            let start = Instant::now();
            let mut monitor = LivenessMonitor::default();
            let mut at = 0;
            for wait in answers {
                // A probe goes out; its answer comes `wait` later; another pause follows, of any length.
                for seen in (at..at + wait).step_by(100) {
                    let silent = ms(120_000 + seen - at);
                    let sample = TcpSample { silent, probes: 1, outstanding: true, round_trip: NEAR, segment: 1448 };
                    prop_assert!(!matches!(monitor.check(start + ms(seen), sample), Finding::Lost(_)));
                }
                at += wait;
                let sample = TcpSample { silent: ms(1), probes: 0, outstanding: true, round_trip: NEAR, segment: 1448 };
                prop_assert_eq!(monitor.check(start + ms(at), sample), Finding::Well);
                at += 30_000;
            }
        }

        #[test]
        fn an_idle_connections_probes_end_within_the_limit_and_the_senders_come_first(limit in 3..100_000_u64) {
            let limit = Duration::from_secs(limit);
            let whole = |p: Probes| p.idle + p.interval * p.count as u32;
            let (send, recv) = (Probes::within(limit, true), Probes::within(limit, false));
            prop_assert!(whole(send) <= limit && whole(recv) <= limit);
            prop_assert!(send.idle + Duration::from_millis(250) <= recv.idle);
            // And not too soon.
            prop_assert!(whole(recv) >= limit / 2, "{recv:?}");
        }
    }

    #[test]
    fn a_late_answer_makes_a_stream_well_again() {
        let start = Instant::now();
        let mut monitor = LivenessMonitor::default();
        let sample = |silent, probes| TcpSample {
            silent: ms(silent),
            probes,
            outstanding: true,
            round_trip: NEAR,
            segment: 1448,
        };
        assert_eq!(monitor.check(start, sample(500, 1)), Finding::Probing);
        assert_eq!(monitor.check(start + ms(1500), sample(2000, 3)), Finding::Probing);
        assert_eq!(monitor.check(start + ms(1600), sample(3, 0)), Finding::Well);
        assert_eq!(monitor.check(start + ms(4000), sample(2400, 2)), Finding::Probing);
        // 1.6 s after the probe, and the distance.
        assert_eq!(monitor.check(start + ms(5601), sample(4000, 3)), Finding::Lost(ms(4000)));
    }

    #[test]
    fn a_socket_tells_what_is_outstanding() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let here = std::net::TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (there, _) = listener.accept().expect("a connection");
        let sample = TcpSample::of(&here).expect("the kernel tells");
        assert!(!sample.outstanding && sample.probes == 0, "{sample:?}");
        // Sends more than the peer's buffers hold, and the peer does not read.
        here.set_nonblocking(true).expect("set");
        let block = vec![0; 1 << 20];
        while io::Write::write(&mut &here, &block).is_ok() {}
        assert!(TcpSample::of(&here).expect("the kernel tells").outstanding);
        drop(there);
        close_hard(&here);
        probe_often(&here, Duration::from_secs(60));
        Probes::OFTEN.set(&here);
    }
}
