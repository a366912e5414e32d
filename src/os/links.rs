//! Notifications about network interfaces that go down, from the kernel's rtnetlink.
//!
//! TCP is not notified when its interface loses its carrier; it retransmits until its timers end. But the kernel
//! notifies every socket that listens to rtnetlink(7), at once and without any privilege that a container could lack.
//!
//! This module must not know what an interface is used for.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::fd::{Fd, Registered};

/// What happened to an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    /// The kernel's index of the interface.
    pub index: u32,
    /// Whether it can carry packets.
    pub running: bool,
}

/// What the kernel has reported since the last read.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// In the order in which it happened.
    pub events: Vec<Event>,
    /// The kernel had more to report than it had room for (netlink(7), `ENOBUFS`): the state of interfaces must be
    /// queried with [`Links::is_running`].
    pub are_incomplete: bool,
}

/// A socket on which the kernel reports.
pub(crate) struct Links(Fd);

impl Links {
    /// Starts to listen.
    ///
    /// # Errors
    /// When the system has no such socket (a sandbox may forbid it), or no descriptor.
    pub(crate) fn open() -> io::Result<Self> {
        let fd = Registered::open(|| {
            let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            // SAFETY: plain system call.
            let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: the descriptor was just made and has no other owner.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            // SAFETY: all zeroes is a valid value of this struct of numbers.
            let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
            address.nl_family = libc::AF_NETLINK as u16;
            address.nl_groups = libc::RTMGRP_LINK as u32;
            let length = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
            // SAFETY: the kernel reads the struct, which outlives the call.
            match unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) } {
                0 => Ok(fd),
                _ => Err(io::Error::last_os_error()),
            }
        })?;
        Ok(Self(fd))
    }

    /// The events since the last read.
    pub(crate) fn read(&self) -> News {
        let mut news = News::default();
        let mut buffer = [0_u8; 16 << 10];
        loop {
            // SAFETY: the buffer is ours and has the passed length.
            let got = unsafe { libc::recv(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
            match usize::try_from(got) {
                Ok(length) if length > 0 => read_messages(&buffer[..length], &mut news.events),
                Ok(_) => return news,
                Err(_) => match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => {}
                    // Reported once for all that is dropped until the socket has been read empty, as this loop does.
                    Some(libc::ENOBUFS) => news.are_incomplete = true,
                    _ => return news,
                },
            }
        }
    }

    /// Whether an interface can carry packets now. One that is gone cannot.
    ///
    /// # Errors
    /// When the system does not answer now; it may later.
    pub(crate) fn is_running(&self, index: u32) -> io::Result<bool> {
        let Ok(index) = i32::try_from(index) else { return Ok(false) };
        // SAFETY: all zeroes is a valid value of this struct of numbers.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_ifru.ifru_ifindex = index;
        // The first call gets the interface's name into the struct, the second queries its flags by that name. A
        // netlink socket accepts both, so that no further descriptor is needed.
        for question in [libc::SIOCGIFNAME, libc::SIOCGIFFLAGS] {
            // SAFETY: the kernel reads and writes the struct, which outlives the call.
            if unsafe { libc::ioctl(self.0.as_raw_fd(), question as _, &raw mut request) } != 0 {
                let error = io::Error::last_os_error();
                let is_gone = matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO));
                return if is_gone { Ok(false) } else { Err(error) };
            }
        }
        // SAFETY: the second call filled the flags.
        Ok(is_up(u32::from(unsafe { request.ifr_ifru.ifru_flags } as u16)))
    }
}

impl AsRawFd for Links {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Whether an interface with these flags can carry packets.
fn is_up(flags: u32) -> bool {
    let wanted = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
    flags & wanted == wanted
}

/// Length, type, flags, sequence, port: `struct nlmsghdr`.
const HEADER: usize = 16;
/// Family, type, index, flags, change: `struct ifinfomsg`.
const LINK: usize = 16;

fn read_messages(mut bytes: &[u8], events: &mut Vec<Event>) {
    let number = |bytes: &[u8], at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    while bytes.len() >= HEADER {
        let length = number(bytes, 0) as usize;
        if length < HEADER || length > bytes.len() {
            return;
        }
        let kind = u16::from_ne_bytes([bytes[4], bytes[5]]);
        let is_link = (kind == libc::RTM_NEWLINK || kind == libc::RTM_DELLINK) && length >= HEADER + LINK;
        // A message of another family is about a role of the interface. One of AF_BRIDGE means that it joined or left a
        // bridge, not that it has gone.
        if is_link && bytes[HEADER] == libc::AF_UNSPEC as u8 {
            let flags = number(bytes, HEADER + 8);
            let running = kind == libc::RTM_NEWLINK && is_up(flags);
            events.push(Event { index: number(bytes, HEADER + 4), running });
        }
        // Messages are aligned to four bytes.
        bytes = &bytes[length.next_multiple_of(4).min(bytes.len())..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(kind: u16, index: u32, flags: u32) -> Vec<u8> {
        let mut bytes = vec![0; HEADER + LINK + 5];
        let length = bytes.len() as u32;
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[HEADER + 4..HEADER + 8].copy_from_slice(&index.to_ne_bytes());
        bytes[HEADER + 8..HEADER + 12].copy_from_slice(&flags.to_ne_bytes());
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn an_interface_runs_when_it_is_up_and_has_a_carrier() {
        let (up, running) = (libc::IFF_UP as u32, libc::IFF_RUNNING as u32);
        let mut bytes = message(libc::RTM_NEWLINK, 3, up | running);
        bytes.extend(message(libc::RTM_NEWLINK, 4, up));
        bytes.extend(message(libc::RTM_NEWADDR, 5, 0));
        bytes.extend(message(libc::RTM_DELLINK, 6, up | running));
        let mut events = Vec::new();
        read_messages(&bytes, &mut events);
        let expected = [(3, true), (4, false), (6, false)].map(|(index, running)| Event { index, running });
        assert_eq!(events, expected);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            read_messages(&bytes, &mut Vec::new());
        }
    }

    #[test]
    fn a_port_that_leaves_its_bridge_has_not_gone_down() {
        let running = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
        let mut left = message(libc::RTM_DELLINK, 7, running);
        left[HEADER] = libc::AF_BRIDGE as u8;
        let mut events = Vec::new();
        read_messages(&left, &mut events);
        assert!(events.is_empty(), "{events:?}");
    }

    #[test]
    fn the_socket_opens_and_has_no_news() {
        let links = Links::open().expect("a socket");
        // Other tests do not change interfaces of this namespace.
        assert!(links.as_raw_fd() >= 0);
        let _ = links.read();
    }

    #[test]
    fn an_interface_that_is_not_there_does_not_run() {
        let links = Links::open().expect("a socket");
        // SAFETY: the name is a C string.
        let loopback = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        assert!(links.is_running(loopback).expect("the system says"), "the loopback runs");
        assert!(!links.is_running(u32::MAX).expect("the system says"));
        assert!(!links.is_running(i32::MAX as u32).expect("the system says"));
    }
}
