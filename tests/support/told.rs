//! Transfers with a profiler's handle, made as NCCL's one progress thread makes them.

use std::time::Instant;

use towline::host::{ApiVersion, Init, Memory, Part, Request};
use towline::nccl::ffi::ncclProfilerCallback_t;

use super::pair::Pair;
use super::strict::{Told, Transfer, callback, inside};
use super::{PATIENCE, net, part};

/// The version that most tests use.
pub const NEWEST: ApiVersion = ApiVersion::V12;

/// A connection whose transfers `callback` is told of.
pub fn listened(version: ApiVersion, callback: ncclProfilerCallback_t) -> Pair {
    let init = Init { comm_id: 7, profiler: callback, ..Init::default() };
    Pair::connect(&net(version).init_with(&init).expect("init"), 0).expect("a connection")
}

/// A connection with the touchy callback.
pub fn pair() -> Pair {
    listened(NEWEST, Some(callback))
}

/// Starts a send.
pub fn send(pair: &Pair, bytes: &'static [u8], tag: i32, transfer: &'static Transfer) -> Request {
    // SAFETY: the bytes are static, the transfer is never freed.
    inside(|| unsafe { pair.send.post(part(bytes, None).tagged(tag).profiled(transfer.handle())) }).expect("isend")
}

/// Starts a group of receives.
pub fn receive(pair: &Pair, targets: &[(&Memory, i32, &'static Transfer)]) -> Request {
    let parts: Vec<Part<'_>> = targets
        .iter()
        .map(|(memory, tag, transfer)| Part::all(memory, None).tagged(*tag).profiled(transfer.handle()))
        .collect();
    // SAFETY: every caller keeps the memory until the request ended or the connection is closed.
    inside(|| unsafe { pair.recv.post(&parts) }).expect("irecv")
}

/// Tests a receive and sends until all have ended, as NCCL's one progress thread does. `ended` is called at once when a
/// send (by its place) or the receive (None) is reported done.
pub fn finish(pair: &Pair, received: &Request, sends: &[Request], mut ended: impl FnMut(Option<usize>)) {
    let start = Instant::now();
    let (mut open, mut receiving): (Vec<usize>, bool) = ((0..sends.len()).collect(), true);
    while receiving || !open.is_empty() {
        open.retain(|&index| {
            let done = inside(|| pair.send.test(&sends[index])).expect("a send goes well").is_some();
            if done {
                ended(Some(index));
            }
            !done
        });
        if receiving && inside(|| pair.recv.test(received)).expect("a receive goes well").is_some() {
            receiving = false;
            ended(None);
        }
        assert!(start.elapsed() < PATIENCE, "the transfers end");
        towline::host::give_way(start);
    }
}

/// Moves one message and returns what was told on both sides: (sender's, receiver's).
pub fn moved(pair: &Pair, bytes: &'static [u8]) -> (Vec<Told>, Vec<Told>) {
    let target = Memory::new(bytes.len());
    let (out, back) = (Transfer::new(), Transfer::new());
    let received = receive(pair, &[(&target, 0, back)]);
    let sent = send(pair, bytes, 0, out);
    let (mut sender, mut receiver) = (Vec::new(), Vec::new());
    finish(pair, &received, &[sent], |which| match which {
        Some(_) => sender = out.whole(bytes.len()),
        None => receiver = back.whole(bytes.len()),
    });
    assert!(target.bytes() == bytes);
    (sender, receiver)
}
