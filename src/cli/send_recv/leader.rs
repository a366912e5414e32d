//! The side that gives the orders, sends the data and holds the clock.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::os::error::{Error, Result};

use super::super::Verdict;
use super::super::channel::Channel;
use super::super::children::{Child, describe};
use super::super::output::Output;
use super::super::size::{Size, check_memory};
use super::net::{NetMover, Opened};
use super::protocol::{Answer, Order, Way};
use super::raw_tcp::TcpMover;
use super::report::{Report, Row, Samples};
use super::watch::Watch;
use super::{Job, Mover, Options, Side, memory};

/// The most that the buffers of one side may fill: 1 GiB, or two messages.
const MEMORY_BYTES: usize = 1 << 30;

/// Messages that the leader of a ping-pong keeps memory for when receives are posted well ahead: one to send, and three
/// of which the receives are posted.
const AHEAD: usize = 4;

/// The most messages in one measurement.
const MOST_MESSAGES: usize = 1 << 20;

/// Runs the subcommand as leader.
pub(super) fn run(options: &Options) -> Result<Verdict> {
    let sizes = options.sizes().map_err(Error::argument)?;
    let largest = sizes.last().map_or(0, |size| size.0);
    let mut leader = Leader::meet(options, largest)?;
    let outcome = leader.open(options).and_then(|report| leader.measure_all(options, &sizes, report));
    match outcome {
        Err(error) => Err(leader.explain(error)),
        good => good,
    }
}

struct Leader {
    /// The follower, when it is on this host.
    child: Option<Child>,
    channel: Channel,
    address: IpAddr,
    memory_bytes: usize,
    outstanding: usize,
    patience: Duration,
    plugin: Option<NetMover>,
    raw_tcp: Option<TcpMover>,
}

impl Leader {
    fn meet(options: &Options, largest: usize) -> Result<Self> {
        let outstanding = usize::from(options.outstanding);
        let least = if options.ahead { AHEAD } else { 2 };
        let memory_bytes = outstanding.saturating_mul(largest).min(MEMORY_BYTES).max(least.saturating_mul(largest));
        // On this side, and on the other one if it is on this host.
        let sides = if options.connect.is_some() { 1 } else { 2 };
        let ways = if options.compare { 2 } else { 1 };
        check_memory(memory_bytes.checked_mul(sides * ways))?;
        let patience = Duration::from_secs(options.timeout.into());
        let (child, channel, address) = match &options.connect {
            Some(address) => {
                let connecting = |error| Error::system(format!("connecting to {address}"), &error);
                let socket = TcpStream::connect(address.as_str()).map_err(connecting)?;
                socket.set_nodelay(true).map_err(connecting)?;
                let there = socket.peer_addr().map_err(connecting)?.ip();
                (None, Channel::tcp(socket, address), there)
            }
            None => {
                let (child, channel) = Child::start("peer", "the receiving process", None)?;
                (Some(child), channel, Ipv4Addr::LOCALHOST.into())
            }
        };
        Ok(Self { child, channel, address, memory_bytes, outstanding, patience, plugin: None, raw_tcp: None })
    }

