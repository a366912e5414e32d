//! Which rail a network event was on: interface, NIC or, where the transport does not tell, all sockets together.

use super::event::Body;
use crate::nccl::net_event::SEVERAL;

/// `NCCL_SOCKET_SEND`; 1 is a receive.
const SOCKET_SEND: i32 = 0;

/// A way out of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rail {
    /// Towline's rail.
    Number(u16),
    /// A device of NCCL's own IB transport.
    Device(i32),
    /// NCCL's own sockets, which do not tell.
    Sockets,
}

impl Rail {
    /// Rail, direction and length of a network event; None when its descriptor does not tell.
    pub fn of(body: &Body) -> Option<(Rail, bool, u64)> {
        match *body {
            Body::NetTowline(part) => Some((Rail::Number(part.rail), part.send, part.length)),
            Body::NetSocket { op, length, .. } => Some((Rail::Sockets, op == SOCKET_SEND, length)),
            // The opcodes of sends are small; ibv_wc_opcode's receives begin at 128.
            Body::NetIb { device, opcode, length, .. } => Some((Rail::Device(device), opcode < 128, length)),
            _ => None,
        }
    }

    /// Whether it is one rail, to be compared with others.
    pub fn is_one(self) -> bool {
        self != Rail::Number(SEVERAL)
    }

    /// Its name for people.
    pub fn name(self) -> String {
        match self {
            Rail::Number(SEVERAL) => "several rails".into(),
            Rail::Number(number) => format!("rail {number}"),
            Rail::Device(device) => format!("device {device}"),
            Rail::Sockets => "sockets".into(),
        }
    }
}
