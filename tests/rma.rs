//! One-sided operations, driven as NCCL's progress thread drives them (`src/host/rma.rs`), in host memory. NCCL itself is not
//! part of these tests.

mod support;

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::child::{self, Guarded, Mailbox};
use support::faults::Dice;
use support::injector::{FAULTY_CALLS, faulty_calls};
use support::{context, eventually, key_file, pattern, plugin, watchdog};
use towline::host::log::Capture;
use towline::host::{
    ApiVersion, Code, Context, Handle, Memory, Object, PTR_CUDA, PTR_HOST, Part, PutSignal, Rma, RmaHandle, Spot,
};
use towline::nccl::ffi::ncclRma_v16_t;

const PATIENCE: Duration = Duration::from_secs(20);
const COMM: u64 = 7;
const ON: (&str, &str) = ("TOWLINE_RMA", "1");
const VERSIONS: [u32; 3] = [14, 15, 16];

fn rma(version: u32) -> Rma {
    Rma::of(&plugin(), version).expect("the library exports the table")
}

/// One rank: what NCCL holds of it.
struct Rank {
    rma: Rma,
    net: Context,
    ctx: Object,
    listener: Object,
    group: Object,
    context: Object,
    rank: usize,
}

/// A rank before it is connected.
struct Listening {
    rma: Rma,
    net: Context,
    ctx: Object,
    listener: Object,
    handle: RmaHandle,
}

fn listening(version: u32) -> Listening {
    let (net, rma) = (context(ApiVersion::V12), rma(version));
    let ctx = rma.init(COMM).expect("init");
    let (listener, handle) = rma.listen(ctx, 0).expect("listen");
    Listening { rma, net, ctx, listener, handle }
}

impl Listening {
    fn connect(self, handles: &[RmaHandle], rank: usize) -> Result<Rank, Code> {
        let Self { rma, net, ctx, listener, .. } = self;
        let group = rma.connect(handles, rank, listener)?;
        let context = rma.create_context(group).expect("createContext");
        Ok(Rank { rma, net, ctx, listener, group, context, rank })
    }
}