    fn open(&mut self, options: &Options) -> Result<Report> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = Order::Hello { version, memory_bytes: self.memory_bytes, timeout_s: options.timeout };
        let Answer::Welcome { .. } = self.ask(&hello)? else { return Err(out_of_turn()) };
        let mut facts = Vec::new();
        if !options.raw_tcp {
            let choice = options.plugin.choice().with_gpu(&options.gpu);
            let opened = Opened::open(&choice)?;
            facts.push(opened.facts.clone());
            let handle = opened.handle.bytes().to_vec();
            let choice = options.connect.is_none().then_some(choice);
            let answer = self.ask(&Order::OpenPlugin { choice, handle })?;
            let Answer::Opened { handle, facts: theirs, max_outstanding } = answer else { return Err(out_of_turn()) };
            facts.push(theirs);
            self.outstanding = self.outstanding.min(max_outstanding).min(opened.max_outstanding());
            let mut watch = Watch::new(&mut self.channel, self.patience);
            self.plugin = Some(opened.connect(&handle, self.memory_bytes, &mut watch)?);
        }
        if options.raw_tcp || options.compare {
            let sockets = usize::from(options.sockets);
            let Answer::Listening { port } = self.ask(&Order::OpenRawTcp { sockets })? else {
                return Err(out_of_turn());
            };
            let to = SocketAddr::new(self.address, port);
            self.raw_tcp = Some(TcpMover::connect(to, sockets, self.memory_bytes, self.patience)?);
        }
        Ok(Report::new(options, self.outstanding, facts))
    }

    fn measure_all(&mut self, options: &Options, sizes: &[Size], mut report: Report) -> Result<Verdict> {
        let mut output = Output::with_json(options.json.as_deref());
        report.begin(&mut output);
        for &size in sizes {
            let row = self.measure(options, size, &mut output)?;
            report.row(&mut output, row);
        }
        let Answer::Closed = self.ask(&Order::Quit)? else { return Err(out_of_turn()) };
        self.plugin.take().map_or(Ok(()), NetMover::close)?;
        if let Some(ending) = self.child.as_mut().and_then(Child::wait).filter(|ending| !ending.success()) {
            let what = format!("the receiving process {} after its work was done", describe(ending));
            return Err(Error::remote(what).with_hint("the plugin fails while it is being closed"));
        }
        report.finish(&mut output)
    }

    /// Verifies and measures one size. The ways take turns, so that what else happens on the host hits them alike.
    fn measure(&mut self, options: &Options, size: Size, output: &mut Output) -> Result<Row> {
        let fitting = self.memory_bytes.checked_div(size.0).unwrap_or(self.outstanding);
        let outstanding = self.outstanding.min(fitting).max(1);
        let job = Job { size: size.0, count: outstanding, outstanding, ahead: options.ahead };
        let ways = [Way::Plugin, Way::RawTcp];
        let mut row = Row { size: size.0, outstanding, plugin: None, raw_tcp: None };
        let open = [self.plugin.is_some(), self.raw_tcp.is_some()];
        for (way, _) in ways.into_iter().zip(open).filter(|(_, is_open)| *is_open) {
            output.progress(|| format!("{size}: verifying"));
            let wrong = self.verify(way, &job)?;
            output.progress(|| format!("{size}: finding how many messages one measurement takes"));
            let messages = self.messages(way, &job, options)?;
            let turns = if options.bandwidth {
                0
            } else {
                let turns = Job { count: 4, ..job };
                let turn = self.ping_pong(way, &turns)?.iter().sum::<f64>() / turns.count as f64;
                Self::how_many(options, 2.0 * turn, 8)
            };
            let samples = Samples::new(wrong, messages, turns);
            *row.of(way) = Some(samples);
        }
        // The same number of messages both ways, so that the first messages and the last acknowledgement weigh the
        // same.
        let most = [&row.plugin, &row.raw_tcp].into_iter().flatten().map(|samples| samples.messages).max();
        for samples in [&mut row.plugin, &mut row.raw_tcp].into_iter().flatten() {
            samples.messages = most.unwrap_or(samples.messages);
        }
        for repetition in 0..options.repetitions {
            for way in ways {
                let Some(samples) = row.of(way).as_mut() else { continue };
                output.progress(|| format!("{size}: measurement {} of {}", repetition + 1, options.repetitions));
                let job = Job { count: samples.messages, ..job };
                samples.add_stream(size.0, job.count, self.stream(way, &job)?);
                if samples.turns > 0 {
                    let turns = Job { count: samples.turns, ..job };
                    samples.add_ping_pong(&self.ping_pong(way, &turns)?);
                }
            }
        }
        Ok(row)
    }

    /// How many messages make one measurement of bandwidth. The first of a connection are slow, over a long path by
    /// far, so runs get longer until one takes half of the wanted time. They also warm up.
    fn messages(&mut self, way: Way, job: &Job, options: &Options) -> Result<usize> {
        let mut job = *job;
        loop {
            let seconds = self.stream(way, &job)?;
            let wanted = Self::how_many(options, seconds / job.count as f64, job.outstanding);
            if options.iterations.is_some() || wanted <= 2 * job.count {
                return Ok(wanted);
            }
            job.count = wanted.min(8 * job.count);
        }
    }

    /// How many messages of `seconds` each make one measurement.
    fn how_many(options: &Options, seconds: f64, least: usize) -> usize {
        let wanted = f64::from(options.time) / 1e3 / seconds.max(1e-9);
        options.iterations.map_or((wanted as usize).clamp(least, MOST_MESSAGES), |count| count as usize)
    }

    /// Sends one message per buffer and has the follower count the wrong bytes.
    fn verify(&mut self, way: Way, job: &Job) -> Result<usize> {
        let (mover, _) = self.parts(way)?;
        memory::fill(mover.memory(), job.size, job.count);
        mover.upload(job.size * job.count)?;
        self.order_stream(way, job, true)?;
        match self.hear()? {
            Answer::Checked { wrong } => Ok(wrong),
            _ => Err(out_of_turn()),
        }
    }

    /// Moves messages; the seconds from the first send to the acknowledgement.
    fn stream(&mut self, way: Way, job: &Job) -> Result<f64> {
        self.order_stream(way, job, false)
    }

    fn order_stream(&mut self, way: Way, job: &Job, verify: bool) -> Result<f64> {
        let Answer::Ready = self.ask(&Order::Stream { way, job: *job, verify })? else { return Err(out_of_turn()) };
        let (mover, mut watch) = self.parts(way)?;
        let start = Instant::now();
        mover.stream(Side::Leader, job, &mut watch)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// One-way times in seconds.
    fn ping_pong(&mut self, way: Way, job: &Job) -> Result<Vec<f64>> {
        let Answer::Ready = self.ask(&Order::PingPong { way, job: *job })? else { return Err(out_of_turn()) };
        let (mover, mut watch) = self.parts(way)?;
        let mut samples = Vec::with_capacity(job.count);
        mover.ping_pong(Side::Leader, job, &mut samples, &mut watch)?;
        Ok(samples)
    }

    fn parts(&mut self, way: Way) -> Result<(&mut dyn Mover, Watch<'_>)> {
        let mover: Option<&mut dyn Mover> = match way {
            Way::Plugin => self.plugin.as_mut().map(|mover| mover as _),
            Way::RawTcp => self.raw_tcp.as_mut().map(|mover| mover as _),
        };
        let mover = mover.ok_or_else(|| Error::internal("this way was not opened"))?;
        Ok((mover, Watch::new(&mut self.channel, self.patience)))
    }

    fn ask(&mut self, order: &Order) -> Result<Answer> {
        self.channel.send(order)?;
        self.hear()
    }

    fn hear(&mut self) -> Result<Answer> {
        match self.channel.receive()? {
            Answer::Failed { error } => Err(Error::remote(error).with_peer(self.channel.peer())),
            answer => Ok(answer),
        }
    }

    /// When the follower has died, its death replaces `error`.
    fn explain(&mut self, error: Error) -> Error {
        // Its socket closes a little before it can be reaped.
        let patience = Duration::from_secs(if self.channel.is_closed() { 5 } else { 0 });
        match self.child.as_mut().and_then(|child| child.ending_within(patience)) {
            Some(ending) if ending.code() != Some(super::super::EXIT_FAILED.into()) => {
                Error::remote(format!("the receiving process {}", describe(ending)))
            }
            _ => error,
        }
    }
}

fn out_of_turn() -> Error {
    Error::remote("the other side sent an unexpected message")
}
