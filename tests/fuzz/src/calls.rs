//! Calls of NCCL's network table in any order, with any handle, on connections that live on from input to input: so an
//! execution takes microseconds. Whatever is passed as a context, listener, connection, registration or request may be
//! right, closed, of another kind, or never given out. Pointers to places and arrays are valid, as NCCL promises.
//!
//! No call crashes or waits for ever; no buffer is touched after the transport had to let go of it, nor a byte beyond
//! its end ([`memory`]). Right calls succeed and wrong ones fail, each message arrives once, whole, and where it
//! belongs, and every request of an input is brought to its end before the next input begins.
//!
//! Making a connection costs as much as a hundred inputs. So one input in [`WILD`], by a hash of its bytes, may do what
//! ends connections: close them, with requests in flight or not, send more than a receive holds, make further ones. The
//! others ask for such things with wrong ids only. Connections are made anew every [`LAPS`] inputs. What an input does
//! to a connection may depend on what came before on the same one: counters, credit, the timing of acknowledgements; an
//! input that fails only then fails when it is replayed behind the others, not by itself. [`super::setup`] begins every
//! input with nothing.

mod content;
mod memory;
mod pair;
mod world;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use super::{Input, ask, irecv};
use memory::{Buffer, MOST};
use pair::{Message, Pair, TAGS};
use towline::nccl::ffi::{self, ncclSuccess};
use world::World;

/// One input in so many may end connections.
const WILD: u32 = 32;
/// How many inputs share the connections of the pool.
const LAPS: u32 = 256;
/// Calls of one input.
const STEPS: usize = 40;
/// How long anything may take that must end, on a machine with other things to do.
const PATIENCE: Duration = Duration::from_secs(15);

type Id = *mut c_void;

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// Runs one input.
pub fn run(data: &[u8]) {
    WORLD.with_borrow_mut(|kept| {
        // An input that fails leaves nothing to the next one.
        let world = kept.take().unwrap_or_else(World::new);
        let mut play = Play::new(world, wild(data));
        let input = &mut Input::new(data);
        for _ in 0..STEPS {
            if input.is_over() {
                break;
            }
            play.step(input);
        }
        *kept = Some(play.end());
    });
}

/// Whether this input may end connections. By a hash, so that a fuzzer cannot breed for it.
fn wild(data: &[u8]) -> bool {
    crc32c::crc32c(data).is_multiple_of(WILD)
}

/// What is awaited of a request.
struct Pending {
    comm: Id,
    receives: bool,
    parts: Vec<Part>,
}

struct Part {
    buffer: Buffer,
    tag: c_int,
    /// Its place among those with its tag on its connection.
    nth: usize,
}

/// One input.
struct Play {
    world: World,
    wild: bool,
    /// Every id that was ever given, of any kind, and some that were not.
    ids: Vec<Id>,
    contexts: Vec<Id>,
    listeners: Vec<Id>,
    /// The handle of the last listener of this input.
    handle: [u8; 128],
    requests: Vec<Id>,
    pending: HashMap<Id, Pending>,
}

impl Play {
    fn new(world: World, wild: bool) -> Self {
        let mut ids = vec![null_mut(), 1 as Id, 2 as Id, 0xdead_beef as Id, usize::MAX as Id];
        ids.extend(world.closed.iter().chain([&world.context, &world.listener]));
        ids.extend(world.pairs.iter().flat_map(|pair| [pair.sender.id, pair.receiver.id]));
        let (contexts, listeners) = (vec![world.context], vec![world.listener]);
        Self { world, wild, ids, contexts, listeners, handle: [0; 128], requests: Vec::new(), pending: HashMap::new() }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.below(16) {
            0..=2 => self.isend(input),
            3..=5 => self.irecv(input),
            6..=8 => {
                let request = self.pick(input, |play| play.requests.clone());
                self.test(request);
            }
            9 => {
                let which = input.below(self.world.pairs.len());
                self.settle(which);
            }
            10 => self.close(input),
            11 => self.set_up(input),
            12 => self.memory(input),
            13 => ask(input),
            14 => self.refused(input),
            _ => self.transfer(input),
        }
    }

