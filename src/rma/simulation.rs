//! Two ranks of a group, without threads, sockets or a GPU. A seed decides when a placer has its turn, which data
//! arrives on which stream, and when a GPU's copies happen. It also decides which streams stall, are cut and reconnect.
//!
//! Everything of this room but its set-up takes part, over both cores of the TCP backend (`tcp::simulation::link`) and
//! a simulated CUDA driver (`cuda::simulation`). A failure names its seed, as in the simulation of the TCP backend,
//! whose variables hold here, too.

use std::cell::RefCell;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::cuda::simulation as gpu;
use super::gpu::Gpus;
use super::group::{Command, Group, Shared};
use super::landings::Landings;
use super::line::{RecvEnd, SendEnd};
use super::outgoing::Outgoing;
use super::patience::Patience;
use super::peer::{Peer, Place};
use super::placer::Placer;
use super::registry::{Region, Registry};
use super::signals::Signals;
use super::wire::{Header, Kind, Signal};
use crate::os::error::{Error, Result};
use crate::tcp::simulation::link::{Link, Luck};
use crate::tcp::simulation::play_all;

const RANKS: usize = 2;
/// The registrations of each rank.
const WINDOW: u32 = 1;
const SIGNALS: u32 = 2;
const SOURCE: u32 = 3;
/// The target of gets from the other rank.
const TARGET: u32 = 4;
const SOURCE_BYTES: usize = 2 << 20;
/// No game takes so long.
const PATIENCE: Duration = Duration::from_secs(600);
/// The bytes of a get.
const GOT: usize = 64;
/// Operations that a rank has under way.
const AHEAD: usize = 32;

struct Connection {
    link: Link,
    /// The end that sends is closed; its earlier bytes still arrive.
    is_left: bool,
    /// Nothing arrives any more.
    is_over: bool,
}

thread_local! {
    /// From rank 0 to rank 1, and back.
    static CONNECTIONS: RefCell<Vec<Connection>> = const { RefCell::new(Vec::new()) };
}

fn with<T>(connection: usize, inside: impl FnOnce(&mut Connection) -> T) -> T {
    CONNECTIONS.with(|all| inside(&mut all.borrow_mut()[connection]))
}

/// One end of a connection, of this thread's game.
struct End {
    connection: usize,
    receives: bool,
}

impl End {
    /// The link's result for a request, or the error that prevents one.
    fn ask<T>(&self, request: usize, inside: impl FnOnce(&mut Link) -> Option<T>) -> Result<Option<T>> {
        with(self.connection, |it| match inside(&mut it.link) {
            None if it.is_over || it.is_left && request >= it.link.sends() => {
                Err(Error::remote("the other end was closed").with_peer("the other rank"))
            }
            found => Ok(found),
        })
    }
}

impl SendEnd for End {
    fn send(&mut self, data: *mut u8, size: usize) -> Result<Option<usize>> {
        Ok(Some(with(self.connection, |it| it.link.send(data.expose_provenance(), size))))
    }

    fn abandon(&mut self) {}

    fn is_sent(&mut self, request: usize) -> Result<bool> {
        Ok(self.ask(request, |link| link.is_sent(request).then_some(()))?.is_some())
    }
}

impl RecvEnd for End {
    fn receive(&mut self, data: *mut u8, size: usize) -> Result<Option<usize>> {
        Ok(Some(with(self.connection, |it| it.link.receive(data.expose_provenance(), size))))
    }

    fn received(&mut self, request: usize) -> Result<Option<u64>> {
        self.ask(request, |link| link.received(request))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        with(self.connection, |it| {
            it.is_left = true;
            it.is_over |= self.receives || !it.link.is_all_sent();
        });
    }
}

fn source() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let mut luck = Luck::of(7);
        (0..SOURCE_BYTES).map(|_| 1 + luck.roll(255) as u8).collect()
    })
}

fn address<T>(memory: &[T]) -> usize {
    memory.as_ptr().expose_provenance()
}

/// The bytes at this address of a live rank, until the game's next step.
fn seen<'a>(address: usize, size: usize) -> &'a [u8] {
    // SAFETY: inside a rank's memory, which lives to the end of its game. Everything that writes there is on this
    // thread.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), size) }
}

fn signal_at(address: usize) -> u64 {
    u64::from_ne_bytes(seen(address, 8).try_into().unwrap_or_default())
}

/// A put of a rank: from a place of the source to the place behind the put before it. With a signal, the value that it
/// adds.
struct Step {
    from: usize,
    to: usize,
    size: usize,
    signal: u64,
}

