//! The side of all-reduce that the user started: ranks, handles, batches, table.
//!
//! Guarantees: when a rank dies or gives up, the others are ended and the message names the rank and the reason.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::os::error::{Error, Result};

use super::super::Verdict;
use super::super::channel::Channel;
use super::super::children::{Child, describe};
use super::super::output::{Output, check_json};
use super::super::size::{Size, check_memory};
use super::super::stats::mean;
use super::Options;
use super::protocol::{Batch, FromRank, Measured, ToRank};
use super::report::{Outcome, Report};

/// The memory that the buffers of one batch fill per rank and direction, unless one all-reduce alone needs more. Small
/// sizes run back to back as in nccl-tests, and large ones are verified before memory runs out. 32 MiB.
const BATCH_BYTES: usize = 32 << 20;

/// After the first sign of trouble, how long to wait for the signs that explain it.
const GATHERING: Duration = Duration::from_millis(500);

/// How long a process may take from closing its sockets to its end; writing a core file takes time.
const DYING: Duration = Duration::from_secs(5);

/// Runs the subcommand.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let counts = options.counts().map_err(Error::argument)?;
    // Inputs and outputs of the largest, on every rank.
    let buffers = 2 * usize::from(options.ranks) * size_of::<f32>();
    check_memory(counts.iter().max().and_then(|largest| largest.checked_mul(buffers)))?;
    check_json(options.json.as_deref())?;
    let mut output = Output::with_json(options.json.as_deref());
    output.progress(|| format!("starting {} ranks", options.ranks));
    let mut ranks = Ranks::start(options.ranks.into(), &options.wrap)?;
    output.progress(|| format!("connecting {} ranks", options.ranks));
    let facts = ranks.set_up(options)?;
    let mut report = Report::new(options, facts);
    report.begin(&mut output, &ranks.process_ids());
    let mut iteration = 0;
    for count in counts {
        let mut outcomes = [Outcome::default(); 2];
        for (outcome, in_place) in outcomes.iter_mut().zip([false, true]) {
            *outcome = ranks.measure(options, count, in_place, &mut iteration, &mut output)?;
        }
        report.row(&mut output, count, outcomes);
    }
    ranks.quit()?;
    report.finish(&mut output)
}

struct Ranks {
    children: Vec<Child>,
    channels: Vec<Channel>,
    events: Receiver<(usize, Result<FromRank>)>,
    /// From `Quit` on, a rank that has answered may go away.
    closing: bool,
}

impl Ranks {
    fn start(count: usize, wrappers: &[String]) -> Result<Self> {
        let (sender, events) = channel();
        let (mut children, mut channels) = (Vec::new(), Vec::new());
        for rank in 0..count {
            let wrapper = wrappers.get(rank % wrappers.len().max(1)).map(String::as_str);
            let (child, channel) = Child::start("rank", &format!("rank {rank}"), wrapper)?;
            listen_to(rank, channel.receiving_half()?, sender.clone())?;
            children.push(child);
            channels.push(channel);
        }
        Ok(Self { children, channels, events, closing: false })
    }

    fn process_ids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// Opens the plugin everywhere and closes the ring.
    fn set_up(&mut self, options: &Options) -> Result<Vec<super::super::plugin_options::PluginFacts>> {
        let (ranks, timeout_s) = (self.channels.len(), options.timeout);
        let plugin = options.plugin.choice().with_gpu(&options.gpu);
        for rank in 0..ranks {
            let late_ms = options.late.filter(|(late, _)| usize::from(*late) == rank).map_or(0, |(_, ms)| ms);
            self.tell(rank, &ToRank::SetUp { rank, ranks, plugin: plugin.clone(), timeout_s, late_ms })?;
        }
        let answers = self.gather("opening the plugin", |message| match message {
            FromRank::Listening { handle, facts } => Some((handle, facts)),
            _ => None,
        })?;
        let (handles, facts): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
        for rank in 0..ranks {
            self.tell(rank, &ToRank::Connect { handle: handles[(rank + 1) % ranks].clone() })?;
        }
        self.gather("connecting", |message| matches!(message, FromRank::Connected).then_some(()))?;
        Ok(facts)
    }

