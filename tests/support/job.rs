//! A job of two ranks that moves messages both ways, step after step, over any library that exports NCCL's network
//! table: what becomes of it when something goes wrong around it.
//!
//! It uses a library as NCCL's core does: a channel per device, requests of a connection tested in their order, nothing
//! called again after an error. Nothing here knows how the library works, so several can be compared.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use towline::host::{Code, Context, Handle, Init, Listener, Memory, Net, Part, RecvComm, Request, SendComm, Sizes};

use super::child::{self, Guarded, Mailbox};
use super::netns::Namespace;
use super::{ends, injector};
use super::{eventually, part, pattern};

/// The variable that names the library.
pub const LIBRARY: &str = "TEST_LIBRARY";
/// Variables that have a rank do something of its own.
pub const IDLE: &str = "TEST_IDLE";
/// Rank 1 has no descriptor left when it accepts, for three seconds.
pub const NO_DESCRIPTORS: &str = "TEST_NO_DESCRIPTORS";
/// Rank 1 forks a child that lives on.
pub const FORK: &str = "TEST_FORK";
/// All messages are as long as any may be.
pub const LONG: &str = "TEST_LONG";
/// The injector of faults is armed when the connections are there.
pub const FAULTY: &str = "TEST_FAULTY";

/// Steps before anything goes wrong.
const WARM: usize = 4;
/// Messages each way in a step, all outstanding at one time.
const MESSAGES: usize = 8;
const SIZES: [usize; 4] = [1 << 20, 1000, 100_000, 1];
const LONGEST: usize = 4 << 20;
/// How long the test waits for what needs no patience.
const SOON: Duration = Duration::from_secs(40);

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64()
}

/// What a rank has seen.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The call that failed, with its code.
    pub error: Option<String>,
    /// When all its connections had come up.
    pub up: Option<f64>,
    /// When it had made its first steps and, where it was to be idle, went on.
    pub warm: f64,
    /// When it ended, or was told that it is over.
    pub at: f64,
    /// When it last finished a step.
    pub last: f64,
    /// The longest step that was finished, in seconds.
    pub longest: f64,
    /// Messages that arrived with wrong bytes.
    pub wrong: usize,
    /// How long the closes took, when it was told to abort.
    pub closed: Option<f64>,
    /// Bytes that it sent since then.
    pub bytes: usize,
}

impl Report {
    fn write(&self) -> String {
        let numbers = [
            self.up.unwrap_or(-1.0),
            self.warm,
            self.at,
            self.last,
            self.longest,
            self.wrong as f64,
            self.closed.unwrap_or(-1.0),
            self.bytes as f64,
        ];
        let lines: Vec<String> = numbers.iter().map(ToString::to_string).chain(self.error.clone()).collect();
        lines.join("\n")
    }

    fn read(text: &str) -> Self {
        let lines: Vec<&str> = text.lines().collect();
        let number = |at: usize| lines[at].parse::<f64>().expect("a number");
        let known = |at: usize| (number(at) >= 0.0).then(|| number(at));
        Self {
            up: known(0),
            warm: number(1),
            at: number(2),
            last: number(3),
            longest: number(4),
            wrong: number(5) as usize,
            closed: known(6),
            bytes: number(7) as usize,
            error: lines.get(8).map(|&line| line.to_owned()),
        }
    }
}

/// Plays a rank: true when the calling process is one.
pub fn plays() -> bool {
    let Some(role) = child::role() else { return false };
    let number = match role.as_str() {
        "rank-0" => 0,
        "rank-1" => 1,
        _ => return false,
    };
    Rank { number, mail: child::mailbox(), report: Report::default() }.play();
    true
}

struct Rank {
    number: usize,
    mail: PathBuf,
    report: Report,
}

/// A connection with what is outstanding on it, oldest first.
struct Way<T> {
    comm: T,
    posted: VecDeque<(Request, usize)>,
    waiting: VecDeque<usize>,
}

impl<T> Way<T> {
    fn new(comm: T) -> Self {
        Self { comm, posted: VecDeque::new(), waiting: VecDeque::new() }
    }
}

