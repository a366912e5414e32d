//! FlagCX's interface of the library, driven as FlagCX's own path drives it (`support::flagcx`). FlagCX itself, with
//! its accelerators, is not part of these tests.

use std::ffi::CStr;
use std::mem::{offset_of, size_of};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::child::{self, Guarded, Mailbox};
use crate::support::flagcx::{End, FlagCx, FlagCxHandle, Object};
use crate::support::one_sided::content;
use crate::support::pair::Pair;
use crate::support::{context, eventually, plugin, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, PTR_CUDA, PTR_HOST};
use towline::nccl::ffi::flagcxNetAdaptor_v1_t;

const PATIENCE: Duration = Duration::from_secs(20);
/// What FlagCX moves at a time unless told otherwise, and how many of them are under way.
const CHUNK: usize = 4 << 20;
const CHUNKS: usize = 16;

fn flagcx() -> FlagCx {
    FlagCx::of(&plugin()).expect("the library exports FlagCX's table")
}

/// A connection with both ends here. The connecting side is done before `accept` is called.
fn connect(flagcx: &FlagCx) -> (Object, Object, Object) {
    let (listener, handle) = flagcx.listen(0).expect("listen");
    assert_eq!(handle.0[56..], [0; 8], "nothing of ours where FlagCX writes");
    let address = &raw const listener as usize;
    let mut handle = handle.arrived(address);
    let send = eventually("connect", PATIENCE, || flagcx.connect(0, &mut handle).expect("connect"));
    assert_eq!(handle.0[56..], address.to_ne_bytes(), "what is FlagCX's stays as it is");
    let recv = eventually("accept", PATIENCE, || flagcx.accept(listener).expect("accept"));
    (send, recv, listener)
}

/// Calls again while the plugin says "not now".
fn until<T>(attempt: impl FnMut() -> Option<T>) -> T {
    eventually("an answer", PATIENCE, attempt)
}

/// As many messages of this size at a time, from `send` to `recv`.
fn exchange(flagcx: &FlagCx, (send, recv): (Object, Object), size: usize, messages: usize) {
    let sources: Vec<Vec<u8>> = (0..messages).map(|seed| content(seed, size)).collect();
    let mut targets: Vec<Vec<u8>> = (0..messages).map(|_| vec![0; size + 1]).collect();
    let data = |bytes: &Vec<u8>| bytes.as_ptr().cast_mut().cast::<libc::c_void>();
    let mut under_way = Vec::new();
    for (source, target) in sources.iter().zip(&mut targets) {
        let at = target.as_mut_ptr().cast::<libc::c_void>();
        let from = flagcx.reg_mr(send, data(source) as usize, size, PTR_HOST).expect("regMr");
        let to = flagcx.reg_mr(recv, at as usize, size, PTR_HOST).expect("regMr");
        // SAFETY: the buffers live until all requests are over.
        let received = until(|| unsafe { flagcx.irecv(recv, at, size as i32, to) }.expect("irecv"));
        // SAFETY: as above.
        let sent = until(|| unsafe { flagcx.isend(send, data(source), size, from) }.expect("isend"));
        under_way.push((sent, received, from, to));
    }
    for (sent, received, from, to) in under_way {
        assert_eq!(until(|| flagcx.test(received).expect("test")), size as i32);
        until(|| flagcx.test(sent).expect("test"));
        flagcx.dereg_mr(send, from).expect("deregMr");
        flagcx.dereg_mr(recv, to).expect("deregMr");
    }
    for (source, target) in sources.iter().zip(&targets) {
        assert!(target[..size] == source[..] && target[size] == 0, "{size} bytes");
    }
}

/// FlagCX's order: the sender's connection, the receiver's, its listener.
fn close(flagcx: &FlagCx, (send, recv, listener): (Object, Object, Object)) {
    flagcx.close(End::Send, send).expect("closeSend");
    flagcx.close(End::Recv, recv).expect("closeRecv");
    flagcx.close(End::Listen, listener).expect("closeListen");
}