    /// Mostly an id of the right kind, sometimes any.
    fn pick(&self, input: &mut Input<'_>, right: impl Fn(&Self) -> Vec<Id>) -> Id {
        let (choice, right) = (usize::from(input.byte()), right(self));
        if choice < 208 && !right.is_empty() {
            return right[right.len() - 1 - choice % right.len()];
        }
        let id = self.ids[self.ids.len() - 1 - input.below(self.ids.len())];
        // A changed bit: another slot, another generation.
        if choice >= 240 { (id.addr() ^ (1 << input.below(64))) as Id } else { id }
    }

    fn senders(&self) -> Vec<Id> {
        self.world.pairs.iter().map(|pair| pair.sender.id).collect()
    }

    fn receivers(&self) -> Vec<Id> {
        self.world.pairs.iter().map(|pair| pair.receiver.id).collect()
    }

    /// The pair of which this is an open end.
    fn sending(&mut self, id: Id) -> Option<&mut Pair> {
        self.world.pairs.iter_mut().find(|pair| pair.sender.id == id && pair.sender.open)
    }

    fn receiving(&mut self, id: Id) -> Option<&mut Pair> {
        self.world.pairs.iter_mut().find(|pair| pair.receiver.id == id && pair.receiver.open)
    }

    fn size(input: &mut Input<'_>) -> usize {
        (input.number() % (MOST as u64 + 1)) as usize
    }

    fn isend(&mut self, input: &mut Input<'_>) {
        let sender = self.pick(input, Self::senders);
        let how = input.byte();
        let size = Self::size(input);
        self.send(sender, size, c_int::from(how) % TAGS as c_int, how & 128 == 0);
    }

    /// Sends; whether there is a request now.
    fn send(&mut self, sender: Id, mut size: usize, tag: c_int, heap: bool) -> Id {
        let wild = self.wild;
        let mut must = None;
        if let Some(pair) = self.sending(sender) {
            if let Some(receive) = pair.receiver.posted(tag).get(pair.sender.posted(tag).len()) {
                size = if wild { size } else { size.min(receive.size) };
                pair.broken |= size > receive.size;
            }
            must = Some(pair.is_whole());
        }
        let serial = self.world.next_serial();
        let mut buffer = Buffer::new(size, heap);
        content::write(serial, buffer.bytes());
        let (data, mut request) = (buffer.pointer().cast(), 1 as Id);
        let code = call!(isend(sender, data, size, tag, null_mut(), null_mut(), &raw mut request));
        self.judge(code, must, sender);
        if !Self::started(code, request) {
            return null_mut();
        }
        let pair = self.sending(sender).expect("judged");
        let nth = pair.sender.post(tag, Message { serial, size });
        self.await_it(request, Pending { comm: sender, receives: false, parts: vec![Part { buffer, tag, nth }] })
    }

    fn irecv(&mut self, input: &mut Input<'_>) {
        let receiver = self.pick(input, Self::receivers);
        let how = input.byte();
        let parts = if how < 176 { 1 } else { 1 + usize::from(how) % 8 };
        let parts: Vec<_> =
            (0..parts).map(|_| (Self::size(input), c_int::from(input.byte()) % TAGS as c_int)).collect();
        self.receive(receiver, &parts, how & 1 == 0);
    }

    fn receive(&mut self, receiver: Id, parts: &[(usize, c_int)], heap: bool) -> Id {
        let wild = self.wild;
        let mut right = self.receiving(receiver);
        let mut made: Vec<Part> = Vec::with_capacity(parts.len());
        for (size, tag) in parts {
            let before = made.iter().filter(|part| part.tag == *tag).count();
            let (mut size, mut nth) = (*size, 0);
            if let Some(pair) = &mut right {
                nth = pair.receiver.posted(*tag).len() + before;
                if let Some(sent) = pair.sender.posted(*tag).get(nth) {
                    size = if wild { size } else { size.max(sent.size) };
                    pair.broken |= size < sent.size;
                }
            }
            let mut buffer = Buffer::new(size, heap);
            content::clear(buffer.bytes());
            made.push(Part { buffer, tag: *tag, nth });
        }
        let must = right.map(|pair| pair.receives_end_well());
        let asked: Vec<(Id, usize, c_int)> =
            made.iter_mut().map(|part| (part.buffer.pointer().cast(), part.buffer.bytes().len(), part.tag)).collect();
        let (code, request) = irecv(receiver, asked.len() as c_int, &asked);
        self.judge(code, must, receiver);
        if !Self::started(code, request) {
            return null_mut();
        }
        let pair = self.receiving(receiver).expect("judged");
        for (part, (_, size, _)) in made.iter().zip(asked) {
            let nth = pair.receiver.post(part.tag, Message { serial: 0, size });
            assert_eq!(nth, part.nth);
        }
        self.await_it(request, Pending { comm: receiver, receives: true, parts: made })
    }

