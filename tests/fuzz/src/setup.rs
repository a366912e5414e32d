//! Calls of NCCL's network table in any order, with any handle: whatever is passed as a context, listener, connection,
//! registration or request may be right, closed, of another kind, or never given out. Pointers to places and arrays are
//! valid, as NCCL promises.
//!
//! No call crashes or waits for ever, and no buffer is touched after the transport had to let go of it: buffers are
//! freed at that moment, and the address sanitizer watches. What arrives is what was sent.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use super::{Input, ask, irecv};
use towline::nccl::ffi::{self, ncclSuccess};

/// Runs one input.
pub fn run(data: &[u8]) {
    Host::default().play(&mut Input::new(data));
}

type Id = *mut c_void;

/// A request, the connection it was made on, and its buffers.
struct Pending {
    comm: Id,
    buffers: Vec<Vec<u8>>,
}

#[derive(Default)]
struct Host {
    /// Every id that was ever given, of any kind, and some that were not.
    ids: Vec<Id>,
    contexts: Vec<Id>,
    listeners: Vec<Id>,
    senders: Vec<Id>,
    receivers: Vec<Id>,
    requests: Vec<Id>,
    handles: Vec<[u8; 128]>,
    pending: HashMap<Id, Pending>,
}

impl Host {
    fn play(mut self, input: &mut Input<'_>) {
        self.ids.extend([null_mut(), 1 as Id, 2 as Id, 0xdead_beef as Id, usize::MAX as Id]);
        self.init();
        for _ in 0..60 {
            if input.is_over() {
                break;
            }
            self.step(input);
        }
        self.end();
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.below(20) {
            0 => self.init(),
            1 => {
                let context = self.pick(input, |host| &host.contexts);
                // The first context stays, so that the process keeps its devices.
                if Some(&context) != self.contexts.first() {
                    call!(finalize(context));
                }
            }
            2 => self.listen(input),
            3 | 4 => self.connect(input),
            5 => self.accept(input),
            6 | 7 => self.pair(),
            8 => self.register(input),
            9 | 10 => self.isend(input),
            11 | 12 => self.irecv(input),
            13..=15 => {
                let request = self.pick(input, |host| &host.requests);
                self.test(request);
            }
            16 => self.flush(input),
            17 => self.close(input),
            18 => ask(input),
            _ => self.transfer(input),
        }
    }

    /// Mostly an id of the right kind, sometimes any.
    fn pick(&self, input: &mut Input<'_>, right: impl Fn(&Self) -> &Vec<Id>) -> Id {
        let (pool, which) = (input.byte(), usize::from(input.byte()));
        let pool = if pool < 224 && !right(self).is_empty() { right(self) } else { &self.ids };
        let id = pool[pool.len() - 1 - which % pool.len()];
        // A changed bit: another slot, another generation.
        if which > 250 { (id.addr() ^ (1 << input.below(64))) as Id } else { id }
    }

    fn init(&mut self) {
        let mut context = null_mut();
        let mut config = ffi::ncclNetCommConfig_v10_t { trafficClass: -1 };
        if call!(init(&raw mut context, 7, &raw mut config, towline::host::log::logger(), None)) == ncclSuccess {
            self.contexts.push(context);
            self.ids.push(context);
        }
    }

    fn listen(&mut self, input: &mut Input<'_>) {
        let context = self.pick(input, |host| &host.contexts);
        let (mut handle, mut listener) = ([0_u8; 128], null_mut());
        let dev = if input.byte() < 240 { 0 } else { c_int::from(input.byte()) - 128 };
        if call!(listen(context, dev, handle.as_mut_ptr().cast(), &raw mut listener)) == ncclSuccess {
            self.listeners.push(listener);
            self.ids.push(listener);
            self.handles.push(handle);
        }
    }

    fn connect(&mut self, input: &mut Input<'_>) {
        let context = self.pick(input, |host| &host.contexts);
        if self.handles.is_empty() {
            self.handles.push(input.bytes());
        }
        let which = input.below(self.handles.len());
        if input.byte() >= 240 {
            // Not its address: the plugin may connect anywhere it is told to.
            let at = [input.below(24), 48 + input.below(16)][input.below(2)];
            self.handles[which][at] ^= input.byte();
        }
        self.connect_to(context, which);
    }

