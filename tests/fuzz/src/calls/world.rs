//! What lives on from input to input: a context, a listener, a few connections, and ids of things that were closed.

use std::ptr::null_mut;
use std::time::Instant;

use super::pair::Pair;
use super::{Id, LAPS, PATIENCE};
use towline::nccl::ffi::{self, ncclSuccess};

/// How many connections there are when an input begins.
pub const POOL: usize = 3;

/// See the module.
pub struct World {
    /// The context of everything here.
    pub context: Id,
    /// A listener without connections.
    pub listener: Id,
    /// The connections; an input may add some.
    pub pairs: Vec<Pair>,
    /// Ids that were right once: of a context, a listener, both ends of a connection, a request.
    pub closed: Vec<Id>,
    serial: u64,
    lap: u32,
}

impl World {
    /// One of its own.
    pub fn new() -> Self {
        // As NCCL would: NCCL_DEBUG=WARN says why calls fail.
        towline::host::log::print_to_stderr(&std::env::var("NCCL_DEBUG").unwrap_or_default());
        let (former, context) = (init(), init());
        let (ended, _) = listen(former);
        assert_eq!(call!(closeListen(ended)), ncclSuccess);
        assert_eq!(call!(finalize(former)), ncclSuccess);
        let pair = connect(context);
        let request = send_nothing(pair.sender.id);
        close(&pair);
        let closed = vec![former, ended, pair.sender.id, pair.receiver.id, request];
        let (listener, _) = listen(context);
        let mut world = Self { context, listener, pairs: Vec::new(), closed, serial: 0, lap: 0 };
        world.restore();
        world
    }

    /// A number that no message has had.
    pub fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Fresh connections for those that an input has ended, and now and then for all.
    pub fn restore(&mut self) {
        self.lap += 1;
        if self.lap.is_multiple_of(LAPS) {
            self.pairs.iter().filter(|pair| pair.is_whole()).for_each(close);
            self.pairs.clear();
        }
        self.pairs.truncate(POOL);
        self.pairs.iter_mut().filter(|pair| !pair.is_whole()).for_each(|pair| *pair = connect(self.context));
        while self.pairs.len() < POOL {
            self.pairs.push(connect(self.context));
        }
    }
}

/// A context.
pub fn init() -> Id {
    let mut context = null_mut();
    let mut config = ffi::ncclNetCommConfig_v10_t { trafficClass: -1 };
    let logger = towline::host::log::logger();
    assert_eq!(call!(init(&raw mut context, 7, &raw mut config, logger, None)), ncclSuccess);
    context
}

fn listen(context: Id) -> (Id, [u8; 128]) {
    let (mut handle, mut listener) = ([0_u8; 128], null_mut());
    assert_eq!(call!(listen(context, 0, handle.as_mut_ptr().cast(), &raw mut listener)), ncclSuccess);
    (listener, handle)
}

/// A connection, as NCCL makes one.
pub fn connect(context: Id) -> Pair {
    let (listener, mut handle) = listen(context);
    let (mut sender, mut receiver, mut device): (Id, Id, _) = (null_mut(), null_mut(), null_mut());
    let start = Instant::now();
    while sender.is_null() || receiver.is_null() {
        if sender.is_null() {
            let handle = handle.as_mut_ptr().cast();
            assert_eq!(call!(connect(context, 0, handle, &raw mut sender, &raw mut device)), ncclSuccess);
        }
        if receiver.is_null() {
            assert_eq!(call!(accept(listener, &raw mut receiver, &raw mut device)), ncclSuccess);
        }
        assert!(start.elapsed() < PATIENCE, "a connection within this process does not come about");
        std::thread::yield_now();
    }
    assert_eq!(call!(closeListen(listener)), ncclSuccess);
    Pair::new(sender, receiver)
}

/// A send that is done.
fn send_nothing(sender: Id) -> Id {
    let (mut request, mut done) = (null_mut(), 0);
    assert_eq!(call!(isend(sender, null_mut(), 0, 0, null_mut(), null_mut(), &raw mut request)), ncclSuccess);
    let start = Instant::now();
    while done == 0 {
        assert_eq!(call!(test(request, &raw mut done, null_mut())), ncclSuccess);
        assert!(start.elapsed() < PATIENCE, "a send of nothing does not end");
    }
    request
}

fn close(pair: &Pair) {
    assert_eq!(call!(closeSend(pair.sender.id)), ncclSuccess);
    assert_eq!(call!(closeRecv(pair.receiver.id)), ncclSuccess);
}
