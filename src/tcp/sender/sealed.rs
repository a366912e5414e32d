//! Sending and reading on a stream with checksums or encryption ([`crate::session::seal`]).

use std::os::fd::AsRawFd;

use super::moving::misdirected;
use super::{Io, Leaving, Outgoing, SendConn};
use crate::session::frame::{HEADER, Type};
use crate::session::peer::Broken;
use crate::session::seal::codec::{Refused, Sealed};
use crate::session::seal::intake::Item;
use crate::session::wire::{self, Piece};

impl Io {
    /// Protects the next piece to be sent, if that has not been done.
    pub(super) fn protect(&mut self) {
        let Some(sides) = &mut self.seal else { return };
        let header = self.header;
        self.out = self.out.take().map(|out| match out {
            Outgoing::Control(mut frames) => {
                sides.sealer.control(&mut frames);
                Outgoing::Sealed(Sealed::Bytes(frames), None)
            }
            Outgoing::Framed(body, leaving) => {
                // SAFETY: the piece belongs to a message that is not acknowledged, so its memory is the transport's.
                Outgoing::Sealed(unsafe { sides.sealer.chunk(header, body) }, Some(leaving))
            }
            Outgoing::Whole(bytes, leaving) => {
                // SAFETY: as above; the copy begins with the header.
                let sealed = unsafe {
                    let header = Piece { length: HEADER, ..bytes }.bytes().try_into().expect("a header's worth");
                    sides.sealer.chunk(header, bytes.skip(HEADER))
                };
                Outgoing::Sealed(sealed, Some(leaving))
            }
            sealed @ Outgoing::Sealed(..) => sealed,
        });
    }

    /// The piece was sent completely. Returns its chunk, if it was one.
    #[inline]
    pub(super) fn finished(&mut self) -> Option<Leaving> {
        self.sent = 0;
        match self.out.take()? {
            Outgoing::Control(mut bytes) => {
                if self.control.capacity() < bytes.capacity() && self.control.is_empty() {
                    // Its memory is used for the next frames.
                    bytes.clear();
                    self.control = bytes;
                }
                None
            }
            Outgoing::Framed(_, leaving) | Outgoing::Whole(_, leaving) => Some(leaving),
            Outgoing::Sealed(sealed, leaving) => {
                if let (Some(sides), Some(_)) = (&mut self.seal, &leaving) {
                    sides.sealer.sent(sealed);
                }
                leaving
            }
        }
    }
}

impl SendConn {
    /// As [`SendConn::read`], on a protected stream.
    pub(super) fn read_sealed(&self, index: usize, io: &mut Io, wake: &mut u64) -> std::result::Result<bool, Broken> {
        let Some(sides) = &mut io.seal else { return Ok(false) };
        let mut moved = false;
        loop {
            let room = sides.intake.room();
            let wanted = room.len();
            // SAFETY: the room is this stream's own.
            let got = unsafe { wire::receive(io.sock.as_raw_fd(), Piece::of_mut(room)) };
            let Some(bytes) = self.health.read(got, self.health.is_peer_done(), |error| self.starved(index, error))?
            else {
                return Ok(moved);
            };
            moved = true;
            sides.intake.filled(bytes);
            loop {
                match sides.intake.take() {
                    Ok(None) => break,
                    Ok(Some(Item::Began(header))) if header.kind == Type::Data => {
                        return Err(Broken::Fatal(misdirected(Type::Data)));
                    }
                    Ok(Some(Item::Began(_))) => {}
                    Ok(Some(Item::Whole(header, text))) => {
                        self.on_frame(index, &header, text, wake).map_err(Broken::Fatal)?;
                    }
                    Err(Refused::Wrong(error)) => return Err(Broken::Fatal(error)),
                    Err(Refused::Damaged) => {
                        return Err(self.damage.found(None, self.recovery, &self.peer, &self.counters));
                    }
                }
            }
            if bytes < wanted {
                return Ok(moved);
            }
        }
    }
}
