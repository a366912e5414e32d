//! Which thread moves a message, and the [`constants`] that steer this choice.
//!
//! A connection carries messages in one direction over a first stream and, where there are processors and rails for it,
//! further streams. A stream is moved by one thread at a time: a thread that finds it taken leaves its work to the
//! holder, which does it before it releases the stream. Every thread calls the same function for a stream, so a poll by
//! any of them is safe at any time.
//!
//! # The four ways by which a stream is served
//!
//! | thread | streams | when |
//! |---|---|---|
//! | NCCL's proxy thread | the first | inside `isend`, `irecv` and `test`, when the call has something to send or its request is not done |
//! | the worker that owns the stream | the further ones | the kernel reports readiness, or another thread kicks the stream |
//! | another worker ([`poller`](super::poller), work stealing) | the further ones | that worker has nothing to do, and the owner sleeps or has not run for [`constants::LATE`] |
//! | the control thread | any | the first stream, when NCCL has not called for a millisecond ([`attend`]); a stream for which the kernel had no memory; a stream that ended |
//!
//! For a moment others serve one: a thread that closes the connection or finds it failed runs all streams; NCCL's
//! thread writes queries on a further stream while the first is down; a worker that reads a clear-to-send runs the
//! first stream where that carries the message.
//!
//! # A message of N bytes
//!
//! | size | sent by | over | a sleeping worker is woken |
//! |---|---|---|---|
//! | up to [`constants::OWN_MAX`] | NCCL's thread, in `isend` | the first stream | no |
//! | up to [`constants::INLINE_MAX`] | NCCL's thread; a worker when NCCL's thread has copied much lately ([`load`]) | the first stream; one further stream | when NCCL's thread has copied much |
//! | up to 64 KiB | a worker that is awake, or any when NCCL's thread has copied much lately ([`load`]); else NCCL's thread | one further stream; else the first | only when NCCL's thread has copied much |
//! | above 64 KiB | workers | one stream for each [`constants::CHUNK_MIN`] under way, those with the least on the way first; over a full network one further stream ([`spread`]) | yes |
//!
//! A connection with a single stream carries everything on it, by NCCL's thread. Over a long path
//! (`tcp::limits::is_far`) all other messages above [`constants::INLINE_MAX`] are for all streams. Over several rails
//! each rail takes part, as far as there are chunks. Over a long path, and over a full network, messages up to
//! [`constants::CHUNK_MAX`] wait for no clear-to-send, if the peer has room for them (`tcp::limits`).
//!
//! # States of a stream
//!
//! | state | the thread that polls next | until |
//! |---|---|---|
//! | absent | the control thread: it dials | the handshake is proved |
//! | idle | its worker, asleep in `epoll_wait`, or polling after the last progress for [`constants::HOT`] or [`constants::HOT_BETWEEN`], or not at all ([`constants::FEW`]) | a kick or an event |
//! | busy | the thread that holds it | nothing moves, or its share ([`constants::SEND_SHARE`], [`constants::RECEIVE_SHARE`]) is used up; then its worker again, after its other streams |
//! | full window | the thread that reads the acknowledgement, on whatever stream; it kicks the stream | there is room |
//! | full socket | its worker; for the first stream the control thread | the kernel reports room |
//! | slow | a faster stream, to which the next chunks are left (`tcp::window`) | its pace is forgotten, or shows otherwise |
//! | no kernel memory | the control thread, each millisecond | the call succeeds |
//! | unfenced | the thread that met the break queries the receiver, over every other stream, for what arrived; the control thread dials | the receiver has answered, or the stream is back |
//!
//! [`share`] determines how many workers and streams a process has.

pub(crate) mod attend;
pub(crate) mod constants;
pub(crate) mod load;
pub(crate) mod share;
pub(crate) mod spread;