    /// A call on a whole connection must succeed, one on no connection must fail, and on a broken one it may.
    fn judge(&mut self, code: ffi::ncclResult_t, whole: Option<bool>, comm: Id) {
        match whole {
            None => assert_ne!(code, ncclSuccess, "{comm:?} was taken for a connection"),
            Some(true) => assert_eq!(code, ncclSuccess, "a right call on {comm:?} failed"),
            Some(false) => {}
        }
    }

    fn started(code: ffi::ncclResult_t, request: Id) -> bool {
        if code != ncclSuccess {
            assert!(request.is_null(), "a failed call leaves no request");
        }
        !request.is_null()
    }

    fn await_it(&mut self, request: Id, pending: Pending) -> Id {
        assert!(request.addr() > 2, "NCCL gives 1 and 2 a meaning of its own");
        self.requests.push(request);
        self.ids.push(request);
        assert!(self.pending.insert(request, pending).is_none(), "a request's id is unique");
        request
    }

    /// Tests a request; whether it is over.
    fn test(&mut self, request: Id) -> bool {
        let (mut done, mut sizes) = (0, [-1; 8]);
        let code = call!(test(request, &raw mut done, sizes.as_mut_ptr()));
        if !self.pending.contains_key(&request) {
            assert!(code != ncclSuccess, "a request that is none was not refused");
            return true;
        }
        if code == ncclSuccess && done == 0 {
            return false;
        }
        let Pending { comm, receives, mut parts } = self.pending.remove(&request).expect("it was there");
        let pair = if receives { self.receiving(comm) } else { self.sending(comm) };
        let pair = pair.expect("what is closed has no requests");
        if code != ncclSuccess {
            let must = if receives { pair.receives_end_well() } else { pair.is_whole() };
            assert!(!must, "a request failed");
            pair.broken = true;
        }
        if code == ncclSuccess && receives {
            let pair = self.receiving(comm).expect("as before");
            for (part, size) in parts.iter_mut().zip(sizes) {
                let sent = pair.sender.posted(part.tag).get(part.nth).expect("nothing arrives that was not sent");
                assert_eq!(usize::try_from(size), Ok(sent.size), "a message has the size that was sent");
                content::check(sent.serial, part.buffer.bytes(), sent.size);
            }
        }
        true
    }

    /// A send and its receive, which both end.
    fn transfer(&mut self, input: &mut Input<'_>) {
        let which = input.below(self.world.pairs.len());
        let how = input.byte();
        let (size, tag) = (Self::size(input), c_int::from(how) % TAGS as c_int);
        let pair = &self.world.pairs[which];
        let (sender, receiver) = (pair.sender.id, pair.receiver.id);
        if how & 64 == 0 {
            self.send(sender, size, tag, how & 128 == 0);
            self.receive(receiver, &[(size, tag)], how & 128 == 0);
        } else {
            self.receive(receiver, &[(size, tag)], how & 128 == 0);
            self.send(sender, size, tag, how & 128 == 0);
        }
        self.settle(which);
    }

    /// Brings every request of a connection to its end: what is missing is sent and received. Nothing is promised for
    /// one that is broken.
    fn settle(&mut self, which: usize) {
        let start = Instant::now();
        while self.world.pairs[which].receives_end_well() {
            let pair = &self.world.pairs[which];
            let (sender, receiver, both) = (pair.sender.id, pair.receiver.id, pair.sender.open);
            let (receives, sends) = pair.unmatched();
            for (tag, size) in receives {
                self.receive(receiver, &[(size, tag)], false);
            }
            if both {
                for (tag, size) in sends {
                    self.send(sender, size.min(100), tag, false);
                }
            }
            let (receives, sends) = self.world.pairs[which].unmatched();
            if self.test_all(which) && receives.is_empty() && sends.is_empty() {
                return self.world.pairs[which].clear();
            }
            assert!(start.elapsed() < PATIENCE, "a request does not end");
        }
    }

