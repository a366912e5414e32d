//! The yardstick: what a plain TCP program moves over k sockets with k sending and k receiving threads, and a plain
//! non-blocking ping-pong.
//!
//! A message of at least [`SPLIT_FROM`] bytes per socket is split evenly over the sockets. Smaller ones take turns, so
//! that every thread makes large system calls wherever the data allows. Like the plugin, it moves data between the two
//! sides' message buffers, and gives way when there is nothing to do.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::host::Memory;
use crate::os::error::{Error, Result};

use super::watch::Watch;
use super::{Job, Mover, Side};

/// 64 KiB: below that, splitting a message costs more than it gains.
const SPLIT_FROM: usize = 64 << 10;

/// The first byte on each socket, which distinguishes a stranger's connection from the leader's.
const GREETING: [u8; 8] = *b"towline\n";

/// k connected sockets.
pub(super) struct TcpMover {
    sockets: Vec<TcpStream>,
    memory: Memory,
}

/// The follower's listener.
pub(super) struct Waiting {
    listener: TcpListener,
}

impl Waiting {
    pub(super) fn on(address: IpAddr) -> Result<Self> {
        let listener = TcpListener::bind(SocketAddr::new(address, 0))
            .map_err(|error| Error::system(format!("listening on {address}"), &error))?;
        Ok(Self { listener })
    }

    pub(super) fn port(&self) -> Result<u16> {
        let address = self.listener.local_addr().map_err(|error| Error::system("asking for a port", &error))?;
        Ok(address.port())
    }

    pub(super) fn accept(self, sockets: usize, memory_bytes: usize, patience: Duration) -> Result<TcpMover> {
        let accepting = |error: io::Error| Error::system("accepting a plain TCP connection", &error);
        let start = Instant::now();
        self.listener.set_nonblocking(true).map_err(accepting)?;
        let mut accepted = Vec::new();
        while accepted.len() < sockets {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    socket.set_nonblocking(false).map_err(accepting)?;
                    prepare(&socket, patience).map_err(accepting)?;
                    let mut greeting = GREETING.map(|_| 0);
                    let heard = io::Read::read_exact(&mut &socket, &mut greeting);
                    if heard.is_ok() && greeting == GREETING {
                        accepted.push(socket);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if start.elapsed() > patience {
                        return Err(Error::remote("the other side did not open its plain TCP connections in time"));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(accepting(error)),
            }
        }
        Ok(TcpMover { sockets: accepted, memory: Memory::new(memory_bytes) })
    }
}

fn prepare(socket: &TcpStream, patience: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(patience))?;
    socket.set_write_timeout(Some(patience))
}

impl TcpMover {
    pub(super) fn connect(to: SocketAddr, sockets: usize, memory_bytes: usize, patience: Duration) -> Result<Self> {
        let connecting = |error: io::Error| Error::system(format!("connecting to {to}"), &error);
        let one = |_| {
            let socket = TcpStream::connect_timeout(&to, patience)?;
            prepare(&socket, patience)?;
            io::Write::write_all(&mut &socket, &GREETING)?;
            Ok(socket)
        };
        let sockets = (0..sockets).map(one).collect::<io::Result<_>>().map_err(connecting)?;
        Ok(Self { sockets, memory: Memory::new(memory_bytes) })
    }

    /// Whether each message is spread over the sockets.
    fn is_split(&self, size: usize) -> bool {
        size >= SPLIT_FROM * self.sockets.len()
    }

    /// The pieces of all messages that travel over socket `index`: offsets in memory and sizes, in order.
    fn pieces(&self, index: usize, job: Job) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (sockets, is_split) = (self.sockets.len(), self.is_split(job.size));
        let share = job.size.div_ceil(sockets);
        let first = if is_split { 0 } else { index };
        (first..job.count).step_by(if is_split { 1 } else { sockets }).map(move |message| {
            let start = message % job.outstanding * job.size;
            if is_split {
                let from = (index * share).min(job.size);
                (start + from, share.min(job.size - from))
            } else {
                (start, job.size)
            }
        })
    }
}

