//! Reading and writing one socket: vectored, without waiting, without SIGPIPE.
//!
//! Linux's `send(2)` raises SIGPIPE on a closed connection by default, which would kill a C host program; every send
//! here passes `MSG_NOSIGNAL`. `EINTR` is retried, so callers see data, "would block", the end, or that the kernel has
//! no memory at the moment ([`is_shortage`]).

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::shortage;
use crate::os::error::{Error, Result};

/// A piece of memory to send or to fill. Plain addresses: the memory belongs to a request or to the stream, and both
/// outlive the call.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// First byte.
    pub data: *mut u8,
    /// Bytes.
    pub length: usize,
}

impl Piece {
    /// A piece to be sent.
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        Self { data: bytes.as_ptr().cast_mut(), length: bytes.len() }
    }

    /// A piece to be filled.
    #[inline]
    pub(crate) fn of_mut(bytes: &mut [u8]) -> Self {
        Self { data: bytes.as_mut_ptr(), length: bytes.len() }
    }

    /// The piece without its first bytes; at most all of them.
    #[inline]
    pub(crate) fn skip(self, bytes: usize) -> Self {
        let bytes = bytes.min(self.length);
        // SAFETY: at most one past the end of the piece.
        Self { data: unsafe { self.data.add(bytes) }, length: self.length - bytes }
    }

    /// The bytes of the piece.
    ///
    /// # Safety
    /// It must be readable for its whole length, and stay as it is, while the slice is used.
    pub unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: the caller vouches for it.
        unsafe { std::slice::from_raw_parts(self.data, self.length) }
    }

    fn iovec(self) -> libc::iovec {
        libc::iovec { iov_base: self.data.cast(), iov_len: self.length }
    }
}

/// Sends as much of a piece as the socket takes now. `None`: it takes nothing.
///
/// # Errors
/// Those of `send(2)`.
///
/// # Safety
/// The piece must be readable for its whole length during the call.
#[inline]
pub(crate) unsafe fn send(fd: RawFd, Piece { data, length }: Piece) -> io::Result<Option<usize>> {
    // send(2) spares the kernel a copy of the message header.
    // SAFETY: the caller vouches for the piece.
    retry(|| unsafe { libc::send(fd, data.cast(), length, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) })
}

/// As [`send`], for several pieces, in order.
///
/// # Errors
/// Those of `sendmsg(2)`.
///
/// # Safety
/// All pieces must be readable for their whole length during the call.
#[inline]
pub(crate) unsafe fn send_pieces<const N: usize>(fd: RawFd, pieces: [Piece; N]) -> io::Result<Option<usize>> {
    let mut iov = pieces.map(Piece::iovec);
    let message = message_of(&mut iov);
    retry(|| {
        // SAFETY: `message` points to iovecs that live here; the caller vouches for their memory.
        unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) }
    })
}

/// The header for a call with these pieces, which must outlive it.
#[inline]
fn message_of(iov: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: an all-zero msghdr is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = iov.len();
    message
}

/// Receives arrived bytes into one piece. `None`: none have arrived; `Some(0)`: the peer has shut down its side.
///
/// # Errors
/// Those of `recv(2)`.
///
/// # Safety
/// The piece must be writable for its whole length during the call, and no other thread may rely on its content.
#[inline]
pub(crate) unsafe fn receive(fd: RawFd, Piece { data, length }: Piece) -> io::Result<Option<usize>> {
    // recv(2) spares the kernel a copy of the message header.
    // SAFETY: the caller vouches for the piece.
    retry(|| unsafe { libc::recv(fd, data.cast(), length, libc::MSG_DONTWAIT) })
}

/// As [`receive`], into two pieces, in order.
///
/// # Errors
/// Those of `recvmsg(2)`.
///
/// # Safety
/// As [`receive`], for both pieces.
pub(crate) unsafe fn receive_two(fd: RawFd, pieces: [Piece; 2]) -> io::Result<Option<usize>> {
    let mut iov = pieces.map(Piece::iovec);
    let mut message = message_of(&mut iov);
    retry(|| {
        // SAFETY: `message` points to two iovecs that live here; the caller vouches for their memory.
        unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) }
    })
}

/// The result of [`fill`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filled {
    /// All bytes are there.
    Whole,
    /// Some have not arrived.
    Partly,
    /// The kernel had no memory for a call, which must be repeated.
    Short,
    /// The peer has shut down its side.
    Ended,
}

/// Receives until `input` holds `wanted` bytes, and no further.
///
/// # Errors
/// Those of `recv(2)`.
pub(crate) fn fill(fd: RawFd, input: &mut Vec<u8>, wanted: usize) -> io::Result<Filled> {
    while input.len() < wanted {
        let had = input.len();
        input.resize(wanted, 0);
        // SAFETY: the buffer is ours.
        let got = unsafe { receive(fd, Piece::of_mut(&mut input[had..])) };
        input.truncate(had + got.as_ref().map_or(0, |bytes| bytes.unwrap_or(0)));
        match got {
            Ok(Some(0)) => return Ok(Filled::Ended),
            Ok(Some(_)) => {}
            Ok(None) => return Ok(Filled::Partly),
            Err(error) if is_shortage(&error) => return Ok(Filled::Short),
            Err(error) => return Err(error),
        }
    }
    Ok(Filled::Whole)
}