    /// Tests the requests of a connection; whether none is left.
    fn test_all(&mut self, which: usize) -> bool {
        let Pair { sender, receiver, .. } = &self.world.pairs[which];
        let comms = [sender.id, receiver.id];
        let mut requests = self.pending.iter().filter(|(_, pending)| comms.contains(&pending.comm));
        let Some((first, _)) = requests.next() else { return true };
        let mut all = vec![*first];
        all.extend(requests.map(|(id, _)| *id));
        let mut over = true;
        for request in all {
            over &= self.test(request);
        }
        over
    }

    fn close(&mut self, input: &mut Input<'_>) {
        let mut kind = input.below(3);
        let comm = match kind {
            0 => self.pick(input, Self::senders),
            1 => self.pick(input, Self::receivers),
            _ => self.pick(input, |play| play.listeners.clone()),
        };
        let kept = match kind {
            2 => comm == self.world.listener,
            _ => !self.wild,
        };
        if kept && self.is_open(kind, comm) {
            kind = (kind + 1) % 3;
        }
        self.close_one(kind, comm);
    }

    /// Whether this is a sender (0), a receiver (1), a listener (2).
    fn is_open(&mut self, kind: usize, comm: Id) -> bool {
        match kind {
            0 => self.sending(comm).is_some(),
            1 => self.receiving(comm).is_some(),
            _ => self.listeners.contains(&comm),
        }
    }

    /// After the close has returned the plugin has no right to the buffers.
    fn close_one(&mut self, kind: usize, comm: Id) {
        let right = self.is_open(kind, comm);
        let code = match kind {
            0 => call!(closeSend(comm)),
            1 => call!(closeRecv(comm)),
            _ => call!(closeListen(comm)),
        };
        // NCCL closes what never came about, too.
        assert_eq!(code == ncclSuccess, right || comm.is_null(), "closing {comm:?}");
        if !right {
            return;
        }
        let before = self.pending.len();
        self.pending.retain(|_, pending| pending.comm != comm);
        let aborted = self.pending.len() < before;
        match kind {
            2 => self.listeners.retain(|id| *id != comm),
            _ => {
                let pair = if kind == 0 { self.sending(comm) } else { self.receiving(comm) }.expect("it was open");
                pair.broken |= aborted;
                if kind == 0 { &mut pair.sender } else { &mut pair.receiver }.open = false;
            }
        }
    }

    fn set_up(&mut self, input: &mut Input<'_>) {
        match input.below(6) {
            0 if self.contexts.len() < 4 => {
                let context = world::init();
                self.contexts.push(context);
                self.ids.push(context);
            }
            0 | 1 => {
                let context = self.pick(input, |play| play.contexts.clone());
                if context != self.world.context {
                    let right = self.contexts.contains(&context);
                    assert_eq!(call!(finalize(context)) == ncclSuccess, right, "ending {context:?}");
                    self.contexts.retain(|id| *id != context);
                }
            }
            2 => self.listen(input),
            3 => {
                let listener = self.pick(input, |play| play.listeners.clone());
                let (mut receiver, mut device) = (null_mut(), null_mut());
                let code = call!(accept(listener, &raw mut receiver, &raw mut device));
                assert_eq!(code == ncclSuccess, self.listeners.contains(&listener), "accepting from {listener:?}");
                assert!(receiver.is_null() || self.wild, "a connection that nobody made");
                if !receiver.is_null() {
                    assert_eq!(call!(closeRecv(receiver)), ncclSuccess);
                    self.ids.push(receiver);
                }
            }
            4 => self.connect(input),
            _ if self.wild && self.world.pairs.len() < world::POOL + 2 => {
                let pair = world::connect(self.world.context);
                self.ids.extend([pair.sender.id, pair.receiver.id]);
                self.world.pairs.push(pair);
            }
            _ => {}
        }
    }

    fn listen(&mut self, input: &mut Input<'_>) {
        let context = self.pick(input, |play| play.contexts.clone());
        // A listener of another context would end with it.
        let context = if self.contexts.contains(&context) { self.world.context } else { context };
        let (mut handle, mut listener) = ([0_u8; 128], null_mut());
        let dev = if input.byte() < 200 { 0 } else { 9 + c_int::from(input.byte()) };
        let code = call!(listen(context, dev, handle.as_mut_ptr().cast(), &raw mut listener));
        assert_eq!(code == ncclSuccess, dev == 0 && context == self.world.context, "listening with {context:?}");
        if code == ncclSuccess {
            self.listeners.push(listener);
            self.ids.push(listener);
            self.handle = handle;
        }
    }

