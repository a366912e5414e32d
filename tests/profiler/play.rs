//! What NCCL's core does around a collective, in its order: the user's thread enqueues, the progress thread moves.

use std::ffi::{c_int, c_void};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use towline::nccl::ffi::*;
use towline::nccl::net_event::{FLAG_SEND, NetEvent, PLUGIN_ID, PLUGIN_ID_SOCKET};

use super::host::{CommDescr, Event, Host};

/// A communicator in play.
#[derive(Clone, Copy)]
pub(crate) struct Comm {
    pub(crate) host: Host,
    pub(crate) descr: CommDescr,
    pub(crate) context: *mut c_void,
}

// SAFETY: only the profiler, to which NCCL's threads pass it, uses the context as more than a number.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// How long things take.
#[derive(Clone, Copy)]
pub(crate) struct Pace {
    /// The GPU lets the sender wait so long.
    pub(crate) gpu: Duration,
    /// The receiver posts its buffer so much late, and isend refuses until then.
    pub(crate) receiver: Duration,
    /// The receiver posts its buffer so long after isend took the message: only the transport knows.
    pub(crate) unready: Duration,
    /// The network takes so long, per rail, from when the message was posted.
    pub(crate) wire: [Duration; 2],
    /// Making what was received visible to the GPU takes so long.
    pub(crate) flush: Duration,
}

impl Pace {
    pub(crate) const NONE: Pace = Pace {
        gpu: Duration::ZERO,
        receiver: Duration::ZERO,
        unready: Duration::ZERO,
        wire: [Duration::ZERO; 2],
        flush: Duration::ZERO,
    };
}

/// What one collective moves.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) channels: u8,
    pub(crate) steps: c_int,
    /// Bytes of a step, in two parts over two rails.
    pub(crate) bytes: usize,
}

/// A way to the neighbours, for what must really have been sent before it arrives: a byte for each part.
pub(crate) struct Ring {
    pub(crate) to: UnixStream,
    pub(crate) from: UnixStream,
}

/// A message under way: what tells of its halves.
struct Posted {
    parts: [(*mut c_void, NetEvent); 2],
    when: Instant,
}

/// What a collective left for the progress thread.
#[derive(Clone, Copy)]
pub(crate) struct Task {
    pub(crate) event: *mut c_void,
    pub(crate) seq: u64,
}

// SAFETY: only the profiler uses the handle as more than a number.
unsafe impl Send for Task {}
// SAFETY: as above.
unsafe impl Sync for Task {}

impl Comm {
    pub(crate) fn new(host: Host, descr: CommDescr, mask: *mut c_int) -> Comm {
        Comm { host, descr, context: host.init(descr, mask) }
    }

    pub(crate) fn start(&self, parent: *mut c_void, event: Event<'_>) -> *mut c_void {
        self.host.start(self.context, self.descr, parent, event)
    }

    /// The user's thread: one AllReduce, from the API call to the end of enqueueing.
    pub(crate) fn enqueue(&self, seq: u64, count: usize) -> Task {
        let host = &self.host;
        let group_api = self.start(null_mut(), Event::GroupApi);
        host.group_state(group_api, ncclProfilerGroupStartApiStop);
        let api = self.start(group_api, Event::CollApi { func: c"AllReduce", count });
        host.stop(api);
        host.group_state(group_api, ncclProfilerGroupEndApiStart);
        let group = self.start(null_mut(), Event::Group);
        let event = self.start(null_mut(), Event::Coll { api, group, func: c"AllReduce", seq, count });
        let launch = self.start(group_api, Event::KernelLaunch);
        host.stop(launch);
        host.stop(event);
        host.stop(group);
        host.stop(group_api);
        Task { event, seq }
    }

    /// The progress thread: sends to one peer and receives from another on every channel, and sees the kernels.
    pub(crate) fn progress(&self, task: Task, shape: Shape, send_to: c_int, recv_from: c_int, pace: Pace) {
        self.progress_over(None, task, shape, send_to, recv_from, pace);
    }