fn plan(luck: &mut Luck) -> Vec<Step> {
    let (mut to, count) = (0, 1 + luck.roll(12));
    let mut step = |_| {
        let size = match luck.roll(64) {
            0..24 => luck.roll(9) as usize,
            24..48 => luck.roll(5000) as usize,
            48..63 => luck.roll(100_000) as usize,
            _ => luck.roll(3 * super::wire::PIECE as u64) as usize,
        };
        to += size;
        let signal = luck.roll(2) * (1 + luck.roll(1000));
        Step { from: luck.roll((SOURCE_BYTES - size) as u64) as usize, to: to - size, size, signal }
    };
    (0..count).map(&mut step).collect()
}

/// An operation that a rank has begun.
struct Begun {
    request: u64,
    to: usize,
    is_get: bool,
}

/// What a rank ends: its window, its group or its process. Other ranks can no longer operate on it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Window,
    Group,
    /// Its process, without a goodbye.
    Process,
}

struct Rank {
    own: usize,
    group: Group,
    placer: Option<Placer>,
    window: Vec<u8>,
    signals: Vec<u64>,
    target: Vec<u8>,
    /// How many operations of each plan have begun.
    begun: [usize; RANKS],
    /// For each rank's plan: the puts that its signals have promised, and their sum.
    promised: [(usize, u64); RANKS],
    open: Vec<Begun>,
    /// Where gets brought bytes from, and to.
    got: Vec<usize>,
}

struct World {
    luck: Luck,
    /// By sender and target.
    plans: [[Vec<Step>; RANKS]; RANKS],
    area: usize,
    ranks: Vec<Rank>,
    /// A rank that has ended; its puts may fail, and nothing is promised there.
    ended: Option<(usize, Ending)>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut luck = Luck::of(seed);
        gpu::begin(luck.roll(1 << 40), luck.roll(8));
        let links = [0, 1].map(|way| Link::new(2 * seed + way).expect("a connection"));
        let connections = links.map(|link| Connection { link, is_left: false, is_over: false });
        CONNECTIONS.with(|all| *all.borrow_mut() = connections.into());
        let plans = [0, 1].map(|_| [0, 1].map(|_| plan(&mut luck)));
        let area = plans.iter().flatten().filter_map(|it| it.last()).map(|last| last.to + last.size).max();
        let area = area.unwrap_or(0).next_multiple_of(8);
        let ranks = (0..RANKS).map(|own| Rank::new(own, area, &mut luck)).collect();
        Self { luck, plans, area, ranks, ended: None }
    }

    /// One thing happens.
    fn step(&mut self) {
        let which = self.luck.roll(RANKS as u64) as usize;
        match self.luck.roll(16) {
            0 | 1 => self.begin(which),
            2..5 => {
                let rank = &mut self.ranks[which];
                if let Some(placer) = &mut rank.placer {
                    placer.turn();
                    if placer.is_over() {
                        rank.end();
                    }
                }
                self.check(which);
            }
            _ => with(which, |it| {
                if !it.is_over {
                    it.link.step().expect("an honest game");
                }
            }),
        }
    }

    /// A rank begins an operation.
    fn begin(&mut self, which: usize) {
        let to = self.luck.roll(RANKS as u64) as usize;
        let rank = &mut self.ranks[which];
        let Some(step) = self.plans[which][to].get(rank.begun[to]) else { return };
        if rank.open.len() >= AHEAD || self.ended.is_some_and(|(ended, _)| ended == which) {
            return;
        }
        if self.luck.roll(8) == 0 {
            let offset = self.luck.roll(4096);
            let from = Place { region: SOURCE, offset, size: GOT as u64 };
            let request = rank.group.get(to as u32, from, Place { region: TARGET, ..from }).expect("a get");
            rank.open.push(Begun { request, to, is_get: true });
            rank.got.push(offset as usize);
            return;
        }
        let size = step.size as u64;
        let from = Place { region: SOURCE, offset: step.from as u64, size };
        let target = Place { region: WINDOW, offset: (which * self.area + step.to) as u64, size };
        let signal = match step.signal {
            0 => Signal::default(),
            value => Signal { region: SIGNALS, offset: 8 * which as u64, value },
        };
        let request = rank.group.put(to as u32, from, target, signal).expect("a put");
        rank.open.push(Begun { request, to, is_get: false });
        rank.begun[to] += 1;
    }

    /// Tests a rank's requests, and checks that its signals keep their promise.
    fn check(&mut self, which: usize) {
        let rank = &mut self.ranks[which];
        let requests = &rank.group.shared.requests;
        rank.open.retain(|begun| match requests.test(begun.request) {
            Ok(is_done) => !is_done,
            Err(error) => {
                let may_fail = self.ended.is_some_and(|(ended, ending)| {
                    ended == which || ended == begun.to && (begun.is_get || ending == Ending::Process)
                });
                assert!(may_fail, "{error}");
                false
            }
        });
        if self.ended.is_some_and(|(ended, _)| ended == which) {
            return;
        }
        for from in 0..RANKS {
            let visible = signal_at(address(&rank.signals) + 8 * from);
            let (promised, sum) = &mut rank.promised[from];
            while *sum < visible {
                let step = &self.plans[from][which][*promised];
                let base = address(&rank.window) + from * self.area + step.to;
                let expected = &source()[step.from..step.from + step.size];
                assert!(seen(base, step.size) == expected, "put {promised} of rank {from} to rank {which}");
                *sum += step.signal;
                *promised += 1;
            }
            assert_eq!(*sum, visible, "a signal of rank {from} is whole");
        }
    }

    /// Plays until all operations are done. Returns how long that took.
    fn play(&mut self, mut meanwhile: impl FnMut(&mut Self, u64)) -> u64 {
        for now in 0..2_000_000 {
            meanwhile(self, now);
            if self.is_done() {
                return now + 1;
            }
            self.step();
        }
        panic!("it hangs: {:?} open", self.ranks.iter().map(|rank| rank.open.len()).collect::<Vec<_>>());
    }

    fn is_done(&self) -> bool {
        let of_rank = |rank: &Rank| {
            let is_begun = self.ended.is_some_and(|(ended, _)| ended == rank.own)
                || rank.begun.iter().zip(&self.plans[rank.own]).all(|(begun, plan)| *begun == plan.len());
            is_begun && rank.open.is_empty()
        };
        self.ranks.iter().all(of_rank)
    }

    /// Every byte of every put is in place, and nothing else.
    fn check_all_placed(&self) {
        for rank in &self.ranks {
            let mut expected = vec![0; rank.window.len()];
            for (from, plans) in self.plans.iter().enumerate() {
                for step in &plans[rank.own] {
                    let at = from * self.area + step.to;
                    expected[at..at + step.size].copy_from_slice(&source()[step.from..step.from + step.size]);
                }
            }
            assert!(seen(address(&rank.window), expected.len()) == expected, "all puts are in place, and nothing else");
        }
    }
}