/// Why a rank stops.
enum Stop {
    Over,
    Abort,
    Error(String),
}

fn failed(call: &str) -> impl Fn(Code) -> Stop + '_ {
    move |code| Stop::Error(format!("{code} from {call}"))
}

impl Rank {
    fn said(&self, name: &str) -> bool {
        self.mail.join(name).exists()
    }

    fn wait_for(&self, name: &str) -> Result<(), Stop> {
        while !self.said(name) {
            if self.said("over") {
                return Err(Stop::Over);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    fn play(mut self) {
        let net = Net::open(std::env::var(LIBRARY).expect("a library"), None).expect("the library opens");
        if std::env::var_os(FAULTY).is_some() {
            injector::FAULTY_CALLS.arm(false);
        }
        towline::host::log::print_to_stderr(&std::env::var("NCCL_DEBUG").unwrap_or_default());
        let context = net.init_with(&Init { comm_id: 7, ..Init::default() }).expect("init");
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let stop =
            self.connect(&context, &mut sends, &mut receives).and_then(|()| self.steps(&mut sends, &mut receives));
        self.report.at = now();
        match stop {
            Err(Stop::Error(text)) => self.report.error = Some(text),
            Err(Stop::Abort) => {
                let start = now();
                let closes = sends.into_iter().map(|way| way.comm.close());
                let closed = closes.chain(receives.into_iter().map(|way| way.comm.close())).all(|it| it.is_ok());
                self.report.closed = closed.then(|| now() - start);
            }
            Err(Stop::Over) | Ok(()) => {}
        }
        eventually("a descriptor", SOON, || std::fs::File::open("/dev/null").ok());
        let name = format!("report-{}", self.number);
        child::send(&self.mail, &name, self.report.write().as_bytes());
        // Its end must not be what the other rank sees: each shall find out by itself.
        while !self.said("end") {
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: ends the process, with connections in whatever state they are.
        unsafe { libc::_exit(0) }
    }

    /// A channel for each device, as far as both ranks have some.
    fn connect(
        &mut self,
        context: &Context,
        sends: &mut Vec<Way<SendComm>>,
        receives: &mut Vec<Way<RecvComm>>,
    ) -> Result<(), Stop> {
        let devices = context.devices().map_err(failed("devices"))?;
        let mut listeners = Vec::new();
        let mut handles = Vec::new();
        for dev in 0..devices {
            let (listener, handle) = context.listen(dev).map_err(failed("listen"))?;
            handles.extend(handle.bytes());
            listeners.push(listener);
        }
        child::send(&self.mail, &format!("handles-{}", self.number), &handles);
        let theirs = child::receive(&self.mail, &format!("handles-{}", 1 - self.number));
        let mut theirs: Vec<Handle> = theirs.chunks(128).map(Handle::from_bytes).collect();
        let channels = theirs.len().min(listeners.len());
        theirs.truncate(channels);
        listeners.truncate(channels);
        let without = std::env::var_os(NO_DESCRIPTORS).is_some();
        self.wait_for("open")?;
        if without && self.number == 0 {
            self.wait_for("limited")?;
        }
        let mut connecting: VecDeque<(usize, Handle)> = theirs.into_iter().enumerate().collect();
        // Not closed when the test is over: the caller would notice that.
        let mut accepting = ManuallyDrop::new(VecDeque::<Listener>::from(listeners));
        let mut limited = false;
        let mut kept = Vec::new();
        while !connecting.is_empty() || !accepting.is_empty() {
            if let Some((dev, handle)) = connecting.front_mut() {
                let dev = i32::try_from(*dev).expect("few");
                if let Some(comm) = context.connect(dev, handle).map_err(failed("connect"))? {
                    sends.push(Way::new(comm));
                    connecting.pop_front();
                }
            } else if without && self.number == 1 && !limited {
                limited = true;
                without_descriptors_for(Duration::from_secs(3), &self.mail);
            }
            // The side that must connect first does not accept before.
            if (!without || connecting.is_empty())
                && let Some(listener) = accepting.front()
                && let Some(comm) = listener.accept().map_err(failed("accept"))?
            {
                receives.push(Way::new(comm));
                kept.extend(accepting.pop_front());
            }
            if self.said("over") {
                return Err(Stop::Over);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        self.report.last = now();
        self.report.up = Some(self.report.last);
        // They listen as long as the job lasts.
        std::mem::forget(kept);
        Ok(())
    }

    fn steps(&mut self, sends: &mut [Way<SendComm>], receives: &mut [Way<RecvComm>]) -> Result<(), Stop> {
        let targets: Vec<Memory> = (0..MESSAGES).map(|_| Memory::new(LONGEST)).collect();
        // What is posted may be written to until the process ends.
        let targets = Vec::leak(targets);
        for step in 0.. {
            if step == WARM {
                self.warm()?;
                (self.report.warm, self.report.bytes) = (now(), 0);
            }
            let start = now();
            self.step(step, sends, receives, targets)?;
            self.report.last = now();
            // What the set-up leaves behind is no pause.
            if step >= WARM {
                self.report.longest = self.report.longest.max(self.report.last - start);
            }
        }
        Ok(())
    }

    /// Both ranks have finished the same steps, and nothing is outstanding.
    fn warm(&mut self) -> Result<(), Stop> {
        if self.number == 1 && std::env::var_os(FORK).is_some() {
            // SAFETY: the child only sleeps.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above; it leaves without running anything of ours.
                unsafe {
                    libc::sleep(60);
                    libc::_exit(0);
                }
            }
            child::send(&self.mail, "forked", child.to_string().as_bytes());
        }
        if std::env::var_os(FAULTY).is_some() {
            injector::FAULTY_CALLS.arm(true);
        }
        ends::tell(&format!("warm-{}", self.number));
        if std::env::var_os(IDLE).is_some() {
            self.wait_for("go")?;
        }
        Ok(())
    }

    fn step(
        &mut self,
        step: usize,
        sends: &mut [Way<SendComm>],
        receives: &mut [Way<RecvComm>],
        targets: &[Memory],
    ) -> Result<(), Stop> {
        let channels = sends.len();
        for message in 0..MESSAGES {
            sends[message % channels].waiting.push_back(message);
            receives[message % channels].waiting.push_back(message);
        }
        // Not the same rank's bytes, nor another step's.
        let seed = |rank: usize, message: usize| (step * MESSAGES + message) * 2 + rank;
        let all_long = std::env::var_os(LONG).is_some();
        let mixed = |message: usize| SIZES[(message / channels + message + step) % SIZES.len()];
        let size = |message: usize| if all_long { LONGEST } else { mixed(message) };
        let (mut left, mut looked, start) = (2 * MESSAGES, 0_u32, now());
        while left > 0 {
            let before = left;
            for way in receives.iter_mut() {
                while let Some(&message) = way.waiting.front() {
                    let target = Part::new(targets[message].at(0), size(message), None);
                    // SAFETY: the memory is never freed.
                    let posted = unsafe { way.comm.irecv(&[target]) }.map_err(failed("irecv"))?;
                    let Some(request) = posted else { break };
                    way.waiting.pop_front();
                    way.posted.push_back((request, message));
                }
                while let Some((message, sizes)) =
                    first_done(&mut way.posted, |it| way.comm.test(it)).map_err(failed("test of a receive"))?
                {
                    let got = usize::try_from(sizes[0]).unwrap_or(0);
                    let right = pattern(seed(1 - self.number, message), size(message));
                    if got != right.len() || targets[message].bytes()[..got] != *right {
                        self.report.wrong += 1;
                    }
                    left -= 1;
                }
            }
            for way in sends.iter_mut() {
                while let Some(&message) = way.waiting.front() {
                    let bytes = pattern(seed(self.number, message), size(message));
                    // SAFETY: the pattern is static.
                    let posted = unsafe { way.comm.isend(part(bytes, None)) }.map_err(failed("isend"))?;
                    let Some(request) = posted else { break };
                    way.waiting.pop_front();
                    way.posted.push_back((request, message));
                }
                while let Some((message, _)) =
                    first_done(&mut way.posted, |it| way.comm.test(it)).map_err(failed("test of a send"))?
                {
                    left -= 1;
                    self.report.bytes += size(message);
                }
            }
            if left == before {
                looked += 1;
                // One that stands still shall not take the processor from others.
                let stands = now() - start > 2.0;
                std::thread::sleep(Duration::from_micros(if stands { 2000 } else { 200 }));
                // A look at the files now and then.
                if looked.is_multiple_of(32) {
                    self.look()?;
                }
            }
        }
        self.look()
    }

    fn look(&self) -> Result<(), Stop> {
        if self.number == 0 && self.said("abort") {
            return Err(Stop::Abort);
        }
        if self.said("over") { Err(Stop::Over) } else { Ok(()) }
    }
}

/// The oldest request, when it is done. Only that one is asked after, as NCCL does.
fn first_done(
    posted: &mut VecDeque<(Request, usize)>,
    test: impl Fn(&Request) -> Result<Option<Sizes>, Code>,
) -> Result<Option<(usize, Sizes)>, Code> {
    let Some(&(request, message)) = posted.front() else { return Ok(None) };
    let done = test(&request)?;
    if done.is_some() {
        posted.pop_front();
    }
    Ok(done.map(|sizes| (message, sizes)))
}

/// Lets this process open nothing more for so long, and says so.
fn without_descriptors_for(so_long: Duration, mail: &Path) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit outlives the call.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    // Prepared while it still can be.
    std::fs::write(mail.join(".limited"), b"").expect("the mailbox can be written");
    let highest = super::descriptors().last().map_or(3, |(number, _)| *number);
    let none = libc::rlimit { rlim_cur: u64::try_from(highest).expect("a number") + 1, ..limit };
    // What is free below is taken.
    // SAFETY: duplicates of standard error, kept until the process ends.
    while unsafe { libc::dup(2) } < highest {}
    // SAFETY: the limit outlives the call.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) };
    std::fs::rename(mail.join(".limited"), mail.join("limited")).expect("the mailbox can be written");
    std::thread::spawn(move || {
        std::thread::sleep(so_long);
        // SAFETY: as above.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    });
}

/// A running job, as the test sees it.
pub struct Job {
    mail: Mailbox,
    ranks: [Guarded; 2],
    killed: [bool; 2],
    /// When things went wrong.
    pub fault: f64,
    over: f64,
}

impl Job {
    /// Starts both ranks, which wait for [`Job::open`] when they listen.
    pub fn start(test: &str, library: &Path, hosts: &(Namespace, Namespace), variables: &[(&str, &str)]) -> Self {
        let mail = Mailbox::new();
        let start = |host: &Namespace, role: &str| {
            let mut command = host.command(test, role);
            command.env("NCCL_SOCKET_IFNAME", "rail").env("TOWLINE_RAILS", "all").env("TOWLINE_STREAMS", "3");
            command.envs(variables.iter().copied()).env(LIBRARY, library).env(child::MAILBOX, mail.path());
            Guarded::start(command)
        };
        let ranks = [start(&hosts.0, "rank-0"), start(&hosts.1, "rank-1")];
        let job = Self { mail, ranks, killed: [false; 2], fault: now(), over: 0.0 };
        job.wait_for("handles-0");
        job.wait_for("handles-1");
        job
    }

    /// Lets them connect.
    pub fn open(&mut self) {
        self.tell("open");
        self.fault = now();
    }

    /// Waits until both have made some steps.
    pub fn warm(&self) {
        self.wait_for("warm-0");
        self.wait_for("warm-1");
    }

    pub fn wait_for(&self, name: &str) {
        eventually(name, SOON, || self.mail.path().join(name).exists().then_some(()));
    }

    pub fn tell(&self, name: &str) {
        child::send(self.mail.path(), name, b"");
    }

    /// Where processes of the test may leave messages.
    pub fn mail(&self) -> &Path {
        self.mail.path()
    }

    /// Something goes wrong now.
    pub fn fault(&mut self, what: impl FnOnce(&Self)) {
        self.fault = now();
        what(self);
    }

    pub fn signal(&self, rank: usize, signal: i32) {
        ends::signal(&self.ranks[rank], signal);
    }

    pub fn kill(&mut self, rank: usize) {
        self.fault = now();
        self.ranks[rank].kill();
        self.killed[rank] = true;
    }

    /// Looks on for at most so long, or until each rank has ended.
    pub fn watch(&mut self, seconds: f64) {
        let until = now() + seconds;
        let ended = |rank: usize| self.killed[rank] || self.mail.path().join(format!("report-{rank}")).exists();
        while now() < until && !(ended(0) && ended(1)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.over = now();
    }

    /// What the ranks that live say; none from one that is stuck in a call.
    pub fn reports(mut self) -> Outcome {
        self.tell("over");
        let patience = now() + 20.0;
        let reports = [0, 1].map(|rank| {
            let path = self.mail.path().join(format!("report-{rank}"));
            while !self.killed[rank] && now() < patience && !path.exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
            std::fs::read_to_string(&path).ok().map(|text| Report::read(&text))
        });
        self.tell("end");
        if let Ok(child) = std::fs::read_to_string(self.mail.path().join("forked")) {
            let child = child.parse().expect("a number");
            // SAFETY: the child that rank 1 forked for this test.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        for rank in &mut self.ranks {
            let _ = rank.passed_within(Duration::from_secs(2));
        }
        Outcome::of(&reports, self.killed, self.fault, self.over)
    }
}

/// What became of the job. Times are in seconds, and since the fault.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// It goes on: the longest step, and the rate each way in Mbit/s.
    GoesOn { longest: f64, mbit: f64 },
    /// It came up after the fault, so much later, and goes on.
    Connects { after: f64, longest: f64 },
    /// A rank was told to abort, and its closes took so long; the other heard of it so long after the fault.
    Aborted { took: f64, told: Option<f64> },
    /// A call failed with a code; `all`: on each rank that lives.
    Ends { error: String, after: f64, all: bool },
    /// Nothing had moved for so long when the test lost patience.
    Hangs(f64),
    /// So many messages arrived with wrong bytes.
    Wrong(usize),
    /// A call did not return.
    Stuck,
}

impl Outcome {
    fn of(reports: &[Option<Report>; 2], killed: [bool; 2], fault: f64, over: f64) -> Self {
        let living = || [0, 1].into_iter().filter(|&rank| !killed[rank]);
        if living().any(|rank| reports[rank].is_none()) {
            return Self::Stuck;
        }
        let all: Vec<&Report> = living().filter_map(|rank| reports[rank].as_ref()).collect();
        let most = |of: &dyn Fn(&Report) -> f64| all.iter().map(|it| of(it)).fold(0.0, f64::max);
        let wrong = all.iter().map(|it| it.wrong).sum();
        if wrong > 0 {
            return Self::Wrong(wrong);
        }
        let failed = || all.iter().filter(|it| it.error.is_some());
        let first = failed().min_by(|a, b| a.at.total_cmp(&b.at));
        if let Some(took) = all.iter().find_map(|it| it.closed) {
            return Self::Aborted { took, told: first.map(|it| it.at - fault) };
        }
        if let Some(report) = first {
            let error = report.error.clone().unwrap_or_default();
            return Self::Ends { error, after: report.at - fault, all: failed().count() == all.len() };
        }
        // A step takes a fraction of a second, or two or three; one that is under way when the test ends says nothing.
        let stands = most(&|it| if it.up.is_some() { over - it.last } else { over - fault });
        let (longest, up) = (most(&|it| it.longest), most(&|it| it.up.unwrap_or(0.0)));
        if stands > 8.0 {
            Self::Hangs(stands)
        } else if up > fault {
            Self::Connects { after: up - fault, longest }
        } else {
            let rate = |it: &Report| it.bytes as f64 * 8.0 / 1e6 / (it.at - it.warm);
            Self::GoesOn { longest, mbit: most(&rate) }
        }
    }
}
