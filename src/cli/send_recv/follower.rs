//! The side that follows orders: a child process, or `--listen` on another host.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::process::ExitCode;
use std::time::Duration;

use crate::os::error::{Error, Result};

use super::super::channel::Channel;
use super::super::children::channel_to_parent;
use super::super::plugin_options::PluginChoice;
use super::super::{EXIT_FAILED, Verdict};
use super::net::{NetMover, Opened};
use super::protocol::{Answer, Order, Way};
use super::raw_tcp::{TcpMover, Waiting};
use super::watch::Watch;
use super::{Job, Mover, Side, memory};

/// How long a peer that connected may take to say hello.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);

/// The hidden subcommand of the child process.
pub(crate) fn run_peer() -> ExitCode {
    let followed = channel_to_parent().and_then(|mut channel| {
        let met = Follower::meet(&mut channel, None, Ipv4Addr::LOCALHOST.into());
        follow(channel, met)
    });
    match followed {
        Ok(_) => ExitCode::SUCCESS,
        // The leader was notified, and reports it.
        Err(_) => ExitCode::from(EXIT_FAILED),
    }
}

/// Waits for a leader from another host, and follows it.
pub(super) fn listen(address: &str, choice: &PluginChoice) -> Result<Verdict> {
    let listening = |error| Error::system(format!("listening on {address}"), &error);
    let listener = TcpListener::bind(address).map_err(listening)?;
    eprintln!("towline: waiting on {}", listener.local_addr().map_err(listening)?);
    loop {
        let (socket, from) = listener.accept().map_err(listening)?;
        socket.set_nodelay(true).map_err(listening)?;
        let local = socket.local_addr().map_err(listening)?.ip();
        let mut channel = Channel::tcp(socket, from.to_string());
        match Follower::meet(&mut channel, Some(choice.clone()), local) {
            Ok(follower) => {
                eprintln!("towline: following {from}");
                drop(listener);
                return follow(channel, Ok(follower));
            }
            // Another program, or another version: it is notified, and this side keeps waiting for the leader.
            Err(error) => {
                eprintln!("towline: {error}");
                let _ = channel.send(&Answer::Failed { error: error.to_string() });
            }
        }
    }
}

/// Follows until the leader quits. Failures are reported to the leader.
fn follow(mut channel: Channel, met: Result<Follower>) -> Result<Verdict> {
    let outcome = met.and_then(|follower| follower.serve(&mut channel));
    if let Err(error) = &outcome {
        // When the leader is gone too, there is no process left to notify.
        let _ = channel.send(&Answer::Failed { error: error.to_string() });
    }
    outcome
}

struct Follower {
    /// This side's own choice of plugin, when the leader does not decide.
    own: Option<PluginChoice>,
    address: IpAddr,
    memory_bytes: usize,
    patience: Duration,
    plugin: Option<NetMover>,
    raw_tcp: Option<TcpMover>,
}

impl Follower {
    fn meet(channel: &mut Channel, own: Option<PluginChoice>, address: IpAddr) -> Result<Self> {
        // A stranger that connects and sends nothing must not block this side for ever.
        channel.set_patience(Some(HELLO_PATIENCE))?;
        let Order::Hello { version, memory_bytes, timeout_s } = channel.receive()? else {
            return Err(Error::remote("it did not say hello").with_peer(channel.peer()));
        };
        let ours = env!("CARGO_PKG_VERSION");
        if version != ours {
            return Err(Error::usage(format!("the two sides have different versions: {ours} and {version}")));
        }
        channel.set_patience(None)?;
        channel.send(&Answer::Welcome { version: ours.to_owned() })?;
        let patience = Duration::from_secs(timeout_s.into());
        Ok(Self { own, address, memory_bytes, patience, plugin: None, raw_tcp: None })
    }

    fn serve(mut self, channel: &mut Channel) -> Result<Verdict> {
        let mut verdict = Verdict::Good;
        loop {
            match channel.receive()? {
                Order::Hello { .. } => return Err(Error::remote("it said hello twice")),
                Order::OpenPlugin { choice, handle } => {
                    let choice = self.own.clone().or(choice).ok_or_else(|| Error::remote("no plugin was named"))?;
                    let opened = Opened::open(&choice)?;
                    channel.send(&Answer::Opened {
                        handle: opened.handle.bytes().to_vec(),
                        facts: opened.facts.clone(),
                        max_outstanding: opened.max_outstanding(),
                    })?;
                    let mut watch = Watch::new(channel, self.patience);
                    self.plugin = Some(opened.connect(&handle, self.memory_bytes, &mut watch)?);
                }
                Order::OpenRawTcp { sockets } => {
                    let waiting = Waiting::on(self.address)?;
                    channel.send(&Answer::Listening { port: waiting.port()? })?;
                    self.raw_tcp = Some(waiting.accept(sockets, self.memory_bytes, self.patience)?);
                }
                Order::Stream { way, job, verify } => {
                    let wrong = self.stream(channel, way, &job, verify)?;
                    if verify {
                        channel.send(&Answer::Checked { wrong })?;
                    }
                    if wrong > 0 {
                        verdict = Verdict::WrongData;
                    }
                }
                Order::PingPong { way, job } => {
                    self.check(&job, 2)?;
                    let patience = self.patience;
                    channel.send(&Answer::Ready)?;
                    let watch = &mut Watch::new(channel, patience);
                    self.mover(way)?.ping_pong(Side::Follower, &job, &mut Vec::new(), watch)?;
                }
                Order::Quit => {
                    self.plugin.take().map_or(Ok(()), NetMover::close)?;
                    channel.send(&Answer::Closed)?;
                    return Ok(verdict);
                }
            }
        }
    }

    fn stream(&mut self, channel: &mut Channel, way: Way, job: &Job, verify: bool) -> Result<usize> {
        self.check(job, job.outstanding)?;
        let patience = self.patience;
        let mover = self.mover(way)?;
        if verify {
            mover.memory().fill(0);
            mover.upload(job.size * job.count)?;
        }
        channel.send(&Answer::Ready)?;
        mover.stream(Side::Follower, job, &mut Watch::new(channel, patience))?;
        if !verify {
            return Ok(0);
        }
        mover.download(job.size * job.count)?;
        Ok(memory::count_wrong(mover.memory(), job.size, job.count))
    }

    /// A job comes from another host: it must fit the memory.
    fn check(&self, job: &Job, messages: usize) -> Result<()> {
        let needed = job.size.checked_mul(messages);
        if job.outstanding > 0 && needed.is_some_and(|needed| needed <= self.memory_bytes) {
            Ok(())
        } else {
            Err(Error::remote("it asks for more memory than it said"))
        }
    }

    fn mover(&mut self, way: Way) -> Result<&mut dyn Mover> {
        let mover: Option<&mut dyn Mover> = match way {
            Way::Plugin => self.plugin.as_mut().map(|mover| mover as _),
            Way::RawTcp => self.raw_tcp.as_mut().map(|mover| mover as _),
        };
        mover.ok_or_else(|| Error::remote("it asks for what was not opened"))
    }
}
