//! Ranks that play NCCL's side of one-sided operations ([`rma`](super::rma)), and what tests of host memory and of GPU
//! memory have in common.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use towline::host::{ApiVersion, Code, Context};

use super::child::{self, Guarded, Mailbox};
use super::faults::Dice;
use super::flagcx::Object;
use super::rma::{PutSignal, Rma, RmaHandle, Spot};
use super::window::Window;
use super::{context, pattern, plugin};

pub const PATIENCE: Duration = Duration::from_secs(20);
pub const COMM: u64 = 7;
pub const ON: (&str, &str) = ("TOWLINE_RMA", "1");

pub fn rma(version: u32) -> Rma {
    Rma::of(&plugin(), version).expect("the library exports the table")
}

/// One rank: what NCCL holds of it.
pub struct Rank {
    pub rma: Rma,
    pub net: Context,
    pub ctx: Object,
    pub listener: Object,
    pub group: Object,
    pub context: Object,
    pub rank: usize,
}

/// A rank before it is connected.
pub struct Listening {
    pub rma: Rma,
    pub net: Context,
    pub ctx: Object,
    pub listener: Object,
    pub handle: RmaHandle,
}

pub fn listening(version: u32) -> Listening {
    listening_in(context(ApiVersion::V12), version)
}

/// `net`: the communicator's network.
pub fn listening_in(net: Context, version: u32) -> Listening {
    let rma = rma(version);
    let ctx = rma.init(COMM).expect("init");
    let (listener, handle) = rma.listen(ctx, 0).expect("listen");
    Listening { rma, net, ctx, listener, handle }
}

impl Listening {
    pub fn connect(self, handles: &[RmaHandle], rank: usize) -> Result<Rank, Code> {
        let Self { rma, net, ctx, listener, .. } = self;
        let group = rma.connect(handles, rank, listener)?;
        let context = rma.create_context(group).expect("createContext");
        Ok(Rank { rma, net, ctx, listener, group, context, rank })
    }
}

/// So many ranks, all in this process.
pub fn connected(version: u32, count: usize) -> Vec<Rank> {
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

/// The role in which a test of [`beside_a_process`] plays rank 1.
pub const OTHER: &str = "the other rank";

/// Plays rank 1 of 2, with this much memory registered.
pub fn lives_until_it_is_killed(size: usize) {
    let own = listening(16);
    let mail = child::mailbox();
    child::send(&mail, "handle", &own.handle);
    let first: RmaHandle = child::receive(&mail, "first").try_into().expect("a handle");
    let handles = [first, own.handle];
    let rank = own.connect(&handles, 1).expect("connect");
    let memory = Window::host(size);
    rank.register(&memory);
    child::send(&mail, "ready", b"");
    std::thread::sleep(Duration::from_secs(60));
}

/// Rank 0 of 2 with a registration, and the process of rank 1, which is the test `name` in the role [`OTHER`].
pub fn beside_a_process(name: &str, size: usize) -> (Rank, Object, Window, Guarded) {
    let mail = Mailbox::new();
    let mut command = child::command(name, OTHER);
    command.env(child::MAILBOX, mail.path());
    let other = Guarded::start(command);
    let own = listening(16);
    child::send(mail.path(), "first", &own.handle);
    let second: RmaHandle = child::receive(mail.path(), "handle").try_into().expect("a handle");
    let handles = [own.handle, second];
    let rank = own.connect(&handles, 0).expect("connect");
    let memory = Window::host(size);
    let mr = rank.register(&memory);
    child::receive(mail.path(), "ready");
    (rank, mr, memory, other)
}

pub fn pick(dice: &mut Dice, below: usize) -> usize {
    dice.roll(below as u64) as usize
}

pub fn at(mr: Object, offset: usize) -> Spot {
    Spot { mr: Some(mr), offset: offset as u64 }
}

pub const NOWHERE: Spot = Spot { mr: None, offset: 0 };

impl Rank {
    pub fn register(&self, window: &Window) -> Object {
        self.register_as(window, 0)
    }

    pub fn register_as(&self, window: &Window, flags: u64) -> Object {
        // SAFETY: each test keeps its memory until its groups are closed, or ends the registration before.
        let mr = unsafe { self.rma.reg_mr(self.group, window.place(), window.kind(), flags) }.expect("regMrSym");
        // NCCL keeps it in a signed number.
        assert!(mr.raw().addr() < 1 << 63, "{mr:?}");
        mr
    }

    pub fn put(&self, what: (Spot, usize, Spot), to: usize, signal: Option<PutSignal>) -> Object {
        self.rma.put(self.context, what, to as u32, signal).expect("iput")
    }

    pub fn wait(&self, request: Object) -> Result<(), Code> {
        let start = Instant::now();
        while !self.rma.test(self.group, request)? {
            assert!(start.elapsed() < PATIENCE, "the request ends");
            towline::host::give_way(start);
        }
        Ok(())
    }

    /// In NCCL's order.
    pub fn close(self) {
        self.rma.destroy_context(self.context).expect("destroyContext");
        self.rma.close_group(self.group).expect("closeColl");
        self.rma.close_listener(self.listener).expect("closeListen");
        self.rma.finalize(self.ctx).expect("finalize");
        drop(self.net);
    }
}

/// A number that another thread adds to.
pub fn signal_of(window: &Window, index: usize) -> u64 {
    // SAFETY: the memory is aligned to 8 bytes and has that number; the plugin adds atomically.
    unsafe { AtomicU64::from_ptr(window.seen(index * 8).cast()) }.load(Ordering::Acquire)
}

/// Bytes that the plugin may write elsewhere in the same memory.
pub fn holds(window: &Window, offset: usize, expected: &[u8]) -> bool {
    // SAFETY: inside the memory; what is compared is no longer written.
    let bytes = unsafe { std::slice::from_raw_parts(window.seen(offset), expected.len()) };
    bytes == expected
}

pub const SIZES: [usize; 6] = [0, 1, 8, 4 << 10, 1 << 20, 64 << 20];

/// The pattern, repeated where it is too short.
pub fn content(seed: usize, size: usize) -> Vec<u8> {
    let block = pattern(seed, size.min(16 << 20));
    let mut content = block.repeat(size.div_ceil(block.len().max(1)));
    content.truncate(size);
    content
}

/// Puts and gets of each size, from rank 0 to each rank and back.
pub fn moves_all_sizes(version: u32, count: usize, make: impl Fn(usize, usize) -> Window) {
    let ranks = connected(version, count);
    let most = SIZES[SIZES.len() - 1];
    let windows: Vec<Window> = (0..count).map(|rank| make(rank, most)).collect();
    let (expected, source, target) = (content(3, most), make(count, most), make(count + 1, most));
    source.fill(&expected);
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
            assert!(holds(&windows[to], offset, &expected[most - size..]), "{size} bytes to rank {to}");
            target.clear(most - size..most);
            let what = (at(mrs[0], offset), size, at(targets[0], most - size));
            let get = first.rma.get(first.context, what, to as u32).expect("iget");
            first.wait(get).expect("the get ends");
            assert!(holds(&target, most - size, &expected[most - size..]), "{size} bytes from rank {to}");
        }
    }
    for to in 0..count {
        let get = first.rma.get(first.context, (NOWHERE, 0, NOWHERE), to as u32).expect("iget");
        first.wait(get).expect("a get of nothing ends");
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
    assert!(windows.iter().all(Window::guards_intact) && target.guards_intact());
}

