//! Which rail a network event was on: interface, NIC or, where the transport does not tell, all sockets together.

use std::collections::HashMap;

use super::event::Body;
use super::names::Name;
use crate::nccl::net_event::SEVERAL;

/// `NCCL_SOCKET_SEND`; 1 is a receive.
const SOCKET_SEND: i32 = 0;

/// A way out of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rail {
    /// A network interface or an RDMA device that Towline used.
    Interface(Name),
    /// Towline's rail, of a connection whose interfaces are not known.
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
            Rail::Interface(name) => name.text().into(),
            Rail::Number(SEVERAL) => "several rails".into(),
            Rail::Number(number) => format!("rail {number}"),
            Rail::Device(device) => format!("device {device}"),
            Rail::Sockets => "sockets".into(),
        }
    }
}

/// The interfaces of connections, by the connection's number and direction: a rail of a connection is one of them.
#[derive(Debug, Clone, Default)]
pub struct Interfaces(HashMap<(u64, bool), Vec<Name>>);

impl Interfaces {
    /// Whether these connections were told of.
    pub fn knows(&self, link: u64, send: bool) -> bool {
        self.0.contains_key(&(link, send))
    }

    /// A connection's interfaces, in the order of its rails.
    pub fn learn(&mut self, link: u64, send: bool, names: Vec<Name>) {
        self.0.insert((link, send), names);
    }

    /// The interface of a connection's next rail.
    pub fn add(&mut self, link: u64, send: bool, name: Name) {
        self.0.entry((link, send)).or_default().push(name);
    }

    /// As [`Rail::of`], by the interface's name where it is known.
    pub fn rail(&self, body: &Body) -> Option<(Rail, bool, u64)> {
        let (rail, send, length) = Rail::of(body)?;
        let name = match *body {
            Body::NetTowline(part) => {
                self.0.get(&(part.link, send)).and_then(|names| names.get(usize::from(part.rail)))
            }
            _ => None,
        };
        Some((name.map_or(rail, |&name| Rail::Interface(name)), send, length))
    }
}
