//! What is seen of all streams of a connection together.

use std::io;
use std::net::IpAddr;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use super::stream::Stream;
use crate::session::lifeline::Alone;
use crate::session::link::{Link, Sock};
use crate::session::watch::{SILENCE, Sight};

/// Whether the peer's kernel has answered anything on one of the streams since then.
pub fn is_heard_since<Io>(since: Instant, streams: &[Stream<Io>], sock: impl Fn(&Io) -> &Sock) -> bool {
    let is_heard = |stream: &Stream<Io>| {
        let sight = stream.peek(|io| Sight::of(sock(io))).flatten();
        sight.is_some_and(|sight| sight.silent < since.elapsed())
    };
    streams.iter().any(is_heard)
}

/// Ends a suspicion that the peer is gone when anything has come back on a stream since it began. The streams are looked at
/// without its lock.
pub fn drop_refuted<'a, Io>(
    alone: impl Fn() -> MutexGuard<'a, Option<Alone>>,
    streams: &[Stream<Io>],
    sock: impl Fn(&Io) -> &Sock,
) {
    let Some(since) = alone().as_ref().filter(|alone| alone.is_suspicion()).map(Alone::since) else { return };
    if is_heard_since(since, streams, sock) {
        alone().take_if(|alone| alone.is_suspicion() && alone.since() == since);
    }
}

/// The streams whose local address is the interface's.
pub fn over_interface<Io>(
    link: &Link,
    interface: u32,
    streams: &[Stream<Io>],
    sock: impl Fn(&Io) -> &Sock,
) -> Vec<usize> {
    let addresses: Vec<IpAddr> =
        link.local.iter().filter(|rail| rail.index == interface).map(|rail| rail.address.ip()).collect();
    if addresses.is_empty() {
        return Vec::new();
    }
    let local = |io: &mut Io| sock(io).local_addr().ok().and_then(|address| address.as_socket());
    let is_there =
        |index: &usize| streams[*index].peek(local).flatten().is_some_and(|address| addresses.contains(&address.ip()));
    (0..streams.len()).filter(is_there).collect()
}

/// Adds to the lost streams those on the same path that have been silent for as long: they only have not asked. What
/// was lost would otherwise travel again over them.
pub fn share_fate<Io>(lost: &mut Vec<(usize, Duration)>, streams: &[Stream<Io>], sock: impl Fn(&Io) -> &Sock) {
    if lost.is_empty() {
        return;
    }
    let path = |sock: &Sock| {
        let ip = |address: io::Result<socket2::SockAddr>| Some(address.ok()?.as_socket()?.ip());
        (ip(sock.local_addr()), ip(sock.peer_addr()))
    };
    let dead: Vec<_> = lost.iter().filter_map(|(index, _)| streams[*index].peek(|io| path(sock(io)))).collect();
    for (index, stream) in streams
        .iter()
        .enumerate()
        .filter(|(index, _)| !lost.iter().any(|(other, _)| other == index))
        .collect::<Vec<_>>()
    {
        let silent = stream.peek(|io| dead.contains(&path(sock(io))).then(|| Sight::of(sock(io)))?).flatten();
        if let Some(sight) = silent.filter(|sight| sight.silent >= SILENCE + sight.answering()) {
            lost.push((index, sight.silent));
        }
    }
}
