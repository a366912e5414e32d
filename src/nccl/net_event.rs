//! What happened to one part of a transfer on the wire: the descriptor that the transport hands to a profiler.
//!
//! NCCL carries it untouched, as the `data` of a NetPlugin event whose plugin id is [`PLUGIN_ID`]. The transport
//! fills it, the built-in profiler reads it, and neither knows the other: this file is all that they share. Any
//! other profiler may read it too; the layout is fixed by [`VERSION`] and guarded by [`NetEvent::size`].
//!
//! The same structure serves start and update: at the start the times are zero, the update that precedes the stop
//! repeats the start with the times filled in. A part that has ended before its start is reported ([`FLAG_ENDED`]) has
//! its times in the start, and no update.

use std::mem::size_of;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, Ordering};

/// NCCL's plugin type for InfiniBand (`NCCL_PROFILER_NET_TYPE_IB`), version 1.
pub const PLUGIN_ID_IB: i64 = (1 << 16) | 1;

/// NCCL's plugin type for sockets (`NCCL_PROFILER_NET_TYPE_SOCK`), version 1.
pub const PLUGIN_ID_SOCKET: i64 = (2 << 16) | 1;

/// The version of [`NetEvent`], in the low 16 bits of the plugin id as NCCL does it.
pub(crate) const VERSION: i64 = 1;

/// Towline's own plugin id: "TL" in the type bits, the version below.
pub const PLUGIN_ID: i64 = (0x544c << 16) | VERSION;

/// The plugin id of a [`NetSum`], which only [`Reader::Sums`] receives.
pub(crate) const PLUGIN_ID_SUM: i64 = (0x544c << 16) | 0x8001;

/// [`NetEvent::flags`]: this side sends (otherwise it receives).
pub const FLAG_SEND: u32 = 1;

/// [`NetEvent::flags`]: the part repeats bytes that were on the wire before; they count as resent, not as moved.
pub const FLAG_RESEND: u32 = 1 << 1;

/// [`NetEvent::flags`], in a start: the part has ended already, [`NetEvent::wire_ns`] after it began. This event holds
/// everything, the stop follows at once and without an update.
pub(crate) const FLAG_ENDED: u32 = 1 << 2;

/// [`NetEvent::flags`], from this bit on, eight bits: how many further parts of the same transfer lie behind this one
/// in memory, one after another. Only in a start, of parts that have all ended, and only for [`Reader::Patient`], which
/// takes each for an event of its own; a stop follows for all of them.
pub(crate) const MORE_SHIFT: u32 = 8;

/// The most parts that one start brings.
pub(crate) const MOST_AT_ONCE: usize = 8;

/// [`NetEvent::carrier`]: a socket; `device` is its descriptor, `opcode` 0 for a send and 1 for a receive.
pub(crate) const CARRIER_SOCKET: u32 = 1;

/// [`NetEvent::carrier`]: a queue pair; all fields below have the meaning of NCCL's descriptor for IB.
pub(crate) const CARRIER_QUEUE_PAIR: u32 = 2;

/// [`NetEvent::offset`] when it is not known: the receiving side of several queue pairs learns how much each brought,
/// not where it belongs.
pub const SOMEWHERE: u64 = u64::MAX;

/// [`NetEvent::rail`] and [`NetEvent::stream`] when a part stands for several of them.
pub(crate) const SEVERAL: u16 = u16::MAX;