    /// Warms up and measures one size in one mode.
    fn measure(
        &mut self,
        options: &Options,
        count: usize,
        in_place: bool,
        iteration: &mut u32,
        output: &mut Output,
    ) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let mut seconds = 0.0;
        let at_once = (BATCH_BYTES / (count * size_of::<f32>())).clamp(1, 1 << 16) as u32;
        for (timed, wanted) in [(false, options.warmup), (true, options.iterations)] {
            let mut left = wanted;
            while left > 0 {
                let iterations = left.min(at_once);
                output.progress(|| {
                    let place = if in_place { "in place" } else { "out of place" };
                    let what = if timed { "" } else { " (warm-up)" };
                    let done = wanted - left;
                    format!("{} {place}: {done} of {wanted}{what}", Size(count * size_of::<f32>()))
                });
                let batch = Batch { count, iterations, first_iteration: *iteration, in_place };
                let (time, wrong) = self.run(&batch)?;
                outcome.wrong += wrong;
                if timed {
                    seconds += time;
                }
                *iteration = iteration.wrapping_add(iterations);
                left -= iterations;
            }
        }
        outcome.seconds = seconds / f64::from(options.iterations);
        Ok(outcome)
    }

    /// One batch: the mean time over the ranks, as nccl-tests reports it, and the wrong elements of all.
    fn run(&mut self, batch: &Batch) -> Result<(f64, usize)> {
        self.tell_all(&ToRank::Prepare(*batch))?;
        self.gather("preparing data", |message| matches!(message, FromRank::Prepared).then_some(()))?;
        self.tell_all(&ToRank::Go)?;
        let measured = self.gather("the all-reduce", |message| match message {
            FromRank::Measured(measured) => Some(measured),
            _ => None,
        })?;
        let seconds: Vec<f64> = measured.iter().map(|m: &Measured| m.seconds).collect();
        Ok((mean(&seconds), measured.iter().map(|m| m.wrong).sum()))
    }

    fn quit(&mut self) -> Result<()> {
        self.tell_all(&ToRank::Quit)?;
        self.closing = true;
        self.gather("closing", |message| matches!(message, FromRank::Closed).then_some(()))?;
        for (rank, child) in self.children.iter_mut().enumerate() {
            match child.wait() {
                Some(ending) if !ending.success() => {
                    let what = format!("rank {rank} {} after its work was done", describe(ending));
                    return Err(Error::remote(what).with_hint("the plugin fails while it is being closed"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn tell_all(&mut self, message: &ToRank) -> Result<()> {
        (0..self.channels.len()).try_for_each(|rank| self.tell(rank, message))
    }

    fn tell(&mut self, rank: usize, message: &ToRank) -> Result<()> {
        let told = self.channels[rank].send(message);
        told.map_err(|error| self.explain("telling the ranks", Failure::WentAway { rank, error }))
    }

    /// One answer from every rank, in the order of the ranks.
    fn gather<T>(&mut self, doing: &str, wanted: impl Fn(FromRank) -> Option<T>) -> Result<Vec<T>> {
        let mut answers: Vec<Option<T>> = (0..self.channels.len()).map(|_| None).collect();
        while answers.iter().any(Option::is_none) {
            let (rank, message) = self.events.recv().map_err(|_| Error::internal("no rank is connected any more"))?;
            let failure = match message {
                Ok(FromRank::Failed { error }) => Failure::Told { rank, error },
                Err(_) if self.closing && answers[rank].is_some() => continue,
                Err(error) => Failure::WentAway { rank, error },
                Ok(other) => match wanted(other) {
                    Some(answer) => {
                        answers[rank] = Some(answer);
                        continue;
                    }
                    None => Failure::Told { rank, error: "it answered out of order".to_owned() },
                },
            };
            return Err(self.explain(doing, failure));
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// What went wrong, from the first failure and those that follow: a death explains its neighbours' complaints, not
    /// the other way round.
    fn explain(&mut self, doing: &str, first: Failure) -> Error {
        let mut failures = vec![first];
        let deadline = Instant::now() + GATHERING;
        loop {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((rank, Ok(FromRank::Failed { error }))) => failures.push(Failure::Told { rank, error }),
                Ok((rank, Err(error))) => failures.push(Failure::WentAway { rank, error }),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        let told =
            |rank| failures.iter().any(|failure| matches!(failure, Failure::Told { rank: who, .. } if *who == rank));
        // A rank that went away without a word died. Its sockets close a little before it can be reaped.
        let silent = failures.iter().filter_map(|failure| match failure {
            Failure::WentAway { rank, .. } => Some(*rank).filter(|&rank| !told(rank)),
            Failure::Told { .. } => None,
        });
        for rank in silent {
            if let Some(ending) = self.children[rank].ending_within(DYING) {
                return Error::remote(format!("rank {rank} {} during {doing}", describe(ending)));
            }
        }
        match &failures[0] {
            Failure::Told { rank, error } => Error::remote(format!("rank {rank}, {doing}: {error}")),
            Failure::WentAway { rank, error } => Error::remote(format!("rank {rank}, {doing}: {error}")),
        }
    }
}

/// A sign of trouble.
enum Failure {
    /// The rank reported an error.
    Told { rank: usize, error: String },
    /// Its channel ended.
    WentAway { rank: usize, error: Error },
}

fn listen_to(rank: usize, mut channel: Channel, events: Sender<(usize, Result<FromRank>)>) -> Result<()> {
    let listening = move || {
        loop {
            let message = channel.receive();
            let is_last = message.is_err();
            if events.send((rank, message)).is_err() || is_last {
                return;
            }
        }
    };
    let started = thread::Builder::new().name(format!("rank {rank}")).spawn(listening);
    started.map(|_| ()).map_err(|error| Error::system("starting a thread", &error))
}