/// How a piece moves over a blocking socket.
type Move = fn(&TcpStream, *mut u8, usize) -> io::Result<usize>;

fn send(socket: &TcpStream, from: *mut u8, size: usize) -> io::Result<usize> {
    // SAFETY: `from` points to `size` bytes of the mover's memory.
    result(unsafe { libc::send(socket.as_raw_fd(), from.cast_const().cast(), size, libc::MSG_NOSIGNAL) })
}

fn receive(socket: &TcpStream, to: *mut u8, size: usize) -> io::Result<usize> {
    // SAFETY: `to` points to `size` bytes of the mover's memory, to which there is no reference.
    result(unsafe { libc::recv(socket.as_raw_fd(), to.cast(), size, 0) })
}

fn result(outcome: isize) -> io::Result<usize> {
    match outcome {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side closed the connection")),
        count => usize::try_from(count).map_err(|_| io::Error::last_os_error()),
    }
}

/// An address that threads may share: each moves its own pieces.
#[derive(Clone, Copy)]
struct Base(*mut u8);
// SAFETY: the address is only passed to the kernel, which does not mind; the memory outlives the threads.
unsafe impl Send for Base {}

fn move_all(
    socket: &TcpStream,
    base: Base,
    pieces: impl Iterator<Item = (usize, usize)>,
    step: Move,
) -> io::Result<()> {
    for (offset, size) in pieces {
        let mut done = 0;
        while done < size {
            // SAFETY: the pieces of a job lie within the memory that was made for it.
            let at = unsafe { base.0.add(offset + done) };
            match step(socket, at, size - done) {
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// One byte that does not belong to a message.
fn single(socket: &TcpStream, step: Move) -> Result<()> {
    let mut byte = 0_u8;
    let base = Base(&raw mut byte);
    move_all(socket, base, std::iter::once((0, 1)), step).map_err(|error| Error::system("the acknowledgement", &error))
}

impl Mover for TcpMover {
    fn stream(&mut self, side: Side, job: &Job, watch: &mut Watch<'_>) -> Result<()> {
        assert!(job.size * job.outstanding <= self.memory.len(), "the memory was made for this");
        let step = if side == Side::Leader { send } else { receive };
        let base = Base(self.memory.at(0).cast());
        let moved: io::Result<()> = std::thread::scope(|scope| {
            let threads: Vec<_> = (self.sockets.iter().enumerate())
                .map(|(index, socket)| {
                    let pieces = self.pieces(index, *job);
                    scope.spawn(move || move_all(socket, base, pieces, step))
                })
                .collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("a moving thread does not panic"))
        });
        if let Err(error) = moved {
            // Why the other side closed, if it reports that.
            watch.check()?;
            return Err(Error::system("moving data over plain TCP", &error));
        }
        single(&self.sockets[0], if side == Side::Leader { receive } else { send })
    }

    fn ping_pong(&mut self, side: Side, job: &Job, samples: &mut Vec<f64>, watch: &mut Watch<'_>) -> Result<()> {
        let socket = &self.sockets[0];
        socket.set_nonblocking(true).map_err(|error| Error::system("setting a socket to non-blocking", &error))?;
        let base = self.memory.at(0).cast::<u8>();
        let mut turn = |step: Move| -> Result<()> {
            let mut done = 0;
            while done < job.size {
                // SAFETY: the memory holds a message at least.
                match step(socket, unsafe { base.add(done) }, job.size - done) {
                    Ok(count) => {
                        done += count;
                        watch.moved();
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => watch.idle()?,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(Error::system("plain TCP ping-pong", &error)),
                }
            }
            Ok(())
        };
        for _ in 0..job.count {
            let start = Instant::now();
            let (first, second): (Move, Move) = if side == Side::Leader { (send, receive) } else { (receive, send) };
            turn(first)?;
            turn(second)?;
            if side == Side::Leader {
                samples.push(start.elapsed().as_secs_f64() / 2.0);
            }
        }
        socket.set_nonblocking(false).map_err(|error| Error::system("setting a socket to blocking", &error))
    }

    fn memory(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }
}