/// So many ranks, all in this process.
fn connected(version: u32, count: usize) -> Vec<Rank> {
    let all: Vec<Listening> = (0..count).map(|_| listening(version)).collect();
    let handles: Vec<RmaHandle> = all.iter().map(|it| it.handle).collect();
    std::thread::scope(|scope| {
        let connect = |(rank, it): (usize, Listening)| {
            let handles = &handles;
            scope.spawn(move || it.connect(handles, rank).expect("connect"))
        };
        let threads: Vec<_> = all.into_iter().enumerate().map(connect).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

fn pick(dice: &mut Dice, below: usize) -> usize {
    dice.roll(below as u64) as usize
}

fn at(mr: Object, offset: usize) -> Spot {
    Spot { mr: Some(mr), offset: offset as u64 }
}

const NOWHERE: Spot = Spot { mr: None, offset: 0 };

impl Rank {
    fn register(&self, memory: &Memory) -> Object {
        self.register_at(memory.at(0) as usize, memory.len())
    }

    fn register_at(&self, address: usize, size: usize) -> Object {
        // SAFETY: each test keeps its memory until its groups are closed, or ends the registration before.
        unsafe { self.rma.reg_mr(self.group, address, size, PTR_HOST) }.expect("regMrSym")
    }

    fn put(&self, what: (Spot, usize, Spot), to: usize, signal: Option<PutSignal>) -> Object {
        self.rma.put(self.context, what, to as u32, signal).expect("iput")
    }

    fn wait(&self, request: Object) -> Result<(), Code> {
        let start = Instant::now();
        while !self.rma.test(self.group, request)? {
            assert!(start.elapsed() < PATIENCE, "the request ends");
            std::thread::yield_now();
        }
        Ok(())
    }

    /// In NCCL's order.
    fn close(self) {
        self.rma.destroy_context(self.context).expect("destroyContext");
        self.rma.close_group(self.group).expect("closeColl");
        self.rma.close_listener(self.listener).expect("closeListen");
        self.rma.finalize(self.ctx).expect("finalize");
        drop(self.net);
    }
}

/// A number that another thread adds to.
fn signal_of(memory: &Memory, index: usize) -> u64 {
    // SAFETY: the memory is aligned to 8 bytes and has that number; the plugin adds atomically.
    unsafe { AtomicU64::from_ptr(memory.at(index * 8).cast()) }.load(Ordering::Acquire)
}

/// Bytes that the plugin may write elsewhere in the same memory.
fn holds(memory: &Memory, offset: usize, expected: &[u8]) -> bool {
    // SAFETY: inside the memory; what is compared is no longer written.
    let bytes = unsafe { std::slice::from_raw_parts(memory.at(offset).cast::<u8>(), expected.len()) };
    bytes == expected
}

/// The table of v16, as NCCL 2.32.3 reads it. `abi_layout` has the others, which a compiler measured.
#[test]
fn the_newest_table_is_laid_out_as_nccl_reads_it() {
    macro_rules! offsets {
        ($($at:literal $field:ident)+) => {
            $( assert_eq!(offset_of!(ncclRma_v16_t, $field), $at, stringify!($field)); )+
        };
    }
    offsets! {
        0 name 8 init 16 devices 24 getRmaProperties 32 getProperties 40 listen 48 connect 56 createContext 64 regMrSym
        72 regMrSymDmaBuf 80 deregMrSym 88 destroyContext 96 closeColl 104 closeListen 112 iput 120 iputSignal 128 iget
        136 iflush 144 test 152 rmaProgress 160 queryLastError 168 finalize
    }
    assert_eq!(size_of::<ncclRma_v16_t>(), 176);
}

/// Why `init` declines, as the log has it.
fn declines(reason: &str) {
    for version in VERSIONS {
        let log = Capture::start();
        assert_eq!(rma(version).init(COMM).err(), Some(Code::InvalidUsage));
        assert!(!log.records().iter().any(|record| record.is_warning()), "{:?}", log.records());
        if !reason.is_empty() {
            assert!(log.contains(reason), "{reason}: {:?}", log.records());
        }
    }
}

#[test]
fn nothing_is_offered_unless_it_is_asked_for() {
    child::alone("nothing_is_offered_unless_it_is_asked_for", &[("NCCL_DEBUG", "INFO")], || {
        let _net = context(ApiVersion::V12);
        declines("TOWLINE_RMA is not 1");
    });
}

#[test]
fn nothing_is_offered_to_a_communicator_of_another_network() {
    child::alone("nothing_is_offered_to_a_communicator_of_another_network", &[ON, ("NCCL_DEBUG", "INFO")], || {
        // No network's `init` has been called: nobody has given a logger.
        declines("");
        let net = context(ApiVersion::V12);
        let (rma, log) = (rma(16), Capture::start());
        assert_eq!(rma.init(COMM + 1).err(), Some(Code::InvalidUsage));
        assert!(log.contains("this communicator does not use Towline"), "{:?}", log.records());
        let ctx = rma.init(COMM).expect("init");
        net.finalize().expect("finalize");
        assert_eq!(rma.init(COMM + 1).err(), Some(Code::InvalidUsage));
        rma.finalize(ctx).expect("finalize");
        declines("");
    });
}

#[test]
fn devices_are_those_of_the_network() {
    child::alone("devices_are_those_of_the_network", &[ON], || {
        let net = context(ApiVersion::V12);
        for version in VERSIONS {
            let rma = rma(version);
            let ctx = rma.init(COMM).expect("init");
            assert_eq!(rma.devices(), net.devices());
            for dev in 0..net.devices().expect("devices") {
                let (ours, kind) = rma.properties(dev).expect("getProperties");
                let theirs = net.properties(dev).expect("getProperties");
                assert_eq!(kind, 2, "NCCL's own proxy thread calls");
                let told = |it: &towline::host::Properties| {
                    (it.name.clone(), it.pci_path.clone(), it.ptr_support, it.speed_mbps, it.port)
                };
                assert_eq!(told(&ours), told(&theirs));
            }
            rma.finalize(ctx).expect("finalize");
        }
    });
}

const SIZES: [usize; 6] = [0, 1, 8, 4 << 10, 1 << 20, 64 << 20];

fn content(seed: usize, size: usize) -> Vec<u8> {
    pattern(seed, size.min(16 << 20)).iter().copied().cycle().take(size).collect()
}

/// Puts and gets of each size, from rank 0 to each rank and back.
fn moves_all_sizes(version: u32, count: usize) {
    let ranks = connected(version, count);
    let most = SIZES[SIZES.len() - 1];
    let mut windows: Vec<Memory> = ranks.iter().map(|_| Memory::new(most)).collect();
    let (source, target) = (content(3, most), Memory::new(most));
    let source = Memory::of(&source);
    let mrs: Vec<Object> = ranks.iter().zip(&windows).map(|(rank, window)| rank.register(window)).collect();
    let sources: Vec<Object> = ranks.iter().map(|rank| rank.register(&source)).collect();
    let targets: Vec<Object> = ranks.iter().map(|rank| rank.register(&target)).collect();
    let first = &ranks[0];
    for size in SIZES {
        for (to, _) in windows.iter().enumerate() {
            let offset = (most - size) / 2;
            let what = match size {
                0 => (NOWHERE, 0, NOWHERE),
                _ => (at(sources[0], most - size), size, at(mrs[0], offset)),
            };
            first.wait(first.put(what, to, None)).expect("the put ends");
            assert!(holds(&windows[to], offset, &source.bytes()[most - size..]), "{size} bytes to rank {to}");
            let what = (at(mrs[0], offset), size, at(targets[0], most - size));
            let get = first.rma.get(first.context, what, to as u32).expect("iget");
            first.wait(get).expect("the get ends");
            assert!(holds(&target, most - size, &source.bytes()[most - size..]), "{size} bytes from rank {to}");
        }
    }
    assert_eq!(first.rma.flush(first.context, mrs[0], 0), Ok(None));
    assert!(ranks.iter().all(|rank| rank.rma.has_error(rank.context) == Ok(false)));
    assert!(matches!(first.rma.signals_flush_all(first.group), None | Some(Ok(false))));
    for (rank, mrs) in ranks.iter().zip(mrs.iter().zip(sources.iter().zip(&targets))) {
        let start = Instant::now();
        for mr in [*mrs.0, *mrs.1.0, *mrs.1.1] {
            rank.rma.dereg_mr(rank.group, mr).expect("deregMrSym");
            assert_eq!(rank.rma.dereg_mr(rank.group, mr), Err(Code::InvalidArgument));
        }
        assert!(start.elapsed() < Duration::from_secs(1), "nothing is under way");
    }
    ranks.into_iter().for_each(Rank::close);
    assert!(windows.iter_mut().all(|window| window.guards_intact()) && target.guards_intact());
}

#[test]
fn puts_and_gets_of_all_sizes_arrive() {
    child::alone("puts_and_gets_of_all_sizes_arrive", &[ON], || {
        let _watchdog = watchdog(200);
        for (version, count) in VERSIONS.into_iter().zip([2, 3, 2]) {
            moves_all_sizes(version, count);
        }
    });
}

/// A put of the plan of one rank for another.
struct Step {
    offset: usize,
    size: usize,
    /// What the signal behind it adds, if there is one.
    signal: Option<u64>,
    by_increment: bool,
}

/// The puts from one rank to another: all ranks know them, so the receiver can tell what a signal promises.
fn plan(from: usize, to: usize, puts: usize) -> (Vec<Step>, usize) {
    let mut dice = Dice::new((from * 100 + to + 1) as u64);
    let mut offset = 0;
    let mut step = |_| {
        let size = [0, 1, 8, 100, 4 << 10, 100_000, 1 << 20][pick(&mut dice, 7)];
        let by_increment = pick(&mut dice, 2) == 0;
        let signal = (pick(&mut dice, 3) == 0).then(|| if by_increment { 1 } else { 1 + pick(&mut dice, 1000) as u64 });
        offset += size;
        Step { offset: offset - size, size, signal, by_increment }
    };
    let steps = (0..puts).map(&mut step).collect();
    (steps, offset)
}

const AHEAD: usize = 32;

/// Plays NCCL's progress thread of one rank: puts to all ranks in random order, and with each signal that becomes visible
/// looks at all puts that it promises.
struct Progress<'a> {
    rank: &'a Rank,
    count: usize,
    puts: usize,
    window: &'a Memory,
    signals: &'a Memory,
    source: Object,
    mrs: (Object, Object),
    area: usize,
}

impl Progress<'_> {
    fn run(&self, mut meanwhile: impl FnMut(usize)) {
        let own = self.rank.rank;
        let mut dice = Dice::new(own as u64 + 1);
        let mut next = vec![0; self.count];
        let mut open: Vec<Object> = Vec::new();
        let mut seen: Vec<(usize, u64)> = vec![(0, 0); self.count];
        let plans: Vec<_> = (0..self.count).map(|to| plan(own, to, self.puts).0).collect();
        let expected: Vec<_> = (0..self.count).map(|from| plan(from, own, self.puts).0).collect();
        let start = Instant::now();
        let mut begun = 0;
        loop {
            if open.len() < AHEAD && begun < self.count * self.puts {
                let to = pick(&mut dice, self.count);
                if let Some(step) = plans[to].get(next[to]) {
                    let from = at(self.source, source_offset(own, to, next[to]));
                    let signal = step.signal.map(|value| PutSignal {
                        at: at(self.mrs.1, own * 8),
                        value: (!step.by_increment).then_some(value),
                    });
                    let target = at(self.mrs.0, own * self.area + step.offset);
                    let what = if step.size == 0 { (NOWHERE, 0, NOWHERE) } else { (from, step.size, target) };
                    open.push(self.rank.put(what, to, signal));
                    next[to] += 1;
                    begun += 1;
                    meanwhile(begun);
                }
            }
            open.retain(|&request| !self.rank.rma.test(self.rank.group, request).expect("a put goes well"));
            let mut all_seen = true;
            for (from, (looked, sum)) in seen.iter_mut().enumerate() {
                let visible = signal_of(self.signals, from);
                while *sum < visible {
                    let step = &expected[from][*looked];
                    let place = source_offset(from, own, *looked);
                    let bytes = &source()[place..place + step.size];
                    let offset = from * self.area + step.offset;
                    assert!(holds(self.window, offset, bytes), "put {looked} of rank {from} to rank {own}");
                    *sum += step.signal.unwrap_or(0);
                    *looked += 1;
                }
                assert_eq!(*sum, visible, "a signal of rank {from} is whole");
                all_seen &= visible == expected[from].iter().filter_map(|step| step.signal).sum::<u64>();
            }
            if all_seen && open.is_empty() && begun == self.count * self.puts {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(100), "all signals come: {seen:?}, {begun} begun, {open:?}");
            std::thread::yield_now();
        }
    }
}

fn source() -> &'static [u8] {
    pattern(0, 4 << 20)
}