/// The order of `struct flagcxNetAdaptor_v1`, FlagCX 0.11.0 to 0.13.0: 21 pointers.
#[test]
fn the_table_is_laid_out_as_flagcx_reads_it() {
    macro_rules! offsets {
        ($($at:literal $field:ident)+) => {
            $( assert_eq!(offset_of!(flagcxNetAdaptor_v1_t, $field), $at, stringify!($field)); )+
        };
    }
    offsets! {
        0 name 8 init 16 devices 24 getProperties 32 listen 40 connect 48 accept 56 closeSend 64 closeRecv
        72 closeListen 80 regMr 88 regMrDmaBuf 96 deregMr 104 isend 112 irecv 120 iflush 128 test 136 iput 144 iget
        152 iputSignal 160 getDevFromName
    }
    assert_eq!(size_of::<flagcxNetAdaptor_v1_t>(), 168);
    let flagcx = flagcx();
    let table = flagcx.table();
    // SAFETY: the table's name is a string of the library.
    assert_eq!(unsafe { CStr::from_ptr(table.name) }, c"Towline");
    // FlagCX does without a plugin that lacks one of these.
    assert!(table.init.is_some() && table.devices.is_some() && table.getProperties.is_some() && table.listen.is_some());
    assert!(table.connect.is_some() && table.accept.is_some() && table.regMr.is_some() && table.deregMr.is_some());
    assert!(table.closeSend.is_some() && table.closeRecv.is_some() && table.closeListen.is_some());
    assert!(table.isend.is_some() && table.irecv.is_some() && table.iflush.is_some() && table.test.is_some());
    assert!(
        table.iput.is_none() && table.iget.is_none() && table.iputSignal.is_none(),
        "asked for before they are called"
    );
}

#[test]
fn messages_of_all_sizes_arrive_in_both_directions() {
    let _watchdog = watchdog(120);
    let flagcx = flagcx();
    assert!(flagcx.init().expect("init") > 0);
    let (there, back) = (connect(&flagcx), connect(&flagcx));
    for (size, messages) in [(0, 4), (8, CHUNKS), (4 << 10, CHUNKS), (CHUNK, CHUNKS), (64 << 20, 2)] {
        std::thread::scope(|scope| {
            scope.spawn(|| exchange(&flagcx, (there.0, there.1), size, messages));
            scope.spawn(|| exchange(&flagcx, (back.0, back.1), size, messages));
        });
    }
    close(&flagcx, there);
    close(&flagcx, back);
}

#[test]
fn devices_offer_host_memory_alone() {
    let flagcx = flagcx();
    let count = flagcx.init().expect("init");
    for dev in 0..count {
        let properties = flagcx.properties(dev).expect("getProperties");
        assert_eq!(properties.ptr_support, PTR_HOST);
        let name = std::ffi::CString::new(properties.name).expect("a C string");
        assert_eq!(flagcx.device_named(&name), Ok(dev));
    }
    assert_eq!(flagcx.device_named(c"no such device"), Err(Code::InvalidArgument));
    let ends = connect(&flagcx);
    let mut memory = [0_u8; 64];
    let data = memory.as_mut_ptr().cast::<libc::c_void>();
    assert_eq!(flagcx.reg_mr(ends.0, data as usize, 64, PTR_CUDA), Err(Code::InvalidUsage));
    assert_eq!(flagcx.reg_mr_dmabuf(ends.1, data as usize, 64), Err(Code::InvalidUsage));
    close(&flagcx, ends);
}

/// FlagCX closes and opens the library when its last communicator ends and the next begins.
#[test]
fn the_library_may_be_closed_and_opened_and_initialised_again() {
    let _watchdog = watchdog(60);
    for _ in 0..3 {
        let flagcx = flagcx();
        let counts = [flagcx.init().expect("init"), flagcx.init().expect("again")];
        assert!(counts[0] > 0 && counts[0] == counts[1], "{counts:?}");
        let ends = connect(&flagcx);
        exchange(&flagcx, (ends.0, ends.1), 1000, 1);
        close(&flagcx, ends);
    }
}

