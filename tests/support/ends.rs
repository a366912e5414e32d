//! Two processes in two network namespaces, one sending and one receiving: what the tests of faults have in common.

use std::time::Duration;

use towline::host::{ApiVersion, Handle, Memory, Part, RecvComm, SendComm};

use super::child::{self, Guarded, Mailbox};
use super::netns::Namespace;
use super::{context, eventually, part, pattern, watchdog};

/// Longer than anything here may take, a stopped peer included.
pub const PATIENCE: Duration = Duration::from_secs(50);

const RAILS: [(&str, &str); 3] = [("TOWLINE_RAILS", "all"), ("NCCL_SOCKET_IFNAME", "rail"), ("TOWLINE_STREAMS", "3")];

/// The two ends of a connection, each a process in its namespace.
pub struct Ends {
    /// What they and the test say to each other.
    pub mail: Mailbox,
    /// The one that accepts.
    pub receiver: Guarded,
    /// The one that connects.
    pub sender: Guarded,
}

impl Ends {
    /// Both, with this TOWLINE_PEER_TIMEOUT.
    pub fn start(test: &str, hosts: &(Namespace, Namespace), peer_timeout: &str) -> Self {
        Self::start_with(test, hosts, peer_timeout, &[])
    }

    /// The same, with further variables.
    pub fn start_with(test: &str, hosts: &(Namespace, Namespace), peer_timeout: &str, more: &[(&str, &str)]) -> Self {
        let mail = Mailbox::new();
        let start = |host: &Namespace, role: &str| {
            let mut command = host.command(test, role);
            command
                .envs(RAILS)
                .envs(more.iter().copied())
                .env("TOWLINE_PEER_TIMEOUT", peer_timeout)
                .env(child::MAILBOX, mail.path());
            Guarded::start(command)
        };
        let (sender, receiver) = (start(&hosts.0, "sender"), start(&hosts.1, "receiver"));
        Self { receiver, sender, mail }
    }

    /// Waits until one of them has said `name`.
    pub fn wait_for(&self, name: &str) {
        child::receive(self.mail.path(), name);
    }

    /// Tells both.
    pub fn tell(&self, name: &str) {
        child::send(self.mail.path(), name, b"");
    }

    /// Waits until both have passed.
    pub fn pass(mut self) {
        assert!(self.sender.passed_within(PATIENCE), "the sender");
        assert!(self.receiver.passed_within(PATIENCE), "the receiver");
    }
}

/// Tells the test, and the other end.
pub fn tell(name: &str) {
    child::send(&child::mailbox(), name, b"");
}

/// Waits until a side has reported `name`.
pub fn wait_for(name: &str) {
    let mail = child::mailbox();
    eventually(name, PATIENCE, || mail.join(name).exists().then_some(()));
}

/// How long ago a side reported `name`, if one has.
pub fn since(name: &str) -> Option<Duration> {
    let said = child::mailbox().join(name).metadata().and_then(|file| file.modified()).ok()?;
    Some(said.elapsed().unwrap_or_default())
}

/// The sending end's connection.
pub fn connect() -> SendComm {
    connect_within(PATIENCE)
}

/// The same, for as long as this.
pub fn connect_within(patience: Duration) -> SendComm {
    let context = context(ApiVersion::V12);
    let mut handle = Handle::from_bytes(&child::receive(&child::mailbox(), "handle"));
    context.connect_within(0, &mut handle, patience).expect("connect")
}

/// The receiving end's.
pub fn accept() -> RecvComm {
    accept_within(PATIENCE)
}

/// The same, for as long as this.
pub fn accept_within(patience: Duration) -> RecvComm {
    let context = context(ApiVersion::V12);
    let (listener, handle) = context.listen(0).expect("listen");
    child::send(&child::mailbox(), "handle", handle.bytes());
    listener.accept_within(patience).expect("accept")
}

/// Sends a message, and waits until that is done.
pub fn send(send: &SendComm, seed: usize, size: usize) {
    // SAFETY: the pattern is static.
    let request = unsafe { send.post(part(pattern(seed, size), None)) }.expect("isend");
    send.wait(&request, PATIENCE).expect("the send ends");
}

/// Receives and checks it.
pub fn receive(recv: &RecvComm, seed: usize, size: usize) {
    let target = Memory::new(size);
    // SAFETY: the memory lives until the request ended.
    let request = unsafe { recv.post(&[Part::all(&target, None)]) }.expect("irecv");
    recv.wait(&request, PATIENCE).expect("the receive ends");
    assert!(target.bytes() == pattern(seed, size), "message {seed}");
}

/// Plays one end: true when the calling process is one.
pub fn plays(sender: impl FnOnce(), receiver: impl FnOnce()) -> bool {
    let Some(role) = child::role() else { return false };
    let _watchdog = watchdog(100);
    match role.as_str() {
        "sender" => sender(),
        "receiver" => receiver(),
        role => panic!("nobody plays {role}"),
    }
    true
}

/// What [`stream_out`] sends. The receives have room for more, so they are announced, and workers may send what is
/// short.
const SIZES: [usize; 5] = [(1 << 20) + 1, 1001, 100_001, 40_001, 1];

/// Messages of all sizes until told to stop, with pauses: the tests need traffic, and the processors for other things.
pub fn stream_out() {
    let comm = connect();
    let mail = child::mailbox();
    let mut number = 0;
    while !mail.join("stop").exists() {
        send(&comm, number, SIZES[number % SIZES.len()]);
        number += 1;
        if number % SIZES.len() == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    send(&comm, 0, 0);
    comm.close().expect("close");
    assert!(number > 0, "{number} messages");
}

/// Receives and checks those of [`stream_out`].
pub fn stream_in() {
    let comm = accept();
    let target = Memory::new(2 << 20);
    tell("ready");
    for number in 0.. {
        // SAFETY: the memory outlives the connection.
        let request = unsafe { comm.post(&[Part::all(&target, None)]) }.expect("irecv");
        let size = comm.wait(&request, PATIENCE).expect("the receive ends")[0] as usize;
        if size == 0 {
            break;
        }
        assert_eq!(size, SIZES[number % SIZES.len()]);
        assert!(target.bytes()[..size] == *pattern(number, size), "message {number}");
    }
    comm.close().expect("close");
}

/// Sends a signal to one of the processes.
pub fn signal(process: &Guarded, signal: i32) {
    // SAFETY: the process is our child and not reaped yet.
    assert_eq!(unsafe { libc::kill(process.id(), signal) }, 0);
}