    /// An attempt that is not accepted, in a wild input; else one that is refused for its context.
    fn connect(&mut self, input: &mut Input<'_>) {
        let context = self.pick(input, |play| play.contexts.clone());
        if self.contexts.contains(&context) && (!self.wild || context == self.world.context) {
            return;
        }
        let (mut sender, mut device) = (null_mut(), null_mut());
        let mut handle = self.handle;
        if input.byte() >= 128 {
            // Not its address: the plugin may connect anywhere it is told to.
            handle[48 + input.below(16)] ^= input.byte();
        }
        let code = call!(connect(context, 0, handle.as_mut_ptr().cast(), &raw mut sender, &raw mut device));
        self.handle = handle;
        assert!(sender.is_null() || code == ncclSuccess, "a failed call leaves nothing");
        assert!(code != ncclSuccess || self.contexts.contains(&context), "{context:?} was taken for a context");
        if !sender.is_null() {
            assert_eq!(call!(closeSend(sender)), ncclSuccess);
            self.ids.push(sender);
        }
    }

    fn memory(&mut self, input: &mut Input<'_>) {
        let mut memory = [0_u8; 64];
        let data = memory.as_mut_ptr().cast();
        let (comm, kind) = (self.pick(input, Self::senders), c_int::from(input.byte() & 7));
        let mut mr = null_mut();
        let code = call!(regMr(comm, data, memory.len(), kind, &raw mut mr));
        let known = self.is_open(0, comm) || self.is_open(1, comm);
        assert!(known || code != ncclSuccess, "{comm:?} was taken for a connection");
        if code == ncclSuccess {
            self.ids.push(mr);
        }
        let (comm, mut mr) = (self.pick(input, Self::receivers), self.pick(input, |play| play.ids.clone()));
        let known = self.is_open(0, comm) || self.is_open(1, comm) || self.is_open(2, comm);
        let nothing = mr.is_null();
        assert!(call!(deregMr(comm, mr)) != ncclSuccess || known || nothing, "{comm:?} was taken for a connection");
        let code = call!(regMrDmaBuf(comm, data, memory.len(), kind, 0, -1, &raw mut mr));
        assert_ne!(code, ncclSuccess, "sockets have no DMA-BUF");
        let (mut data, mut size) = (data, 8);
        let (mut mr, mut request) = (null_mut(), null_mut());
        let code = call!(iflush(comm, 1, &raw mut data, &raw mut size, &raw mut mr, &raw mut request));
        assert_eq!(code == ncclSuccess, self.is_open(1, comm), "flushing {comm:?}");
        assert!(request.is_null(), "there is nothing to wait for over TCP");
    }

    /// A number of receives that no connection takes.
    fn refused(&mut self, input: &mut Input<'_>) {
        let receiver = self.pick(input, Self::receivers);
        let count = [0, -1, 9, c_int::MAX, c_int::MIN][input.below(5)];
        let (code, request) = irecv(receiver, count, &[(null_mut(), 0, 0); 8]);
        assert!(code != ncclSuccess && request.is_null(), "{count} receives were taken");
    }

    /// Everything comes to its end, and the world is as the next input needs it.
    fn end(mut self) -> World {
        for which in 0..self.world.pairs.len() {
            self.settle(which);
            let whole = self.world.pairs[which].is_whole();
            if whole && which < world::POOL {
                continue;
            }
            for kind in if self.world.next_serial().is_multiple_of(2) { [0, 1] } else { [1, 0] } {
                let pair = &self.world.pairs[which];
                let end = if kind == 0 { &pair.sender } else { &pair.receiver };
                if end.open {
                    self.close_one(kind, end.id);
                }
            }
        }
        assert!(self.pending.is_empty(), "every request came to its end");
        for listener in std::mem::take(&mut self.listeners) {
            if listener != self.world.listener {
                assert_eq!(call!(closeListen(listener)), ncclSuccess);
            }
        }
        for context in self.contexts {
            if context != self.world.context {
                assert_eq!(call!(finalize(context)), ncclSuccess);
            }
        }
        self.world.restore();
        self.world
    }
}