#[test]
fn nccl_keeps_its_log_and_its_devices_beside_flagcx() {
    child::alone("flagcx::nccl_keeps_its_log_and_its_devices_beside_flagcx", &[], || {
        let _watchdog = watchdog(60);
        let log = Capture::start();
        let nccl = context(ApiVersion::V12);
        let devices = nccl.devices().expect("devices");
        let pair = Pair::connect(&nccl, 0).expect("a connection");
        let flagcx = flagcx();
        assert_eq!(flagcx.init(), Ok(devices));
        let ends = connect(&flagcx);
        exchange(&flagcx, (ends.0, ends.1), CHUNK, 2);
        assert_eq!(pair.transfer(b"hello").expect("a transfer"), b"hello");
        let mut foreign = FlagCxHandle([7; 64]);
        assert_eq!(flagcx.connect(0, &mut foreign), Err(Code::InvalidArgument));
        assert!(log.contains("connect: the connection handle was not made by Towline"), "{:?}", log.records());
        // FlagCX goes on when NCCL has ended.
        pair.close().expect("closes");
        nccl.finalize().expect("finalize");
        exchange(&flagcx, (ends.0, ends.1), CHUNK, 2);
        close(&flagcx, ends);
    });
}

/// Connects to the process that accepts.
fn connects(flagcx: &FlagCx) -> Object {
    flagcx.init().expect("init");
    let bytes = child::receive(&child::mailbox(), "handle");
    let mut handle = FlagCxHandle(bytes.try_into().expect("64 bytes")).arrived(0x7fff_1234_5678_9abc);
    until(|| flagcx.connect(0, &mut handle).expect("connect"))
}

/// Accepts the process that connects.
fn accepts(flagcx: &FlagCx) -> Object {
    flagcx.init().expect("init");
    let (listener, handle) = flagcx.listen(0).expect("listen");
    child::send(&child::mailbox(), "handle", &handle.0);
    until(|| flagcx.accept(listener).expect("accept"))
}