/// Repeats a call until no signal interrupts it.
///
/// The calls are the C library's, not raw system calls: libraries loaded before it (sockets in user space, the tests'
/// fault injectors) replace them.
#[inline]
fn retry(mut call: impl FnMut() -> isize) -> io::Result<Option<usize>> {
    loop {
        let moved = call();
        if moved >= 0 {
            return Ok(Some(moved as usize));
        }
        // Checks only the number: "nothing has arrived" is the result of nearly every poll, and not an error.
        // SAFETY: the C library's, for this thread.
        match unsafe { *libc::__errno_location() } {
            libc::EAGAIN => return Ok(None),
            libc::EINTR => {}
            number => return Err(io::Error::from_raw_os_error(number)),
        }
    }
}

/// As [`receive`], but the bytes stay in the socket until [`discard`] removes them.
///
/// While data is left there the kernel does not acknowledge. It does so when a read empties the socket, inside that
/// call, and that takes longer than the rest of the call (not in tcp(7); see Linux's `tcp_cleanup_rbuf`). So a thread
/// that peeks has a short message sooner, and pays for the acknowledgement later. If no thread discards the data, the
/// kernel's delayed acknowledgement is sent within 40 ms.
///
/// # Errors
/// Those of `recv(2)`.
///
/// # Safety
/// As for [`receive`].
#[inline]
pub(crate) unsafe fn peek(fd: RawFd, piece: Piece) -> io::Result<Option<usize>> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: the caller vouches for the piece.
    retry(|| unsafe { libc::recv(fd, piece.data.cast(), piece.length, flags) })
}

/// Removes bytes that [`peek`] has shown, without copying them. Returns how many.
///
/// # Errors
/// Those of `recv(2)`.
pub(crate) fn discard(fd: RawFd, bytes: usize) -> io::Result<Option<usize>> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: with MSG_TRUNC, TCP drops the bytes and writes nowhere (tcp(7)).
    retry(|| unsafe { libc::recv(fd, std::ptr::null_mut(), bytes, flags) })
}

/// Whether the kernel could not get the memory for a call. The socket is unchanged, and no event reports when to try
/// again.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM))
}

/// For callers that poll again anyway: treats a shortage as if nothing could move.
///
/// # Errors
/// Every other failure.
pub(crate) fn as_would_block(error: io::Error) -> io::Result<Option<usize>> {
    if is_shortage(&error) { Ok(None) } else { Err(error) }
}

/// Bytes that the peer's kernel has not acknowledged yet (`SIOCOUTQ`, tcp(7)).
pub(crate) fn unsent(fd: RawFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes one int.
    let answer = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    if answer < 0 { 0 } else { bytes.max(0) as usize }
}

/// Copies bytes in ascending order, in units of eight where both sides allow it.
///
/// The GPU may poll flags at the end of each 8 or 128 bytes of `to` while this runs (NCCL's LL and LL128 protocols).
/// The C library's `memcpy` does not promise an order: it stores the first bytes of a block last. Volatile stores keep
/// their program order, and on x86-64 other observers see the same order. Other architectures get a fence where it
/// matters: where a flag begins.
///
/// # Safety
/// `from` must be readable and `to` writable for `length` bytes, and they must not overlap.
pub(crate) unsafe fn copy_ascending(from: *const u8, to: *mut u8, length: usize) {
    let one = |at: usize| {
        let to = to.wrapping_add(at);
        if begins_a_flag(to) || needs_order() && (to as usize) % 8 == 4 {
            fence(Ordering::Release);
        }
        // SAFETY: every access lies below `length`, for which the caller vouches.
        unsafe { to.write_volatile(from.add(at).read()) };
    };
    let word = |at: usize| {
        let to = to.wrapping_add(at).cast::<u64>();
        if begins_a_flag(to.cast()) {
            fence(Ordering::Release);
        }
        // SAFETY: as above, for eight bytes; `to` is aligned, since single bytes came first.
        unsafe { to.write_volatile(from.add(at).cast::<u64>().read_unaligned()) };
    };
    let mut at = 0;
    while at < length && !(to as usize + at).is_multiple_of(8) {
        one(at);
        at += 1;
    }
    // Unrolled: a third of the instructions.
    while at + 64 <= length {
        for place in 0..8 {
            word(at + 8 * place);
        }
        at += 64;
    }
    while at + 8 <= length {
        word(at);
        at += 8;
    }
    while at < length {
        one(at);
        at += 1;
    }
    if needs_order() {
        fence(Ordering::Release);
    }
}

/// Whether stores need a fence so that other observers see them in program order.
const fn needs_order() -> bool {
    cfg!(not(target_arch = "x86_64"))
}

