//! The rail of a network event: interface, NIC or, if the transport does not report it, all sockets together.

use super::event::Body;
use super::hash::QuickMap;
use super::names::Name;
use crate::nccl::net_event::SEVERAL;

/// `NCCL_SOCKET_SEND`; 1 is a receive.
const SOCKET_SEND: i32 = 0;

/// A way out of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Rail {
    /// A network interface or an RDMA device that Towline used.
    Interface(Name),
    /// Towline's rail, of a connection whose interfaces are not known.
    Number(u16),
    /// A device of NCCL's own IB transport.
    Device(i32),
    /// NCCL's own sockets, which do not report it.
    Sockets,
}

impl Rail {
    /// Rail, direction and length of a network event; None when its descriptor does not contain them.
    pub(crate) fn of(body: &Body) -> Option<(Rail, bool, u64)> {
        match *body {
            Body::NetTowline(part) => Some((Rail::Number(part.rail), part.send, part.length)),
            Body::NetSocket { op, length, .. } => Some((Rail::Sockets, op == SOCKET_SEND, length)),
            // The opcodes of sends are small; ibv_wc_opcode's receives begin at 128.
            Body::NetIb { device, opcode, length, .. } => Some((Rail::Device(device), opcode < 128, length)),
            _ => None,
        }
    }

    /// Whether it is one rail, to be compared with others.
    pub(crate) fn is_one(self) -> bool {
        self != Rail::Number(SEVERAL)
    }

    /// Its name for users.
    pub(crate) fn name(self) -> String {
        match self {
            Rail::Interface(name) => name.text().into(),
            Rail::Number(SEVERAL) => "several rails".into(),
            Rail::Number(number) => format!("unknown interface {number}"),
            Rail::Device(device) => format!("device {device}"),
            Rail::Sockets => "sockets".into(),
        }
    }
}

/// Remote hosts that are distinguished; those that appear later count as one. Each has two series.
const HOSTS: usize = 512;

#[derive(Debug, Clone, Default)]
struct Link {
    interfaces: Vec<Name>,
    host: usize,
}

/// The known facts about the transport's connections, by number and direction.
#[derive(Debug, Clone, Default)]
pub struct Links {
    links: QuickMap<(u64, bool), Link>,
    hosts: Vec<String>,
}

impl Links {
    /// Whether this connection has been reported.
    pub(crate) fn knows(&self, link: u64, send: bool) -> bool {
        self.links.contains_key(&(link, send))
    }

    /// A connection's interfaces, in the order of its rails, and the host at its other end.
    pub(crate) fn learn(&mut self, link: u64, send: bool, interfaces: Vec<Name>, host: &str) {
        let host = self.hosts.iter().position(|known| known == host).unwrap_or_else(|| {
            if self.hosts.len() <= HOSTS {
                self.hosts.push(if self.hosts.len() == HOSTS { "others" } else { host }.into());
            }
            self.hosts.len() - 1
        });
        self.links.insert((link, send), Link { interfaces, host });
    }

    /// The interface of a connection's next rail.
    pub(crate) fn add(&mut self, link: u64, send: bool, name: Name) {
        self.links.entry((link, send)).or_default().interfaces.push(name);
    }

    /// Takes in what `other` knows.
    pub(crate) fn join(&mut self, other: Self) {
        self.links.extend(other.links);
    }

    /// All connections with their interfaces.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, bool, &[Name])> {
        self.links.iter().map(|(&(link, send), known)| (link, send, &known.interfaces[..]))
    }

    /// The hosts at the other ends.
    pub(crate) fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Which of [`Links::hosts`] is at the other end of a part.
    pub(crate) fn host(&self, body: &Body) -> Option<usize> {
        let Body::NetTowline(part) = *body else { return None };
        self.links.get(&(part.link, part.send)).map(|link| link.host)
    }

    /// As [`Rail::of`], by the interface's name where it is known.
    pub(crate) fn rail(&self, body: &Body) -> Option<(Rail, bool, u64)> {
        let (rail, send, length) = Rail::of(body)?;
        let name = match *body {
            Body::NetTowline(part) => {
                self.links.get(&(part.link, send)).and_then(|link| link.interfaces.get(usize::from(part.rail)))
            }
            _ => None,
        };
        Some((name.map_or(rail, |&name| Rail::Interface(name)), send, length))
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::NetPart;
    use super::*;

    #[test]
    fn a_rail_is_named_by_the_interface_of_its_connection() {
        let mut links = Links::default();
        links.learn(7, true, vec!["eth0".into(), "eth1".into()], "node2");
        links.learn(8, true, Vec::new(), "node2");
        let of = |link, send, rail| {
            let body = Body::NetTowline(NetPart { link, send, rail, ..NetPart::default() });
            (links.rail(&body).map(|found| found.0.name()), links.host(&body))
        };
        assert_eq!(of(7, true, 1), (Some("eth1".into()), Some(0)));
        assert_eq!(of(7, true, SEVERAL), (Some("several rails".into()), Some(0)));
        assert_eq!(of(7, false, 1), (Some("unknown interface 1".into()), None));
        assert_eq!(of(8, true, 0), (Some("unknown interface 0".into()), Some(0)));
    }

    #[test]
    fn hosts_beyond_a_number_are_one() {
        let mut links = Links::default();
        (0..2000).for_each(|number| links.learn(number, true, Vec::new(), &format!("node{number}")));
        assert_eq!((links.hosts().len(), links.hosts()[HOSTS].as_str()), (HOSTS + 1, "others"));
        let last = Body::NetTowline(NetPart { link: 1999, send: true, ..NetPart::default() });
        assert_eq!(links.host(&last), Some(HOSTS));
    }
}
