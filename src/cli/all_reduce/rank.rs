//! One rank: a process that opens the plugin, joins the ring and runs batches on request.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::host::profiler::Profiler;
use crate::host::{Handle, Init};
use crate::os::error::{Error, Result};

use super::super::buffer::Place;
use super::super::channel::Channel;
use super::super::children::channel_to_parent;
use super::super::host_link::{HostLink, connect, until_patience_ends};
use super::super::plugin_options::PluginFacts;
use super::super::proxy::Proxy;
use super::super::ring::program::{Step, all_reduce};
use super::super::ring::{Buffers, CHUNK_ELEMENTS, Ring, pattern};
use super::super::{EXIT_FAILED, plugin_options::PluginChoice};
use super::protocol::{Batch, FromRank, Measured, ToRank};

/// The elements of the all-reduce that aligns the ranks before a batch.
const ALIGNING_COUNT: usize = 2;

/// The hidden subcommand.
pub(crate) fn run() -> ExitCode {
    let mut channel = match channel_to_parent() {
        Ok(channel) => channel,
        Err(error) => {
            eprintln!("towline: {error}");
            return ExitCode::from(EXIT_FAILED);
        }
    };
    match serve(&mut channel) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // When the parent is gone too, there is no process left to notify.
            let _ = channel.send(&FromRank::Failed { error: error.to_string() });
            ExitCode::from(EXIT_FAILED)
        }
    }
}

fn serve(channel: &mut Channel) -> Result<()> {
    let ToRank::SetUp { rank, ranks, plugin, timeout_s, late_ms } = channel.receive()? else {
        return Err(out_of_order());
    };
    let ring = join(channel, &plugin, (rank, ranks), timeout_s)?;
    let late = Duration::from_millis(late_ms.into());
    let mut worker = Worker { rank, ranks, late, ring, arena: Arena::default() };
    loop {
        match channel.receive()? {
            ToRank::Prepare(batch) => {
                worker.arena.fill(&batch, rank);
                channel.send(&FromRank::Prepared)?;
                let ToRank::Go = channel.receive()? else { return Err(out_of_order()) };
                channel.send(&FromRank::Measured(worker.run(&batch)?))?;
            }
            ToRank::Quit => {
                worker.ring.into_link().close()?;
                return channel.send(&FromRank::Closed);
            }
            _ => return Err(out_of_order()),
        }
    }
}

fn out_of_order() -> Error {
    Error::internal("the coordinator's messages came out of order")
}

/// Opens the plugin and takes the place in the ring.
fn join(
    channel: &mut Channel,
    choice: &PluginChoice,
    (rank, ranks): (usize, usize),
    timeout_s: u32,
) -> Result<Ring<HostLink>> {
    let patience = Duration::from_secs(timeout_s.into());
    let net = choice.open()?;
    let initialising = |code: crate::host::Code| code.while_doing(format!("initialising {}", net.name()));
    // The same for all ranks, and another in each run on this host.
    let comm_id = u64::from(std::os::unix::process::parent_id());
    let profiler = Profiler::start(net.plugin(), comm_id, c"towline all-reduce", ranks, rank);
    let mut init = Init { comm_id, ..Init::default() };
    if profiler.is_some() {
        init.profiler = Profiler::callback();
    }
    let context = net.init_with(&init).map_err(initialising)?;
    let facts = PluginFacts::of(&context, choice)?;
    let place = Place::choose(choice.gpu, &context, choice.device)?;
    let (listener, handle) = context.listen(choice.device).map_err(|code| code.while_doing("listening"))?;
    channel.send(&FromRank::Listening { handle: handle.bytes().to_vec(), facts })?;
    let ToRank::Connect { handle } = channel.receive()? else { return Err(out_of_order()) };
    let mut handle = Handle::from_bytes(&handle);
    let (send, receive) = connect(&context, (choice.device, &mut handle), &listener, until_patience_ends(patience))?;
    listener.close().map_err(|code| code.while_doing("closing the listener"))?;
    channel.send(&FromRank::Connected)?;
    Ok(Ring::new(HostLink::new((send, receive), &place, Proxy::new(profiler, rank, ranks), patience)?))
}

struct Worker {
    rank: usize,
    ranks: usize,
    /// How late this rank comes to each timed all-reduce, on purpose.
    late: Duration,
    ring: Ring<HostLink>,
    arena: Arena,
}

impl Worker {
    fn run(&mut self, batch: &Batch) -> Result<Measured> {
        let mut wrong = self.align(batch.first_iteration)?;
        let program = self.program(batch.count);
        let start = Instant::now();
        for index in 0..batch.iterations as usize {
            if !self.late.is_zero() {
                std::thread::sleep(self.late);
            }
            self.ring.link_mut().begin(&program, batch.count);
            self.ring.run(&program, self.arena.buffers(batch, index))?;
        }
        let seconds = start.elapsed().as_secs_f64();
        self.ring.drain()?;
        self.ring.link_mut().proxy.finish();
        wrong += self.arena.count_wrong(batch, self.ranks);
        Ok(Measured { seconds, wrong })
    }

    /// A small all-reduce that lets the ranks begin together: their processes wake up at different times.
    fn align(&mut self, iteration: u32) -> Result<usize> {
        let mut both = [0.0; ALIGNING_COUNT];
        pattern::fill(&mut both, self.rank, iteration);
        let program = self.program(ALIGNING_COUNT);
        self.ring.link_mut().begin(&program, ALIGNING_COUNT);
        self.ring.run(&program, Buffers::InPlace(&mut both))?;
        Ok(pattern::count_wrong(&both, self.ranks, iteration))
    }

    fn program(&self, count: usize) -> Vec<Step> {
        all_reduce(self.rank, self.ranks, count, CHUNK_ELEMENTS)
    }
}

/// Inputs and outputs of a batch, one behind the other.
#[derive(Default)]
struct Arena {
    input: Vec<f32>,
    output: Vec<f32>,
}

impl Arena {
    fn fill(&mut self, batch: &Batch, rank: usize) {
        let total = batch.count * batch.iterations as usize;
        let (input, output) = (&mut self.input, &mut self.output);
        // Outputs hold NaN before, which no sum is.
        output.clear();
        output.resize(total, f32::NAN);
        if !batch.in_place {
            input.resize(total, 0.0);
        }
        let filled = if batch.in_place { output } else { input };
        for (iteration, part) in (batch.first_iteration..).zip(filled.chunks_mut(batch.count)) {
            pattern::fill(part, rank, iteration);
        }
    }

    fn buffers(&mut self, batch: &Batch, index: usize) -> Buffers<'_> {
        let elements = index * batch.count..(index + 1) * batch.count;
        let output = &mut self.output[elements.clone()];
        if batch.in_place {
            Buffers::InPlace(output)
        } else {
            Buffers::OutOfPlace { input: &self.input[elements], output }
        }
    }

    fn count_wrong(&self, batch: &Batch, ranks: usize) -> usize {
        (batch.first_iteration..)
            .zip(self.output.chunks(batch.count))
            .map(|(iteration, part)| pattern::count_wrong(part, ranks, iteration))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_all_reduce_that_never_ran_is_wrong_everywhere() {
        for in_place in [false, true] {
            let batch = Batch { count: 100, iterations: 3, first_iteration: 7, in_place };
            let mut arena = Arena::default();
            arena.fill(&batch, 1);
            assert_eq!(arena.count_wrong(&batch, 2), 300, "in place: {in_place}");
        }
    }
}