    /// The same over a real ring of processes.
    pub(crate) fn progress_over(
        &self,
        ring: Option<&Ring>,
        task: Task,
        shape: Shape,
        send_to: c_int,
        recv_from: c_int,
        pace: Pace,
    ) {
        let host = &self.host;
        let pid = std::process::id() as c_int;
        let began = gpu_clock();
        let kernels: Vec<_> = (0..shape.channels)
            .map(|channel| self.start(task.event, Event::KernelCh { channel, timer: began }))
            .collect();
        let op = |channel, peer, send| {
            let (steps, chunk) = (shape.steps, shape.bytes as c_int);
            self.start(task.event, Event::ProxyOp { pid, channel, peer, steps, chunk, send })
        };
        // All operations of a plan are appended before any makes progress.
        let ops: Vec<_> =
            (0..shape.channels).map(|channel| (op(channel, send_to, true), op(channel, recv_from, false))).collect();
        for (channel, &(send, recv)) in ops.iter().enumerate() {
            for op in [send, recv] {
                host.state(op, ncclProfilerProxyOpInProgress_v4, 0);
            }
            // NCCL's pipeline: two receives are open at once.
            let mut open: Option<*mut c_void> = None;
            for step in 0..shape.steps {
                let message = task.seq * 1_000_000 + channel as u64 * 1000 + step as u64;
                let received = self.step(ring, send, recv, step, pace, message, shape.bytes, (send_to, recv_from));
                if let Some(done) = open.replace(received) {
                    self.end_step(done, shape.bytes, pace);
                }
            }
            if let Some(done) = open {
                self.end_step(done, shape.bytes, pace);
            }
            let all = shape.bytes as u64 * shape.steps as u64;
            if host.version < 4 {
                host.state(send, ncclProfilerProxyOpSendDone, all);
                host.state(recv, ncclProfilerProxyOpRecvDone, all);
            }
        }
        for (send, recv) in ops {
            host.stop(send);
            host.stop(recv);
        }
        for (channel, kernel) in (0..).zip(kernels) {
            let ended = gpu_clock();
            // As NCCL 2.31 reports the phases of a kernel on symmetric memory, when it is over.
            let quarter = (ended - began) / 4;
            let bounds = [began, began + quarter, began + 3 * quarter, ended];
            for number in 0..3 {
                let timer = bounds[usize::from(number)];
                let phase = self.start(kernel, Event::KernelPhase { channel, number, timer });
                host.state(phase, ncclProfilerKernelPhaseStop, bounds[usize::from(number) + 1]);
                host.stop(phase);
            }
            host.state(kernel, ncclProfilerKernelChStop, ended);
            host.stop(kernel);
        }
    }

    /// Sends one message and receives another; the receive is still to be ended.
    #[allow(clippy::too_many_arguments)]
    fn step(
        &self,
        ring: Option<&Ring>,
        send: *mut c_void,
        recv: *mut c_void,
        step: c_int,
        pace: Pace,
        message: u64,
        bytes: usize,
        (send_to, recv_from): (c_int, c_int),
    ) -> *mut c_void {
        let host = &self.host;
        let sending = self.start(send, Event::ProxyStep { step });
        let receiving = self.start(recv, Event::ProxyStep { step });
        host.state(sending, ncclProfilerProxyStepSendGPUWait, 0);
        host.state(receiving, ncclProfilerProxyStepRecvWait, 0);
        wait(pace.gpu);
        // NCCL says so at every attempt of isend.
        for _ in 0..3 {
            host.state(sending, ncclProfilerProxyStepSendPeerWait_v4, 7);
            wait(pace.receiver / 3);
        }
        let sent = self.post(sending, bytes, message, send_to, true);
        host.state(sending, ncclProfilerProxyStepSendWait, bytes as u64);
        self.arrive(sent, ring, true, pace);
        // What the neighbour does is no part of the send's time.
        host.stop(sending);
        let received = self.post(receiving, bytes, message, recv_from, false);
        self.arrive(received, ring, false, pace);
        receiving
    }