impl Rank {
    fn new(own: usize, area: usize, luck: &mut Luck) -> Self {
        let shared = Arc::new(Shared::default());
        let (window, signals, target) = (vec![0_u8; RANKS * area], vec![0_u64; RANKS], vec![0_u8; 8192]);
        let places = [
            (address(&window), window.len()),
            (address(&signals), 8 * RANKS),
            (address(source()), SOURCE_BYTES),
            (address(&target), target.len()),
        ];
        for (address, size) in places {
            let of_gpu = luck.roll(2) == 0;
            let gpu =
                of_gpu.then(|| shared.gpus.found_by(gpu::driver(), address, RANKS as u32).expect("a simulated GPU"));
            shared.registry.add(Region { address, size, gpu, only_ours: luck.roll(2) == 0 }).expect("a registration");
        }
        let other = 1 - own;
        let outgoing = Outgoing::over(Box::new(End { connection: own, receives: false }), other as u32);
        let peer = Peer::new(
            other as u32,
            format!("rank {other}"),
            outgoing,
            Box::new(End { connection: other, receives: true }),
        );
        let mut peers = [None, None];
        peers[other] = Some(peer);
        let placer = Some(Placer::new(
            Arc::clone(&shared),
            peers.into(),
            Arc::default(),
            Patience::new(PATIENCE, Arc::default()),
        ));
        let group = Group { shared, ranks: RANKS as u32, placer: Mutex::new(None) };
        let (begun, promised, open, got) = Default::default();
        Self { own, group, placer, window, signals, target, begun, promised, open, got }
    }

    /// Does the same as the placer's thread at its end.
    fn end(&mut self) {
        self.placer = None;
        let shared = &self.group.shared;
        shared.gpus.settle();
        shared.end(&Error::usage("the group is closed"));
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.placer.is_some() {
            self.end();
        }
        self.group.shared.registry.clear();
        self.group.shared.gpus.clear();
    }
}

/// Every put arrives once, on any path. A visible signal means that all earlier puts are visible. Every request ends.
fn a_game_of_puts_and_signals(seed: u64) {
    let mut world = World::new(seed);
    world.play(|_, _| ());
    // The source of a finished put has been read, and its signal is in place.
    for which in 0..RANKS {
        world.check(which);
        for (from, (promised, _)) in world.ranks[which].promised.iter().enumerate() {
            let last = world.plans[from][which].iter().rposition(|step| step.signal > 0);
            assert!(last.is_none_or(|last| *promised > last), "the last signal of rank {from} is visible");
        }
        let Rank { target, got, .. } = &world.ranks[which];
        let mut expected = vec![0; target.len()];
        for &at in got {
            expected[at..at + GOT].copy_from_slice(&source()[at..at + GOT]);
        }
        assert!(seen(address(target), target.len()) == expected, "all gets have brought their bytes, and nothing else");
    }
    world.check_all_placed();
    drop(world);
    assert_eq!(gpu::left(), (0, 0, 0), "streams, events and page-locked memory end with their group");
}