    fn connect_to(&mut self, context: Id, which: usize) -> Option<Id> {
        let (mut sender, mut device) = (null_mut(), null_mut());
        let handle = self.handles[which].as_mut_ptr().cast();
        let code = call!(connect(context, 0, handle, &raw mut sender, &raw mut device));
        if code != ncclSuccess || sender.is_null() {
            assert!(sender.is_null(), "a failed call leaves nothing");
            return None;
        }
        self.senders.push(sender);
        self.ids.push(sender);
        Some(sender)
    }

    fn accept(&mut self, input: &mut Input<'_>) {
        let listener = self.pick(input, |host| &host.listeners);
        self.accept_from(listener);
    }

    fn accept_from(&mut self, listener: Id) -> Option<Id> {
        let (mut receiver, mut device) = (null_mut(), null_mut());
        let code = call!(accept(listener, &raw mut receiver, &raw mut device));
        if code != ncclSuccess || receiver.is_null() {
            assert!(receiver.is_null(), "a failed call leaves nothing");
            return None;
        }
        self.receivers.push(receiver);
        self.ids.push(receiver);
        Some(receiver)
    }

    /// A connection, as NCCL makes one.
    fn pair(&mut self) {
        if self.senders.len() >= 4 {
            return;
        }
        let (mut handle, mut listener) = ([0_u8; 128], null_mut());
        let context = self.contexts[0];
        assert_eq!(call!(listen(context, 0, handle.as_mut_ptr().cast(), &raw mut listener)), ncclSuccess);
        self.listeners.push(listener);
        self.ids.push(listener);
        self.handles.push(handle);
        let which = self.handles.len() - 1;
        let patience = Instant::now() + Duration::from_secs(10);
        let (mut sender, mut receiver) = (None, None);
        while sender.is_none() || receiver.is_none() {
            sender = sender.or_else(|| self.connect_to(context, which));
            receiver = receiver.or_else(|| self.accept_from(listener));
            assert!(Instant::now() < patience, "a connection within this process takes 10 s");
            std::thread::yield_now();
        }
    }

    fn register(&mut self, input: &mut Input<'_>) {
        let comm = self.pick(input, |host| &host.senders);
        let (mut memory, mut mr) = ([0_u8; 64], null_mut());
        let kind = c_int::from(input.byte() & 7);
        if call!(regMr(comm, memory.as_mut_ptr().cast(), memory.len(), kind, &raw mut mr)) == ncclSuccess {
            self.ids.push(mr);
        }
        let (comm, mut mr) = (self.pick(input, |host| &host.senders), self.pick(input, |host| &host.ids));
        call!(deregMr(comm, mr));
        call!(regMrDmaBuf(comm, memory.as_mut_ptr().cast(), memory.len(), kind, 0, -1, &raw mut mr));
    }

    fn size(input: &mut Input<'_>) -> usize {
        (input.number() % (300 << 10)) as usize
    }

    fn isend(&mut self, input: &mut Input<'_>) {
        let sender = self.pick(input, |host| &host.senders);
        let (size, tag) = (Self::size(input), c_int::from(input.byte() & 3));
        self.send(sender, size, tag);
    }

    fn send(&mut self, sender: Id, size: usize, tag: c_int) -> Id {
        let mut buffer = bytes(size, tag);
        let mut request = 1 as Id;
        let data = buffer.as_mut_ptr().cast();
        let code = call!(isend(sender, data, size, tag, null_mut(), null_mut(), &raw mut request));
        self.started(code, sender, request, vec![buffer])
    }

    fn irecv(&mut self, input: &mut Input<'_>) {
        let receiver = self.pick(input, |host| &host.receivers);
        let n = if input.byte() < 240 { 1 + input.below(8) } else { 0 };
        let parts: Vec<_> = (0..n).map(|_| (Self::size(input), c_int::from(input.byte() & 3))).collect();
        let count = if input.byte() < 250 { n as c_int } else { -1 };
        self.receive(receiver, count, &parts);
    }

    fn receive(&mut self, receiver: Id, count: c_int, parts: &[(usize, c_int)]) -> Id {
        let mut buffers: Vec<Vec<u8>> = parts.iter().map(|(size, _)| vec![0xEE; *size]).collect();
        let asked: Vec<(Id, usize, c_int)> =
            buffers.iter_mut().zip(parts).map(|(buffer, part)| (buffer.as_mut_ptr().cast(), part.0, part.1)).collect();
        let (code, request) = irecv(receiver, count, &asked);
        self.started(code, receiver, request, buffers)
    }