    fn end_step(&self, receiving: *mut c_void, bytes: usize, pace: Pace) {
        let host = &self.host;
        host.state(receiving, ncclProfilerProxyStepRecvFlushWait, bytes as u64);
        wait(pace.flush);
        host.state(receiving, ncclProfilerProxyStepRecvGPUWait, bytes as u64);
        host.stop(receiving);
    }

    /// The network plugin: half of the message over each of two rails, told under NCCL's id (v3), which are over at
    /// once, or under Towline's.
    fn post(&self, step: *mut c_void, bytes: usize, message: u64, peer: c_int, send: bool) -> Option<Posted> {
        if self.host.version < 4 {
            for _ in 0..2 {
                // SAFETY: zeroed plain data.
                let mut socket: ncclProfilerNetSockDescr_v1_t = unsafe { std::mem::zeroed() };
                socket.type_ = 1;
                (socket.sock.fd, socket.sock.op, socket.sock.length) = (9, (!send).into(), bytes / 2);
                let event = self.start(step, Event::Net { id: PLUGIN_ID_SOCKET, data: (&raw mut socket).cast() });
                self.host.stop(event);
            }
            return None;
        }
        let (from, to) = if send { (self.descr.rank, peer) } else { (peer, self.descr.rank) };
        let parts = [0, 1u16].map(|rail| {
            let mut net = NetEvent {
                flags: if send { FLAG_SEND } else { 0 },
                link: self.descr.id ^ (from as u64) << 8 ^ to as u64,
                message,
                offset: u64::from(rail) * (bytes as u64 / 2),
                length: bytes as u64 / 2,
                rail,
                stream: rail,
                ..NetEvent::new()
            };
            net.set_peer("10.0.0.7:4711".parse().unwrap());
            (self.start(step, Event::Net { id: PLUGIN_ID, data: (&raw mut net).cast() }), net)
        });
        Some(Posted { parts, when: Instant::now() })
    }

    /// The message is over the wire. In a ring the sender's byte follows it, and tells the receiver.
    fn arrive(&self, posted: Option<Posted>, ring: Option<&Ring>, send: bool, pace: Pace) {
        let unready = if send { pace.unready } else { Duration::ZERO };
        for (rail, (event, mut net)) in posted.iter().flat_map(|posted| posted.parts).enumerate() {
            let wire = pace.wire[rail];
            match ring {
                Some(ring) if !send => (&ring.from).read_exact(&mut [0]).unwrap(),
                _ => {
                    wait((unready + wire).saturating_sub(posted.as_ref().map_or(wire, |posted| posted.when.elapsed())))
                }
            }
            (net.wait_receiver_ns, net.wire_ns) = (unready.as_nanos() as u64, wire.as_nanos() as u64);
            self.host.update(event, (&raw mut net).cast());
            self.host.stop(event);
            if let Some(ring) = ring.filter(|_| send) {
                (&ring.to).write_all(&[1]).unwrap();
            }
        }
    }

    /// The network plugin's part of a step is never empty here.
    pub(crate) fn finalize(self) {
        self.host.finalize(self.context);
    }
}

/// A clock that has nothing to do with the host's, as a GPU's.
pub(crate) fn gpu_clock() -> u64 {
    use std::sync::OnceLock;
    static START: OnceLock<Instant> = OnceLock::new();
    1_700_000_000_000_000_000 + START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Spins for microseconds, for which sleeping is too coarse, and sleeps for milliseconds.
pub(crate) fn wait(time: Duration) {
    if time >= Duration::from_millis(1) {
        return std::thread::sleep(time);
    }
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}