/// Whether a flag of LL128, which occupies the last eight bytes of each 128, begins here; the bytes that it covers must
/// be visible first. An LL flag is stored together with its data, except by the loops for single bytes.
fn begins_a_flag(to: *const u8) -> bool {
    needs_order() && (to as usize) % 128 == 120
}

/// Sends a handshake message, which always fits the empty buffer of a new socket. If the kernel has no memory for it at
/// once, waits up to 20 ms.
///
/// # Errors
/// When it still does not fit, or the connection is gone.
pub(crate) fn send_all(sock: &impl AsRawFd, bytes: &[u8]) -> Result<()> {
    let mut rest = bytes;
    let mut until = None;
    loop {
        // SAFETY: plain slices.
        let sent = unsafe { send(sock.as_raw_fd(), Piece::of(rest)) };
        match sent.or_else(as_would_block) {
            Ok(Some(count)) => rest = &rest[count.min(rest.len())..],
            Ok(None) => {}
            Err(error) => return Err(Error::remote(format!("a handshake broke off: {error}"))),
        }
        if rest.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        if now >= *until.get_or_insert(now + Duration::from_millis(20)) {
            return Err(Error::remote("a handshake message did not fit the socket"));
        }
        std::thread::sleep(shortage::PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::sync::atomic::AtomicU64;

    use proptest::prelude::*;

    #[test]
    fn what_was_peeked_at_stays_until_it_is_discarded() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _) = listener.accept().unwrap();
        let fd = near.as_raw_fd();
        let mut buffer = [0; 16];
        let mut peeked = || {
            // SAFETY: the buffer is ours.
            let bytes = unsafe { peek(fd, Piece::of_mut(&mut buffer)) }.unwrap();
            bytes.map(|bytes| buffer[..bytes].to_vec())
        };
        assert_eq!(peeked(), None);
        far.write_all(b"first").unwrap();
        while peeked().is_none() {}
        assert_eq!(peeked().unwrap(), b"first");
        far.write_all(b"second").unwrap();
        while peeked().unwrap().len() < 11 {}
        assert_eq!(discard(fd, 5).unwrap(), Some(5));
        assert_eq!(peeked().unwrap(), b"second");
        assert_eq!(discard(fd, 6).unwrap(), Some(6));
        assert_eq!(discard(fd, 6).unwrap(), None);
        drop(far);
        // The end of the connection is reported as usual.
        while peeked().is_none() {}
        assert_eq!(peeked().unwrap(), b"");
    }

    /// The reader acts as a GPU does with LL128: once the last eight bytes of a line hold the number of the step, it
    /// uses the 120 before them. With `ptr::copy_nonoverlapping` this fails: the C library stores the first vector of a
    /// block last.
    #[test]
    fn a_flag_is_never_seen_before_its_line() {
        const WORDS: usize = 16;
        // For more than 2 KiB the C library uses `rep movsb`.
        const LINES: usize = 8;
        const OVER: u64 = u64::MAX;
        let to: Vec<AtomicU64> = (0..WORDS * LINES).map(|_| AtomicU64::new(0)).collect();
        let (begun, seen) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut early = 0_u64;
                for step in 1.. {
                    while begun.load(Ordering::Acquire) < step {
                        std::hint::spin_loop();
                    }
                    if begun.load(Ordering::Acquire) == OVER {
                        break;
                    }
                    for line in to.chunks(WORDS) {
                        while line[WORDS - 1].load(Ordering::Acquire) != step {
                            std::hint::spin_loop();
                        }
                        early += u64::from(line.iter().any(|word| word.load(Ordering::Relaxed) != step));
                    }
                    seen.store(step, Ordering::Release);
                }
                early
            });
            // A hundred thousand messages, on two processors that are free.
            let start = Instant::now();
            for step in (1..100_000).take_while(|_| start.elapsed() < Duration::from_secs(2)) {
                let message = [step; WORDS * LINES];
                begun.store(step, Ordering::Release);
                // SAFETY: the reader reads it as atomics, and both places are as long.
                unsafe {
                    copy_ascending(message.as_ptr().cast(), to.as_ptr().cast_mut().cast(), size_of_val(&message))
                };
                while seen.load(Ordering::Acquire) < step {
                    std::hint::spin_loop();
                }
            }
            begun.store(OVER, Ordering::Release);
            assert_eq!(reader.join().expect("the reader"), 0, "flags that were there before their lines");
        });
    }

    proptest! {
        #[test]
        fn an_ascending_copy_copies(bytes in proptest::collection::vec(any::<u8>(), 0..300), shift in 0..9_usize, skew in 0..9_usize) {
            let mut to = vec![0xEE; bytes.len() + shift + 16];
            let mut from = vec![0; skew];
            from.extend(&bytes);
            // SAFETY: both ranges lie inside their vectors.
            unsafe { copy_ascending(from.as_ptr().add(skew), to.as_mut_ptr().add(shift), bytes.len()) };
            prop_assert_eq!(&to[shift..shift + bytes.len()], &bytes[..]);
            prop_assert!(to[..shift].iter().chain(&to[shift + bytes.len()..]).all(|b| *b == 0xEE));
        }
    }
}