/// One part of one transfer, as the transport saw it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetEvent {
    /// `size_of::<NetEvent>()` of the writer: a reader takes no more than this.
    pub size: u32,
    /// [`FLAG_SEND`], [`FLAG_RESEND`].
    pub flags: u32,
    /// Names the connection, the same number on both of its ends and no secret: it pairs sends with receives.
    pub link: u64,
    /// The message's number on its connection, the same on both ends.
    pub message: u64,
    /// Where the part begins in the message, in bytes, or [`SOMEWHERE`].
    pub offset: u64,
    /// How long the part is, in bytes.
    pub length: u64,
    /// Which rail (network interface, NIC) carried it. [`SEVERAL`] of a part that stands for the rest of a transfer,
    /// when the connection has several.
    pub rail: u16,
    /// Which stream or queue pair of the connection carried it. [`SEVERAL`] as for the rail, and of a part that stands
    /// for several chunks of one rail ([`Reader::Sums`]).
    pub stream: u16,
    /// How often parts of it had to be sent again.
    pub retransmissions: u32,
    /// The other end's address as IPv6 (IPv4 is mapped), all zero when there is none.
    pub peer: [u8; 16],
    /// The other end's port, 0 when there is none.
    pub peer_port: u16,
    /// How many streams or queue pairs of the connection were re-established since its last event.
    pub reconnects: u16,
    /// [`CARRIER_SOCKET`], [`CARRIER_QUEUE_PAIR`], or 0 when it is unknown.
    pub carrier: u32,
    /// How long it waited for the receiver to post its buffer (clear-to-send), in nanoseconds. The part that
    /// leaves first has it, on behalf of the whole transfer; the others have 0.
    pub wait_receiver_ns: u64,
    /// How long it waited for room in the socket, in nanoseconds.
    pub wait_socket_ns: u64,
    /// How long it waited for credit (eager window, unacknowledged-bytes limit, entries of a queue pair's send queue),
    /// in nanoseconds. As with the wait for the receiver, only the first part has it. How long later parts waited, for
    /// a stream whose window was full or behind parts before them, is not reported.
    pub wait_credit_ns: u64,
    /// How long it was on the wire: from the first byte handed over to the last one acknowledged, in nanoseconds.
    /// A send that ends when its bytes were copied: to the last one that the kernel took.
    pub wire_ns: u64,
    /// The work request's number.
    pub wr_id: u64,
    /// The card's number, or the socket's descriptor.
    pub device: i32,
    /// The verbs opcode (`IBV_WR_*` of a send, `IBV_WC_*` of a receive), or the socket's operation.
    pub opcode: i32,
    /// The queue pair's number.
    pub queue_pair: i32,
    /// How long before this call it happened, in nanoseconds, at most 4.29 s: in a start, that the part began; in an
    /// update, that it ended.
    pub ago_ns: u32,
}

const _: () = assert!(size_of::<NetEvent>() == 128, "the layout of version 1 is frozen");

/// What a rail carried of a transfer that has ended, and that no other event reports: what [`Reader::Sums`] needs of a
/// [`NetEvent`]. It stays within this library, whose transport and profiler are of one version, and may change with it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetSum {
    /// As [`NetEvent::link`].
    pub link: u64,
    /// As [`NetEvent::message`].
    pub message: u64,
    /// As [`NetEvent::length`].
    pub length: u64,
    /// As [`NetEvent::wait_receiver_ns`].
    pub wait_receiver_ns: u64,
    /// As [`NetEvent::wait_socket_ns`].
    pub wait_socket_ns: u64,
    /// As [`NetEvent::wait_credit_ns`].
    pub wait_credit_ns: u64,
    /// As [`NetEvent::wire_ns`].
    pub wire_ns: u64,
    /// As [`NetEvent::rail`].
    pub rail: u16,
    /// Whether this side sends.
    pub send: bool,
}

/// The data of an event with [`PLUGIN_ID_SUM`]. The reader reports here whether it takes the data, and declines the
/// event itself. Nothing about it follows later, so a stop would be a useless call.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct NetSumNews {
    /// The sum.
    pub sum: NetSum,
    /// When the transfer had ended, by [`crate::os::ticks::Ticks::number`].
    pub ended: u64,
    /// Written by the reader.
    pub taken: bool,
}

/// The reader of [`NetEvent`]s in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Reader {
    /// None that is known.
    None = 0,
    /// The profiler of this library, with another behind it that goes by when it is called.
    Hasty = 1,
    /// The profiler of this library alone: it goes by the times in the events.
    Patient = 2,
    /// The same, and it draws nothing: it adds up what each rail carried. So the bytes of a transfer on one rail may be
    /// one part, however many streams took them. The data about a transfer's only part is a [`NetSum`].
    Sums = 3,
}

