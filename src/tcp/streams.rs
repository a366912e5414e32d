//! Checks of all streams of a connection together.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::connection::{Connection, Direction, StreamIo, lock};
use crate::session::frame::MAX_STREAMS;
use crate::session::lifeline::PeerInquiry;
use crate::session::link::Sock;
use crate::session::liveness::{self, Finding, LivenessMonitor, SILENCE, TcpSample};
use crate::session::peer::lost;

/// The result of such a check.
pub(super) struct Checked {
    /// Streams on which nothing comes back, and for how long.
    pub(super) silent: Vec<(usize, Duration)>,
    /// Whether the peer's kernel has not acknowledged everything, or a request is outstanding.
    pub(super) outstanding: bool,
    /// How soon to check again.
    pub(super) next: Duration,
}

impl<D: Direction> Connection<D> {
    /// Checks whether something comes back on each stream; `each` gets the kernel's report of the stream. None when
    /// nothing has come back on any for so long that the connection has failed.
    pub(super) fn check_streams(
        &self,
        now: Instant,
        mut each: impl FnMut(usize, &Sock, TcpSample, &mut LivenessMonitor),
    ) -> Option<Checked> {
        let outstanding = self.requests.outstanding() > 0;
        let mut checked = Checked { silent: Vec::new(), outstanding, next: liveness::TICK };
        // How long nothing has come back on any stream.
        let mut least: Option<Duration> = None;
        for (index, stream) in self.streams.iter().enumerate() {
            let found = stream.with_io(|io| {
                let sample = TcpSample::of(io.sock())?;
                let monitor = &mut lock(&self.monitors)[index];
                each(index, io.sock(), sample, monitor);
                checked.outstanding |= sample.outstanding;
                let found = monitor.check(now, sample);
                let silence = monitor.silence(now, sample);
                least = Some(least.map_or(silence, |least| least.min(silence)));
                Some(found)
            });
            match found.flatten() {
                Some(Finding::Probing) => checked.next = liveness::SOON,
                Some(Finding::Lost(silence)) => {
                    checked.next = liveness::SOON;
                    checked.silent.push((index, silence));
                }
                Some(Finding::Well) | None => {}
            }
        }
        if let Some(silence) = least.filter(|least| *least >= self.net.config.peer_timeout) {
            self.fail_silently(lost(&liveness::silent(silence)).with_peer(&self.peer));
            self.chores.end();
            return None;
        }
        Some(checked)
    }

    /// Makes the kernel send pending data where nothing has moved for a few milliseconds
    /// ([`standstill`](super::standstill)).
    pub(super) fn push_if_stuck(&self) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let moved = count(&self.counters.chunks) + count(&self.counters.messages);
        // A send that was copied is done before its bytes arrive, so no request stands for them.
        let under_way = self.requests.outstanding() > 0 || D::is_under_way(&self.state());
        if self.standstill.is_due(under_way, moved, Instant::now()) {
            for stream in &self.streams {
                stream.with_io(|io| io.sock().set_tcp_nodelay(true));
            }
        }
    }

    /// Adds to the lost streams those on the same path that have been silent for as long: their kernels have
    /// not probed yet. Lost data would otherwise be resent over the same dead path.
    pub(super) fn share_fate(&self, lost: &mut Vec<(usize, Duration)>) {
        if lost.is_empty() {
            return;
        }
        let path = |sock: &Sock| {
            let ip = |address: io::Result<socket2::SockAddr>| Some(address.ok()?.as_socket()?.ip());
            (ip(sock.local_addr()), ip(sock.peer_addr()))
        };
        let dead: Vec<_> =
            lost.iter().filter_map(|(index, _)| self.streams[*index].with_io(|io| path(io.sock()))).collect();
        for (index, stream) in self.streams.iter().enumerate() {
            if lost.iter().any(|(other, _)| *other == index) {
                continue;
            }
            let silent =
                stream.with_io(|io| dead.contains(&path(io.sock())).then(|| TcpSample::of(io.sock()))?).flatten();
            if let Some(sample) = silent.filter(|sample| sample.silent >= SILENCE + sample.answering()) {
                lost.push((index, sample.silent));
            }
        }
    }

    /// The kernel's report about each stream that is connected.
    pub(super) fn samples(&self) -> impl Iterator<Item = TcpSample> {
        self.streams.iter().filter_map(|stream| stream.with_io(|io| TcpSample::of(io.sock())).flatten())
    }

    /// Whether the peer's kernel has answered anything on one of the streams since then.
    pub(super) fn has_received_since(&self, since: Instant) -> bool {
        self.samples().any(|sample| sample.silent < since.elapsed())
    }

    /// Ends a suspicion that the peer is gone when anything has come back on a stream since it began. The thread polls
    /// the streams without the suspicion's lock.
    pub(super) fn drop_refuted(&self) {
        let suspected = lock(&self.inquiry).as_ref().filter(|inquiry| inquiry.is_suspicion()).map(PeerInquiry::since);
        let Some(since) = suspected else { return };
        if self.has_received_since(since) {
            lock(&self.inquiry).take_if(|inquiry| inquiry.is_suspicion() && inquiry.since() == since);
        }
    }

    /// The streams whose local address is the interface's.
    pub(super) fn over_interface(&self, interface: u32) -> Vec<usize> {
        let rails = self.link.local.iter().filter(|rail| rail.index == interface);
        let addresses: Vec<IpAddr> = rails.map(|rail| rail.address.ip()).collect();
        if addresses.is_empty() {
            return Vec::new();
        }
        let local = |io: &mut D::Io| io.sock().local_addr().ok().and_then(|address| address.as_socket());
        let is_there = |index: &usize| {
            self.streams[*index].with_io(local).flatten().is_some_and(|address| addresses.contains(&address.ip()))
        };
        (0..MAX_STREAMS).filter(is_there).collect()
    }
}