    fn started(&mut self, code: ffi::ncclResult_t, comm: Id, request: Id, buffers: Vec<Vec<u8>>) -> Id {
        if code != ncclSuccess || request.is_null() {
            assert!(request.is_null(), "a failed call leaves no request");
            return null_mut();
        }
        assert!(request.addr() > 2, "NCCL gives 1 and 2 a meaning of its own");
        self.requests.push(request);
        self.ids.push(request);
        assert!(self.pending.insert(request, Pending { comm, buffers }).is_none(), "a request's id is unique");
        request
    }

    /// Tests a request; whether it is over.
    fn test(&mut self, request: Id) -> bool {
        let (mut done, mut sizes) = (0, [-1; 8]);
        let code = call!(test(request, &raw mut done, sizes.as_mut_ptr()));
        let Some(pending) = self.pending.get(&request) else {
            assert!(code != ncclSuccess || done == 0, "a request that is none was done");
            return true;
        };
        if code == ncclSuccess && done == 0 {
            return false;
        }
        if code == ncclSuccess && self.receivers.contains(&pending.comm) {
            for (buffer, size) in pending.buffers.iter().zip(sizes) {
                let size = usize::try_from(size).expect("a size");
                let tag = buffer.first().map_or(0, |first| c_int::from(*first >> 6));
                assert!(buffer[..size] == bytes(size, tag)[..], "wrong bytes");
                assert!(buffer[size..].iter().all(|byte| *byte == 0xEE), "bytes beyond the message");
            }
        }
        self.pending.remove(&request);
        true
    }

    fn flush(&mut self, input: &mut Input<'_>) {
        let receiver = self.pick(input, |host| &host.receivers);
        let mut buffer = [0_u8; 8];
        let (mut data, mut size) = (buffer.as_mut_ptr().cast(), 8);
        let (mut mr, mut request) = (null_mut(), null_mut());
        call!(iflush(receiver, 1, &raw mut data, &raw mut size, &raw mut mr, &raw mut request));
        assert!(request.is_null(), "there is nothing to wait for over TCP");
    }

    fn close(&mut self, input: &mut Input<'_>) {
        let kind = input.below(3);
        let comm = match kind {
            0 => self.pick(input, |host| &host.senders),
            1 => self.pick(input, |host| &host.receivers),
            _ => self.pick(input, |host| &host.listeners),
        };
        self.close_one(kind, comm);
    }

    /// After the close has returned the plugin has no right to the buffers.
    fn close_one(&mut self, kind: usize, comm: Id) {
        let code = match kind {
            0 => call!(closeSend(comm)),
            1 => call!(closeRecv(comm)),
            _ => call!(closeListen(comm)),
        };
        if code == ncclSuccess {
            self.pending.retain(|_, pending| pending.comm != comm);
            for list in [&mut self.senders, &mut self.receivers, &mut self.listeners] {
                list.retain(|id| *id != comm);
            }
        }
    }

    /// A send and its receive, which must both end unless the connection was used otherwise before.
    fn transfer(&mut self, input: &mut Input<'_>) {
        let (Some(sender), Some(receiver)) = (self.senders.last().copied(), self.receivers.last().copied()) else {
            return self.pair();
        };
        let (size, tag) = (Self::size(input), c_int::from(input.byte() & 3));
        let requests = [self.receive(receiver, 1, &[(size, tag)]), self.send(sender, size, tag)];
        let patience = Instant::now() + Duration::from_millis(20);
        while Instant::now() < patience {
            let over = requests.map(|request| request.is_null() || self.test(request));
            if over == [true, true] {
                break;
            }
            std::thread::yield_now();
        }
    }

    fn end(mut self) {
        for (kind, comms) in [self.senders.clone(), self.receivers.clone(), self.listeners.clone()].iter().enumerate() {
            comms.iter().for_each(|comm| self.close_one(kind, *comm));
        }
        for context in std::mem::take(&mut self.contexts) {
            call!(finalize(context));
        }
    }
}

/// The content of a message: its first byte tells its tag.
fn bytes(size: usize, tag: c_int) -> Vec<u8> {
    (0..size).map(|at| ((at as u8) & 0x3F) | (tag as u8) << 6).collect()
}