/// NCCL has one profiler, so if it is this library's own, no other reader misses the events that only others could
/// read.
static READER: AtomicU8 = AtomicU8::new(Reader::None as u8);

/// The profiler of this library enables network events. This is final: NCCL does not change its profiler.
pub fn announce(reader: Reader) {
    READER.store(reader as u8, Ordering::Relaxed);
}

/// The known reader of network events.
pub(crate) fn reader() -> Reader {
    match READER.load(Ordering::Relaxed) {
        0 => Reader::None,
        1 => Reader::Hasty,
        2 => Reader::Patient,
        _ => Reader::Sums,
    }
}

impl NetEvent {
    /// An event with `size` set and everything else zero.
    pub fn new() -> Self {
        Self { size: size_of::<Self>() as u32, ..Self::default() }
    }

    /// Sets the other end's address.
    pub fn set_peer(&mut self, peer: SocketAddr) {
        self.peer = match peer.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        self.peer_port = peer.port();
    }

    /// The other end's address, if there is one.
    pub fn peer(&self) -> Option<SocketAddr> {
        let ip = Ipv6Addr::from(self.peer);
        (!ip.is_unspecified()).then(|| SocketAddr::new(ip.to_canonical(), self.peer_port))
    }

    /// Whether this side sends.
    pub fn is_send(&self) -> bool {
        self.flags & FLAG_SEND != 0
    }

    /// Whether the part had ended when it was reported.
    pub(crate) fn has_ended(&self) -> bool {
        self.flags & FLAG_ENDED != 0
    }

    /// How many further parts lie behind it ([`MORE_SHIFT`]).
    pub(crate) fn more(&self) -> usize {
        if self.has_ended() { (self.flags >> MORE_SHIFT & 0xff) as usize } else { 0 }
    }

    /// So many do, fewer than [`MOST_AT_ONCE`].
    pub(crate) fn set_more(&mut self, more: usize) {
        self.flags = self.flags & !(0xff << MORE_SHIFT) | (more as u32 & 0xff) << MORE_SHIFT;
    }

    /// Whether the bytes were on the wire before.
    pub fn is_resend(&self) -> bool {
        self.flags & FLAG_RESEND != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_address_survives_the_descriptor() {
        let mut event = NetEvent::new();
        assert_eq!(event.peer(), None);
        for text in ["10.1.2.3:4711", "[2001:db8::7]:9"] {
            let peer: SocketAddr = text.parse().unwrap();
            event.set_peer(peer);
            assert_eq!(event.peer(), Some(peer));
        }
    }

    #[test]
    fn an_event_says_whether_its_part_has_ended() {
        let event = NetEvent { flags: FLAG_SEND | FLAG_ENDED, ..NetEvent::new() };
        assert!(event.has_ended() && event.is_send() && !event.is_resend());
        assert!(!NetEvent { flags: FLAG_RESEND, ..event }.has_ended());
    }

    #[test]
    fn an_event_says_how_many_lie_behind_it_and_nothing_else_changes() {
        let mut event = NetEvent { flags: FLAG_SEND | FLAG_ENDED, ..NetEvent::new() };
        let before = event;
        assert_eq!(event.more(), 0);
        event.set_more(MOST_AT_ONCE - 1);
        assert_eq!((event.more(), event.is_send(), event.is_resend()), (MOST_AT_ONCE - 1, true, false));
        assert_eq!(NetEvent { flags: event.flags & !FLAG_ENDED, ..event }.more(), 0, "only what has ended has any");
        event.set_more(0);
        assert_eq!(event, before);
    }

    #[test]
    fn the_plugin_ids_carry_type_and_version_as_nccl_splits_them() {
        assert_eq!((PLUGIN_ID_IB, PLUGIN_ID_SOCKET, PLUGIN_ID), (0x1_0001, 0x2_0001, 0x544c_0001));
        assert_eq!(PLUGIN_ID_SUM, 0x544c_8001);
    }
}