fn source_offset(from: usize, to: usize, number: usize) -> usize {
    (from * 7919 + to * 104_729 + number * 65_537) % (3 << 20)
}

fn signals_follow_their_puts(count: usize, puts: usize, meanwhile: impl Fn(usize, usize) + Sync) {
    let ranks = connected(16, count);
    let area = (0..count * count).map(|pair| plan(pair / count, pair % count, puts).1).max().unwrap_or(0);
    let barrier = std::sync::Barrier::new(count);
    std::thread::scope(|scope| {
        for rank in &ranks {
            let (meanwhile, barrier) = (&meanwhile, &barrier);
            scope.spawn(move || {
                let (window, signals) = (Memory::new(area * count), Memory::new(8 * count));
                let mrs = (rank.register(&window), rank.register(&signals));
                let own = source();
                let source = rank.register_at(own.as_ptr() as usize, own.len());
                let progress = Progress { rank, count, puts, window: &window, signals: &signals, source, mrs, area };
                // As NCCL has one after the registrations of a window, and users have one before they end it.
                barrier.wait();
                progress.run(|begun| meanwhile(rank.rank, begun));
                barrier.wait();
                for mr in [mrs.0, mrs.1, source] {
                    rank.rma.dereg_mr(rank.group, mr).expect("deregMrSym");
                }
                assert!(window.guards_intact() && signals.guards_intact());
            });
        }
    });
    assert!(ranks.iter().all(|rank| rank.rma.has_error(rank.context) == Ok(false)));
    ranks.into_iter().for_each(Rank::close);
}