/// A rank ends its window, its group or its process amid puts of both. If it ends its window or group, the other rank's
/// puts still succeed. If its process vanishes, they end, and that rank is notified. After the end nothing is written
/// there.
fn a_game_with_an_end(seed: u64) {
    let mut world = World::new(seed);
    let which = world.luck.roll(RANKS as u64) as usize;
    let at = world.luck.roll(6000);
    let ending = [Ending::Window, Ending::Group, Ending::Process][world.luck.roll(3) as usize];
    let mut waits: Option<Receiver<()>> = None;
    let mut frozen: Option<Vec<u8>> = None;
    let mut meanwhile = |world: &mut World, now: u64| {
        let rank = &mut world.ranks[which];
        if now == at {
            world.ended = Some((which, ending));
            let (done, is_done) = sync_channel(1);
            match ending {
                Ending::Window => rank.group.shared.ask(Command::Withdraw { region: WINDOW, done }).expect("a placer"),
                Ending::Group => rank.group.shared.ask(Command::Close).expect("a placer"),
                Ending::Process => {
                    (0..RANKS).for_each(|connection| with(connection, |it| it.is_over = true));
                    rank.end();
                }
            }
            waits = Some(is_done);
        }
        let has_ended = match ending {
            Ending::Window => waits.as_ref().is_some_and(|it| it.try_recv().is_ok()),
            Ending::Group | Ending::Process => rank.placer.is_none(),
        };
        if has_ended && frozen.is_none() {
            frozen = Some(seen(address(&rank.window), rank.window.len()).to_vec());
        }
        frozen.is_some()
    };
    let played = world.play(|world, now| {
        meanwhile(world, now);
    });
    // The game may be over before the end begins or completes.
    let mut now = played.max(at);
    let until = now + 2000;
    while !meanwhile(&mut world, now) || now < until {
        world.step();
        now += 1;
        assert!(now < until + 2_000_000, "the end hangs");
    }
    let rank = &world.ranks[which];
    let frozen = frozen.expect("it has ended");
    assert!(seen(address(&rank.window), frozen.len()) == frozen, "written late");
    if ending == Ending::Process {
        assert!(world.ranks[1 - which].group.failure().is_some(), "the other rank learns of it");
    }
}

/// Two groups of a process, each with a stream of its own, add to the same numbers of a GPU.
fn a_game_of_two_groups(seed: u64) {
    const ADDITIONS: usize = 40;
    let mut luck = Luck::of(seed);
    gpu::begin(luck.roll(1 << 40), luck.roll(8));
    let numbers = vec![0_u64; 2];
    let turns = Arc::default();
    let mut groups = [0, 1].map(|_| {
        let (gpus, registry) = (Gpus::default(), Registry::default());
        let gpu = Some(gpus.found_by(gpu::driver(), address(&numbers), RANKS as u32).expect("a simulated GPU"));
        registry.add(Region { address: address(&numbers), size: 16, gpu, only_ours: false }).expect("a registration");
        (gpus, registry, Signals::of(Arc::clone(&turns)), [Landings::default(), Landings::default()])
    });
    let (mut sums, mut begun, mut landed) = ([0, 0], 0, Vec::new());
    for _ in 0..100_000 {
        let (gpus, registry, signals, landings) = &mut groups[luck.roll(2) as usize];
        let from = &mut landings[luck.roll(2) as usize];
        if begun < ADDITIONS && luck.roll(4) == 0 {
            let (which, value) = (luck.roll(2), 1 + luck.roll(1000));
            let signal = Signal { region: 1, offset: 8 * which, value };
            from.push(Header { signal, ..Header::new(Kind::Put) }, false, None);
            sums[which as usize] += value;
            begun += 1;
        }
        gpus.ask();
        from.advance(registry, signals, &mut landed).expect("nothing fails");
        if landed.len() == ADDITIONS {
            break;
        }
    }
    assert_eq!(landed.len(), ADDITIONS, "it hangs");
    assert_eq!([0, 8].map(|offset| signal_at(address(&numbers) + offset)), sums, "an addition is lost");
}

#[test]
fn groups_that_add_to_one_number_of_a_gpu_lose_nothing() {
    play_all(20, a_game_of_two_groups);
}

#[test]
fn a_visible_signal_means_that_all_earlier_puts_are_whatever_the_network_does() {
    play_all(20, a_game_of_puts_and_signals);
}

#[test]
fn an_end_amid_puts_fails_none_of_another_rank() {
    play_all(40, a_game_with_an_end);
}
