//! Messages between the program's own processes, as lines of JSON over a stream socket.
//!
//! Guarantees: a message arrives whole or not at all; a peer that went away is an error that names it. A line has at
//! most [`LONGEST_LINE`] bytes, so that a stranger on a listening port cannot fill the memory.

use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::os::error::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::Socket;

const LONGEST_LINE: usize = 1 << 20;

/// One end of a two-way connection.
pub(crate) struct Channel {
    socket: Socket,
    unread: Vec<u8>,
    peer: String,
}

impl Channel {
    pub(crate) fn unix(socket: UnixStream, peer: impl Into<String>) -> Self {
        Self { socket: socket.into(), unread: Vec::new(), peer: peer.into() }
    }

    pub(crate) fn tcp(socket: TcpStream, peer: impl Into<String>) -> Self {
        Self { socket: socket.into(), unread: Vec::new(), peer: peer.into() }
    }

    /// Another handle on the same socket, for a thread that only receives.
    pub(crate) fn receiving_half(&self) -> Result<Self> {
        let socket = self.socket.try_clone().map_err(|error| Error::system("sharing a control socket", &error))?;
        Ok(Self { socket, unread: Vec::new(), peer: self.peer.clone() })
    }

    /// The other side's name in messages.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// After this long without a byte, `receive` fails. `None` waits for ever.
    pub(crate) fn set_patience(&self, patience: Option<Duration>) -> Result<()> {
        self.socket.set_read_timeout(patience).map_err(|error| Error::system("setting a time limit", &error))
    }

    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message).map_err(|error| Error::internal(error.to_string()))?;
        line.push(b'\n');
        let mut rest = &line[..];
        while !rest.is_empty() {
            match self.socket.send_with_flags(rest, libc::MSG_NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(
                        Error::remote(format!("sending to the other side failed: {error}")).with_peer(&self.peer)
                    );
                }
            }
        }
        Ok(())
    }

    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let line = self.receive_line()?;
        let strange = |error| Error::remote(format!("it does not speak towline's protocol: {error}"));
        serde_json::from_slice(&line)
            .map_err(|error| strange(error).with_peer(&self.peer).with_hint("use the same version on both sides"))
    }

    /// Waits for the next message and leaves it for `receive`; `None` when it is not a `T`.
    pub(crate) fn peek<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let line = self.receive_line()?;
        let message = serde_json::from_slice(&line).ok();
        self.unread.splice(0..0, line);
        Ok(message)
    }

    /// Whether the other side closed the connection (nothing unread is left).
    pub(crate) fn is_closed(&self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        match self.socket.recv_with_flags(&mut byte, flags) {
            Ok(count) => count == 0,
            Err(error) => !matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted),
        }
    }

    /// Whether `receive` would find something: bytes, or the end.
    pub(crate) fn has_news(&self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        let peeked = self.socket.recv_with_flags(&mut byte, libc::MSG_PEEK | libc::MSG_DONTWAIT);
        let is_quiet = |error: std::io::Error| {
            matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
        };
        !self.unread.is_empty() || !peeked.is_err_and(is_quiet)
    }

    fn receive_line(&mut self) -> Result<Vec<u8>> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let rest = self.unread.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.unread, rest));
            }
            if self.unread.len() > LONGEST_LINE {
                return Err(Error::remote("it sent an endless line").with_peer(&self.peer));
            }
            let mut more = [MaybeUninit::uninit(); 4096];
            match self.socket.recv(&mut more) {
                Ok(0) => return Err(Error::remote("the other side went away").with_peer(&self.peer)),
                Ok(count) => {
                    // SAFETY: `recv` has initialised that many bytes.
                    self.unread.extend(more[..count].iter().map(|byte| unsafe { byte.assume_init() }));
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return Err(Error::remote("the other side did not answer in time").with_peer(&self.peer));
                }
                Err(error) => {
                    return Err(
                        Error::remote(format!("receiving from the other side failed: {error}")).with_peer(&self.peer)
                    );
                }
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::Write;

    /// Both ends of a connection, each with the name that its errors give the peer.
    pub(crate) fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        (Channel::unix(one, "one"), Channel::unix(other, "other"))
    }

    #[test]
    fn messages_arrive_whole_and_a_closed_end_is_noticed() {
        let (mut one, mut other) = pair();
        one.send(&vec!["a\nb".to_owned(), "c".to_owned()]).unwrap();
        one.send(&7).unwrap();
        assert_eq!(other.receive::<Vec<String>>().unwrap(), ["a\nb", "c"]);
        assert!(!other.is_closed());
        drop(one);
        assert_eq!(other.receive::<i32>().unwrap(), 7);
        assert!(other.is_closed());
        assert!(other.receive::<i32>().unwrap_err().to_string().contains("went away (peer other)"));
    }

    #[test]
    fn what_was_only_looked_at_is_still_there() {
        let (mut one, mut other) = pair();
        one.send(&"text").unwrap();
        one.send(&7).unwrap();
        assert_eq!(other.peek::<String>().unwrap().as_deref(), Some("text"));
        assert_eq!(other.peek::<i32>().unwrap(), None, "of another kind");
        assert_eq!((other.receive::<String>().unwrap(), other.receive::<i32>().unwrap()), ("text".into(), 7));
        assert!(!other.has_news());
        drop(one);
        assert!(other.has_news() && other.peek::<i32>().is_err());
    }

    #[test]
    fn strangers_are_told_apart() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let mut other = Channel::unix(other, "someone");
        one.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(other.receive::<i32>().unwrap_err().to_string().contains("protocol"));
        let flood = std::thread::spawn(move || {
            let line = vec![b'x'; 4 << 20];
            let _ = one.write_all(&line);
        });
        assert!(other.receive::<i32>().unwrap_err().to_string().contains("endless"));
        drop(other);
        flood.join().unwrap();
    }
}