#[test]
fn a_visible_signal_means_that_all_earlier_puts_are() {
    let (_dir, key) = key_file();
    let key = key.to_str().expect("text");
    for more in [("TOWLINE_STREAMS", "4"), ("TOWLINE_KEY_FILE", key), ("TOWLINE_CHECKSUM", "1")] {
        child::alone("a_visible_signal_means_that_all_earlier_puts_are", &[ON, more], || {
            let _watchdog = watchdog(200);
            signals_follow_their_puts(2, 150, |_, _| ());
            signals_follow_their_puts(3, 100, |_, _| ());
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// The library's system calls fail now and then, with errors that the kernel may give.
#[test]
fn signals_keep_their_promise_when_system_calls_fail() {
    let injector = faulty_calls().to_str().expect("text");
    let variables = [
        ON,
        ("LD_PRELOAD", injector),
        ("FAULTY_CALLS_LIBRARY", "libnccl-net"),
        ("FAULTY_CALLS_SEED", "1"),
        ("FAULTY_CALLS_RATE", "10"),
    ];
    child::alone("signals_keep_their_promise_when_system_calls_fail", &variables, || {
        let _watchdog = watchdog(200);
        signals_follow_their_puts(2, 150, |rank, begun| {
            if rank == 0 && begun == 20 {
                FAULTY_CALLS.arm(true);
            }
        });
        FAULTY_CALLS.arm(false);
        let faults: u32 = FAULTY_CALLS.injected().values().map(|(_, faults)| faults).sum();
        assert!(faults > 10, "{faults} faults");
    });
}

/// Ends TCP connections of this process, each second one, as a middle box does that forgets them. Gives how many.
fn cut_streams() -> usize {
    let mut cut = 0;
    let ours = std::fs::read_dir("/proc/self/fd").expect("proc").flatten();
    let numbers = ours.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    for (index, fd) in numbers.collect::<Vec<_>>().into_iter().enumerate() {
        let (mut address, mut length) = ([0_u64; 16], 128);
        // SAFETY: the kernel writes an address of at most that length; no such socket is its to say.
        let is_connected = unsafe { libc::getpeername(fd, address.as_mut_ptr().cast(), &raw mut length) } == 0;
        let family = address[0] as u16;
        if is_connected && index.is_multiple_of(2) && [libc::AF_INET as u16, libc::AF_INET6 as u16].contains(&family) {
            // SAFETY: a descriptor of this process; one that has just been closed is the kernel's to refuse.
            cut += usize::from(unsafe { libc::shutdown(fd, libc::SHUT_RDWR) } == 0);
        }
    }
    cut
}

#[test]
fn signals_keep_their_promise_when_streams_are_cut() {
    child::alone("signals_keep_their_promise_when_streams_are_cut", &[ON, ("TOWLINE_STREAMS", "4")], || {
        let _watchdog = watchdog(200);
        signals_follow_their_puts(2, 150, |rank, begun| {
            if rank == 0 && begun.is_multiple_of(60) {
                assert!(cut_streams() > 0, "there are streams to cut");
            }
        });
    });
}

#[test]
fn registrations_end_while_puts_are_late() {
    child::alone("registrations_end_while_puts_are_late", &[ON], || {
        let _watchdog = watchdog(100);
        let size = 64 << 20;
        for round in 0..4 {
            let ranks = connected(14, 2);
            let (source, mut window) = (Memory::new(size), Memory::new(size));
            let mrs = [ranks[0].register(&source), ranks[1].register(&window)];
            let what = (at(mrs[0], 0), size, at(mrs[0], 0));
            let requests: Vec<Object> = (0..4).map(|_| ranks[0].put(what, 1, None)).collect();
            std::thread::sleep(Duration::from_millis(round * 5));
            // The reader's or the target's registration ends; from then on the memory is the user's.
            let start = Instant::now();
            ranks[1].rma.dereg_mr(ranks[1].group, mrs[1]).expect("deregMrSym");
            assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
            window.bytes_mut().fill(0xEE);
            if round % 2 == 0 {
                ranks[0].rma.dereg_mr(ranks[0].group, mrs[0]).expect("deregMrSym");
            }
            let ends: Vec<_> = requests.into_iter().map(|request| ranks[0].wait(request)).collect();
            assert_ne!(ends[3], Ok(()), "it was refused, or its rank has failed");
            assert!(window.bytes().iter().all(|&byte| byte == 0xEE), "no put lands late");
            ranks.into_iter().for_each(Rank::close);
        }
    });
}

#[test]
fn groups_close_in_any_order() {
    child::alone("groups_close_in_any_order", &[ON], || {
        let _watchdog = watchdog(100);
        for round in 0..6 {
            let log = Capture::start();
            let mut ranks = connected(VERSIONS[round % 3], 3);
            let memory: Vec<Memory> = ranks.iter().map(|_| Memory::new(4 << 20)).collect();
            let mrs: Vec<Object> = ranks.iter().zip(&memory).map(|(rank, memory)| rank.register(memory)).collect();
            let what = (at(mrs[0], 0), 4 << 20, at(mrs[0], 0));
            let request = ranks[0].put(what, 1, None);
            if round % 2 == 0 {
                ranks[0].wait(request).expect("the put ends");
            }
            ranks.rotate_left(round % 3);
            let last = ranks.pop().expect("three ranks");
            let start = Instant::now();
            // In an odd round a request is live.
            for rank in ranks {
                match round {
                    0..3 => rank.close(),
                    _ => {
                        // What NCCL leaves behind ends with the context.
                        rank.rma.finalize(rank.ctx).expect("finalize");
                        rank.rma.close_group(rank.group).expect("closeColl");
                        let _ = rank.rma.close_listener(rank.listener);
                        rank.rma.destroy_context(rank.context).expect("destroyContext");
                    }
                }
            }
            last.close();
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            let warnings = log.records().iter().filter(|record| record.is_warning()).count();
            assert!(round % 2 == 1 || round > 2 || warnings == 0, "{:?}", log.records());
        }
    });
}

#[test]
fn wrong_arguments_are_refused() {
    child::alone("wrong_arguments_are_refused", &[ON], || {
        let _watchdog = watchdog(60);
        let ranks = connected(15, 2);
        let rank = &ranks[0];
        let memory = Memory::new(64);
        let mr = rank.register(&memory);
        let other = ranks[1].register(&memory);
        let refused = |what, to, signal| rank.rma.put(rank.context, what, to, signal).err();
        let good = (at(mr, 0), 8, at(mr, 0));
        assert_eq!(refused(good, 2, None), Some(Code::InvalidArgument), "no such rank");
        assert_eq!(refused((at(mr, 60), 8, at(mr, 0)), 1, None), Some(Code::InvalidArgument));
        assert_eq!(refused((at(mr, u64::MAX as usize), 8, at(mr, 0)), 1, None), Some(Code::InvalidArgument));
        assert_eq!(refused(good, 1, Some(PutSignal { at: NOWHERE, value: None })), Some(Code::InvalidArgument));
        let get = rank.rma.get(rank.context, (at(mr, 0), 8, at(mr, 57)), 1);
        assert_eq!(get.err(), Some(Code::InvalidArgument));
        // What only the other rank can know comes with `test`, and ends nothing else.
        let put = rank.put((at(mr, 0), 8, at(mr, 57)), 1, None);
        assert_eq!(rank.wait(put), Err(Code::RemoteError));
        let crooked = PutSignal { at: at(mr, 4), value: None };
        assert_eq!(rank.wait(rank.put(good, 1, Some(crooked))), Err(Code::RemoteError));
        let get = rank.rma.get(rank.context, (at(mr, 57), 8, at(mr, 0)), 1).expect("iget");
        assert_eq!(rank.wait(get), Err(Code::RemoteError));
        assert_eq!(rank.wait(rank.put(good, 1, None)), Ok(()));
        // GPU memory.
        // SAFETY: the memory outlives the group.
        let gpu = unsafe { rank.rma.reg_mr(rank.group, memory.at(0) as usize, 64, PTR_CUDA) };
        assert_eq!(gpu.err(), Some(Code::InvalidUsage));
        assert_eq!(rank.rma.create_context(rank.listener).err(), Some(Code::InvalidArgument));
        assert_eq!(rank.rma.close_listener(rank.group), Err(Code::InvalidArgument));
        assert_eq!(rank.rma.test(rank.group, mr), Err(Code::InvalidArgument));
        assert_eq!(ranks[1].rma.dereg_mr(ranks[1].group, other), Ok(()));
        ranks.into_iter().for_each(Rank::close);
    });
}

/// Rank 1 of 2: connects, and dies when it is killed.
fn is_killed() {
    let own = listening(16);
    let mail = child::mailbox();
    child::send(&mail, "handle", &own.handle);
    let first: RmaHandle = child::receive(&mail, "first").try_into().expect("a handle");
    let handles = [first, own.handle];
    let rank = own.connect(&handles, 1).expect("connect");
    let memory = Memory::new(1 << 20);
    rank.register(&memory);
    child::send(&mail, "ready", b"");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_dead_rank_is_one_clear_line_and_a_remote_error() {
    const NAME: &str = "a_dead_rank_is_one_clear_line_and_a_remote_error";
    if child::role().as_deref() == Some("killed") {
        return is_killed();
    }
    child::alone(NAME, &[ON, ("TOWLINE_RECONNECT_TIMEOUT", "1")], || {
        let _watchdog = watchdog(60);
        let log = Capture::start();
        let mail = Mailbox::new();
        let mut command = child::command(NAME, "killed");
        command.env(child::MAILBOX, mail.path());
        let mut other = Guarded::start(command);
        let own = listening(16);
        child::send(mail.path(), "first", &own.handle);
        let second: RmaHandle = child::receive(mail.path(), "handle").try_into().expect("a handle");
        let handles = [own.handle, second];
        let rank = own.connect(&handles, 0).expect("connect");
        let memory = Memory::new(1 << 20);
        let mr = rank.register(&memory);
        child::receive(mail.path(), "ready");
        let what = (at(mr, 0), 1 << 20, at(mr, 0));
        rank.wait(rank.put(what, 1, None)).expect("it lives");
        other.kill();
        let start = Instant::now();
        assert_eq!(rank.wait(rank.put(what, 1, None)), Err(Code::RemoteError));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(rank.wait(rank.put(what, 1, None)), Err(Code::RemoteError), "from then on at once");
        assert_eq!(rank.rma.has_error(rank.context), Ok(true));
        let records = log.records();
        let ends = |text: &str| text.contains("one-sided operations with rank 1 end: ") && text.contains("peer ");
        let lines = records.iter().filter(|record| record.is_warning() && ends(&record.text)).count();
        assert_eq!(lines, 1, "{records:?}");
        rank.close();
    });
}

/// A rank that never comes.
#[test]
fn a_missing_rank_ends_the_set_up_in_time() {
    let variables = [ON, ("TOWLINE_CONNECT_TIMEOUT", "2")];
    child::alone("a_missing_rank_ends_the_set_up_in_time", &variables, || {
        let _watchdog = watchdog(60);
        let (own, silent) = (listening(14), listening(14));
        let (rma, start) = (own.rma.clone(), Instant::now());
        let handles = [own.handle, silent.handle];
        assert_eq!(own.connect(&handles, 0).err(), Some(Code::RemoteError));
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
        rma.finalize(silent.ctx).expect("finalize");
    });
}

const HEADER: usize = 56;

/// A header as docs/dev/protocol.md has it.
fn header(kind: u8, region: u32, offset: u64, size: u64, signal: (u32, u64)) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(b"TWR1");
    bytes[4] = kind;
    bytes[16..20].copy_from_slice(&region.to_le_bytes());
    bytes[20..24].copy_from_slice(&signal.0.to_le_bytes());
    bytes[24..32].copy_from_slice(&offset.to_le_bytes());
    bytes[32..40].copy_from_slice(&size.to_le_bytes());
    bytes[40..48].copy_from_slice(&signal.1.to_le_bytes());
    bytes[48..56].copy_from_slice(&1_u64.to_le_bytes());
    bytes
}

/// A rank whose headers say anything: nothing outside of a registration is written, and each put gets its answer.
#[test]
fn no_header_writes_outside_of_a_registration() {
    child::alone("no_header_writes_outside_of_a_registration", &[ON], || {
        let _watchdog = watchdog(100);
        let own = listening(16);
        let stranger = context(ApiVersion::V12);
        let (listener, handle) = stranger.listen(0).expect("listen");
        let handles = [own.handle, handle.bytes().try_into().expect("128 bytes")];
        let connecting = std::thread::spawn(move || own.connect(&handles, 0).expect("connect"));
        let mut first = Handle::from_bytes(&handles[0]);
        let send = stranger.connect_within(0, &mut first, PATIENCE).expect("connect");
        let recv = listener.accept_within(PATIENCE).expect("accept");
        let post = |bytes: &[u8]| {
            let memory = Memory::of(bytes);
            // SAFETY: the memory lives until the send has ended.
            let request = unsafe { send.post(Part::all(&memory, None)) }.expect("isend");
            send.wait(&request, PATIENCE).expect("the send ends");
        };
        let next = || {
            let memory = Memory::new(HEADER);
            // SAFETY: the memory lives until the receive has ended.
            let request = unsafe { recv.post(&[Part::all(&memory, None)]) }.expect("irecv");
            recv.wait(&request, PATIENCE).map(|_| memory.bytes().to_vec())
        };
        post(&header(1, 1, 0, 2, (0, 0)));
        assert_eq!(next().expect("a hello")[4], 1);
        let rank = connecting.join().expect("a rank");
        let size = 4096;
        // Before and behind the window there is memory that is not registered.
        let memory = Memory::new(3 * size);
        rank.register_at(memory.at(size) as usize, size);
        let mut dice = Dice::new(5);
        let mut placed = 0;
        for _ in 0..600 {
            let near = pick(&mut dice, 2 * size) as u64;
            let offset = [near, u64::MAX - near, size as u64 - near.min(8), near & !7][pick(&mut dice, 4)];
            let length = [0, 1, 8, pick(&mut dice, 2 * size), size][pick(&mut dice, 5)];
            let region = [1, 1, 1, 0, 2, u32::MAX][pick(&mut dice, 6)];
            let signal = ([0, 0, 1, 2][pick(&mut dice, 4)], offset ^ 8);
            post(&header(2, region, offset, length as u64, signal));
            if length > 0 {
                post(&pattern(1, length)[..length]);
            }
            let answer = next().expect("an answer");
            assert_eq!(answer[4], 5);
            let is_inside = |at: u64, length: u64| at.checked_add(length).is_some_and(|end| end <= size as u64);
            let data_fits = length == 0 || region == 1 && is_inside(offset, length as u64);
            let signal_fits = signal.0 == 0 || signal.0 == 1 && signal.1.is_multiple_of(8) && is_inside(signal.1, 8);
            assert_eq!(answer[5] == 0, data_fits && signal_fits, "{region} {offset} {length} {signal:?}");
            placed += usize::from(answer[5] == 0 && length > 0);
            let outside = [&memory.bytes()[..size], &memory.bytes()[2 * size..]].concat();
            assert!(outside.iter().all(|&byte| byte == outside[0]), "{region} {offset} {length} {signal:?}");
        }
        assert!(placed > 20, "{placed}");
        // An answer that nobody asked for ends the connection.
        post(&header(4, 1, 0, 8, (0, 0)));
        assert!(next().is_err());
        eventually("the group knows", PATIENCE, || rank.rma.has_error(rank.context).expect("an answer").then_some(()));
        rank.close();
    });
}
