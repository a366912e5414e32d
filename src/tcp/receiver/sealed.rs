//! Reading a stream with checksums or encryption ([`crate::session::seal`]): no byte goes to its place before its whole
//! chunk has been checked.

use std::os::fd::AsRawFd;

use super::{Body, Io, RecvConn};
use crate::engine::schedule::constants::RECEIVE_SHARE;
use crate::session::frame::Type;
use crate::session::peer::{Broken, reported_by_peer};
use crate::session::seal::codec::Refused;
use crate::session::seal::intake::Item;
use crate::session::wire::{self, Piece};

impl RecvConn {
    /// As [`RecvConn::read`], on a protected stream.
    pub(super) fn read_sealed(&self, index: usize, io: &mut Io) -> Result<(bool, bool), Broken> {
        let mut share = RECEIVE_SHARE;
        let mut moved = false;
        loop {
            if share == 0 {
                return Ok((true, true));
            }
            let has_parted = self.has_parted(io);
            let Some(sides) = &mut io.seal else { return Ok((moved, false)) };
            let room = sides.intake.room();
            let wanted = room.len();
            // SAFETY: the room is this stream's own.
            let got = unsafe { wire::receive(io.sock.as_raw_fd(), Piece::of_mut(room)) };
            let Some(bytes) = self.health.read(got, has_parted, |error| self.starved(index, error))? else {
                return Ok((moved, false));
            };
            moved = true;
            share = share.saturating_sub(bytes);
            sides.intake.filled(bytes);
            self.take_sealed(index, io)?;
            // As on a plain stream: the first stream is read again only while a frame is open.
            if index == 0 && bytes < wanted && matches!(io.body, Body::None) {
                return Ok((true, false));
            }
        }
    }

    /// Takes whole and checked frames out of the bounce buffer. A chunk's header is checked against the posted receives
    /// as soon as it has arrived. Its bytes are placed when all of them have arrived.
    fn take_sealed(&self, index: usize, io: &mut Io) -> Result<(), Broken> {
        while let Some(sides) = &mut io.seal {
            match sides.intake.take() {
                Ok(None) => break,
                Ok(Some(Item::Began(header))) => {
                    if header.kind == Type::Data {
                        let to = self.frame_began(&mut self.state(), index, &header, &mut io.followed);
                        let to = to.map_err(Broken::Fatal)?;
                        self.chunk_began(&mut io.followed);
                        io.body = Body::Data { to, rest: header.length as usize, polled: false };
                    }
                }
                Ok(Some(Item::Whole(header, bytes))) => match (header.kind, &io.body) {
                    (Type::Data, Body::Data { to, .. }) => {
                        // SAFETY: source is the bounce buffer, destination the range that was checked when the frame
                        // began, in a buffer that is the transport's; they do not overlap.
                        unsafe { wire::copy_ascending(bytes.as_ptr(), to.data, bytes.len()) };
                        let length = bytes.len();
                        self.placed(index, io, length);
                    }
                    (Type::Fail, _) => return Err(Broken::Fatal(reported_by_peer(header.order, bytes))),
                    _ => self.on_frame(io, &header).map_err(Broken::Fatal)?,
                },
                Err(Refused::Wrong(error)) => return Err(Broken::Fatal(error)),
                Err(Refused::Damaged) => {
                    let chunk = sides.intake.open().map(|header| (header.tag, header.order, header.offset));
                    return Err(self.damage.found(chunk, self.recovery, &self.peer, &self.counters));
                }
            }
        }
        Ok(())
    }
}
