//! How a receiver ends its connection: it reports everything that has arrived to the sender.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Io, RecvConn};
use crate::os::error::Error;
use crate::session::frame::MAX_STREAMS;
use crate::session::silences::CLOSE_PATIENCE;
use crate::tcp::connection::rest;
use crate::tcp::stream::WRITE;

impl RecvConn {
    /// Reports everything that has arrived, and says goodbye.
    pub(super) fn say_goodbye(&self) {
        self.send_final_state();
        self.closing.store(true, Ordering::Release);
        // For a sender whose streams die before the goodbye reaches it.
        self.net.remember_closed(&self.link, self.own.completed.load(Ordering::Relaxed));
        // Each stream carries its own goodbye, behind its last acknowledgement: the sender reads the streams in any
        // order. The goodbyes have a second to leave.
        let start = Instant::now();
        while start.elapsed() < CLOSE_PATIENCE / 2 && !self.health.is_failed() {
            for index in 0..MAX_STREAMS {
                self.run(index, WRITE);
            }
            let parted = |io: &Io| io.parted && io.sent == io.out.len();
            if self.streams.iter().all(|stream| stream.lock().as_ref().is_none_or(|io| parted(io))) {
                break;
            }
            rest(start);
        }
    }

    /// Ends a connection whose listener was closed before the peer's confirmation arrived: the peer considers it
    /// established, and is notified. This never waits, so the control thread may call it.
    pub(crate) fn turn_away(&self) {
        self.closing.store(true, Ordering::Release);
        self.fail(Error::remote("the listener was closed before the connection was accepted"));
        self.quiesce();
        self.net.forget(self.link.connection);
    }

    /// Reports before the goodbye how many frames were received on streams that are not connected. Their last
    /// acknowledgements may be lost, and the sender would consider received frames lost. Without any stream it waits up
    /// to 4 s for one to reconnect; all closes towards a peer process that does not answer share this time.
    pub(super) fn send_final_state(&self) {
        let start = Instant::now();
        let deadline = self.net.silences().since(&self.peer.label, start).unwrap_or(start) + 2 * CLOSE_PATIENCE;
        let is_away = || self.health.live() == 0 && !self.health.is_failed() && !self.health.is_peer_done();
        if self.recovery && is_away() {
            while is_away() {
                if Instant::now() >= deadline {
                    self.net.silences().unanswered(&self.peer.label, start, Instant::now());
                    return;
                }
                rest(start);
            }
            self.net.silences().answered(&self.peer.label);
        }
        for index in 0..MAX_STREAMS {
            // An epoch that begins at this moment has its socket before it can be fenced here.
            let fenced = self.streams[index].while_away(|| {
                let core = &mut self.state().core;
                let epoch = core.epoch(index);
                let frames = if epoch > 0 || index == 0 { core.fence(index, epoch) } else { None };
                frames.map(|frames| (epoch, frames))
            });
            if let Some((epoch, frames)) = fenced.flatten() {
                self.send_fenced(index, epoch, frames);
            }
        }
    }
}