/// A put of the plan of one rank for another.
pub struct Step {
    offset: usize,
    size: usize,
    /// What the signal behind it adds, if there is one.
    signal: Option<u64>,
    by_increment: bool,
}

/// The puts from one rank to another: all ranks know them, so the receiver can tell what a signal promises.
pub fn plan(from: usize, to: usize, puts: usize) -> (Vec<Step>, usize) {
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

pub const AHEAD: usize = 32;

/// Plays NCCL's progress thread of one rank: puts to all ranks in random order, and with each signal that becomes
/// visible looks at all puts that it promises.
pub struct Progress<'a> {
    rank: &'a Rank,
    count: usize,
    puts: usize,
    window: &'a Window,
    signals: &'a Window,
    source: Object,
    mrs: (Object, Object),
    area: usize,
}

impl Progress<'_> {
    pub fn run(&self, mut meanwhile: impl FnMut(usize)) {
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
            towline::host::give_way(start);
        }
    }
}

pub fn source() -> &'static [u8] {
    pattern(0, 4 << 20)
}

pub fn source_offset(from: usize, to: usize, number: usize) -> usize {
    (from * 7919 + to * 104_729 + number * 65_537) % (3 << 20)
}

/// `make` makes windows (0), signals (1) and sources (2) of a rank; `flags` are those of the signals' registration.
pub fn signals_follow_their_puts(
    (count, puts): (usize, usize),
    make: impl Fn(usize, usize) -> Window + Sync,
    flags: u64,
    meanwhile: impl Fn(usize, usize) + Sync,
) {
    let ranks = connected(16, count);
    let area = (0..count * count).map(|pair| plan(pair / count, pair % count, puts).1).max().unwrap_or(0);
    let barrier = std::sync::Barrier::new(count);
    std::thread::scope(|scope| {
        for rank in &ranks {
            let (meanwhile, barrier, make) = (&meanwhile, &barrier, &make);
            scope.spawn(move || {
                let [window, signals, own] = [area * count, 8 * count, source().len()].map({
                    let mut which = 0..;
                    move |size| make(which.next().unwrap_or(0), size)
                });
                own.fill(source());
                let mrs = (rank.register(&window), rank.register_as(&signals, flags));
                let source = rank.register(&own);
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