/// FlagCX asks on and on for a request that has failed.
fn asks_until_the_peer_is_dead(flagcx: &FlagCx, requests: Vec<Object>) {
    child::send(&child::mailbox(), "posted", b"");
    for request in requests {
        let end = eventually("the end", PATIENCE, || flagcx.test(request).err());
        assert_eq!(end, Code::RemoteError);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            assert!(flagcx.test(request).is_err());
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

fn sends_until_the_peer_is_dead(beside_nccl: bool) {
    let nccl = beside_nccl.then(|| context(ApiVersion::V12));
    let flagcx = flagcx();
    let send = connects(&flagcx);
    let source = content(1, CHUNK);
    let data = source.as_ptr().cast_mut().cast::<libc::c_void>();
    let mr = flagcx.reg_mr(send, data as usize, CHUNK, PTR_HOST).expect("regMr");
    // SAFETY: the source lives until the process ends.
    let post = || unsafe { flagcx.isend(send, data, CHUNK, mr) }.expect("isend is never told of it");
    asks_until_the_peer_is_dead(&flagcx, (0..3).map(|_| until(post)).collect());
    drop(nccl);
}

fn receives_until_the_peer_is_dead() {
    let flagcx = flagcx();
    let recv = accepts(&flagcx);
    let mut target = vec![0_u8; CHUNK];
    let data = target.as_mut_ptr().cast::<libc::c_void>();
    let mr = flagcx.reg_mr(recv, data as usize, CHUNK, PTR_HOST).expect("regMr");
    // SAFETY: the target lives until the process ends, and nothing comes.
    let post = || unsafe { flagcx.irecv(recv, data, CHUNK as i32, mr) }.expect("irecv is never told of it");
    asks_until_the_peer_is_dead(&flagcx, (0..3).map(|_| until(post)).collect());
}

/// What it has of Towline lives until the process is killed.
fn waits_with(end: impl FnOnce(&FlagCx) -> Object) {
    let flagcx = flagcx();
    end(&flagcx);
    std::thread::sleep(Duration::from_secs(60));
}

/// A part of a test, in a process whose standard error is read.
fn start(name: &str, role: &str, mailbox: &Mailbox, variables: [(&str, &str); 1]) -> Guarded {
    let mut command = child::command(name, role);
    command.env(child::MAILBOX, mailbox.path()).env_remove("NCCL_DEBUG").env_remove("TOWLINE_LOG");
    command.envs(variables).stderr(Stdio::piped());
    Guarded::start(command)
}

/// That one line says that the job stands still, after `beginning`.
fn assert_one_line(said: &str, beginning: &str) {
    let lines: Vec<&str> = said.lines().filter(|line| line.ends_with("end the job")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(lines[0].starts_with(&format!("NET/Towline: WARN {beginning}")), "{}", lines[0]);
    assert!(said.lines().filter(|line| line.contains("NET/Towline")).count() <= 4, "a flood: {said}");
}

#[test]
fn a_dead_peer_is_one_clear_line_on_standard_error() {
    const NAME: &str = "flagcx::a_dead_peer_is_one_clear_line_on_standard_error";
    match child::role().as_deref() {
        Some("sender") => return sends_until_the_peer_is_dead(false),
        Some("sender beside NCCL") => return sends_until_the_peer_is_dead(true),
        Some("receiver") => return receives_until_the_peer_is_dead(),
        Some("killed receiver") => return waits_with(accepts),
        Some("killed sender") => return waits_with(connects),
        _ => {}
    }
    let _watchdog = watchdog(120);
    let killed = ["killed receiver", "killed receiver", "killed sender"];
    for (role, killed) in ["sender", "sender beside NCCL", "receiver"].into_iter().zip(killed) {
        let (mailbox, variables) = (Mailbox::new(), [("TOWLINE_RECONNECT_TIMEOUT", "1")]);
        let mut killed = start(NAME, killed, &mailbox, variables);
        let asking = start(NAME, role, &mailbox, variables);
        child::receive(mailbox.path(), "posted");
        killed.kill();
        let said = asking.said_within(Duration::from_secs(50));
        assert_one_line(&said, "test: ");
        assert!(said.contains("(peer "), "{said}");
    }
}

/// FlagCX asks on and on, and a peer that only was late is still let in.
fn accepts_for_longer_than_its_patience() {
    let flagcx = flagcx();
    flagcx.init().expect("init");
    let (listener, handle) = flagcx.listen(0).expect("listen");
    let (start, mut errors) = (Instant::now(), Vec::new());
    while start.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(1));
        match flagcx.accept(listener) {
            Ok(accepted) => assert!(accepted.is_none(), "no peer has connected yet"),
            Err(code) => errors.push(code),
        }
    }
    // FlagCX's own log has a line for each error.
    assert_eq!(errors, [Code::RemoteError]);
    let mut handle = handle.arrived(1);
    let send = until(|| flagcx.connect(0, &mut handle).expect("connect"));
    let recv = until(|| flagcx.accept(listener).expect("accept"));
    exchange(&flagcx, (send, recv), 1000, 1);
    close(&flagcx, (send, recv, listener));
}

/// The peer has ended after it sent its handle.
fn connects_to_nobody() {
    let flagcx = flagcx();
    flagcx.init().expect("init");
    let (listener, handle) = flagcx.listen(0).expect("listen");
    flagcx.close(End::Listen, listener).expect("closeListen");
    let mut handle = handle.arrived(1);
    let failure = eventually("an error", PATIENCE, || flagcx.connect(0, &mut handle).err());
    assert_eq!(failure, Code::RemoteError);
}

#[test]
fn a_peer_that_dies_before_it_connects_is_one_clear_line() {
    const NAME: &str = "flagcx::a_peer_that_dies_before_it_connects_is_one_clear_line";
    match child::role().as_deref() {
        Some("accept") => return accepts_for_longer_than_its_patience(),
        Some("connect") => return connects_to_nobody(),
        _ => {}
    }
    let _watchdog = watchdog(120);
    for (role, beginning) in [("accept", "accept: no peer connected within 2 s"), ("connect", "connect: ")] {
        let mailbox = Mailbox::new();
        let said = start(NAME, role, &mailbox, [("TOWLINE_CONNECT_TIMEOUT", "2")]).said_within(Duration::from_secs(50));
        assert_one_line(&said, beginning);
    }
}
