//! Signals: numbers in registered memory that other ranks add to.
//!
//! In host memory the processor adds. In a GPU's memory only copies can write, so the sum is made here and written. Its
//! base is a copy that is kept here where NCCL promises that nothing else writes the number. Otherwise the number is
//! read before. A group reads one number at a time, and other groups of the process wait for their turn at it
//! ([`Turns`]), so that no other addition comes between.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{mem, ptr};

use super::gpu::{Gpu, Mark};
use super::registry::{Registry, Spot};
use super::turns::{Turn, Turns};
use super::wire::Signal;
use crate::os::error::Result;

/// The progress of an addition.
pub(crate) enum Step {
    /// The addition has not begun.
    New,
    /// Another group may have its turn at the number.
    Waits(Turn),
    /// The number is read when this mark is reached. While the token exists no other number is read.
    Read(Mark, Turn, #[allow(dead_code, reason = "held until it is dropped")] Arc<()>),
    /// The sum will be written when the mark is reached, and then the turn ends; None once it is written.
    Written(Option<Mark>, Option<Turn>),
}

impl Step {
    /// Nothing is left to do.
    pub(crate) const DONE: Self = Self::Written(None, None);
}

/// A group's data about its signals. Only the placer uses it.
#[derive(Default)]
pub(crate) struct Signals {
    /// Sums, by registration and place.
    kept: HashMap<(u32, u64), u64>,
    reading: Arc<()>,
    turns: Arc<Turns>,
}

impl Signals {
    /// The signals of a group whose process has these turns.
    pub(crate) fn of(turns: Arc<Turns>) -> Self {
        Self { turns, ..Self::default() }
    }

    /// Takes the next step of an addition.
    ///
    /// # Errors
    /// When its place is not inside its registration, or the GPU has failed.
    pub(crate) fn advance(&mut self, registry: &Registry, signal: &Signal, step: &mut Step) -> Result<()> {
        if matches!(step, Step::New) {
            let place = registry.locate_signal(signal)?;
            *step = match &place.gpu {
                None => {
                    add_in_host_memory(place.address, signal.value);
                    Step::DONE
                }
                Some(gpu) if place.only_ours => {
                    let sum = self.kept.entry((signal.region, signal.offset)).or_insert(0);
                    *sum = sum.wrapping_add(signal.value);
                    Step::Written(Some(write(gpu, place.address, *sum)?), None)
                }
                Some(gpu) => Step::Waits(self.turns.take(place.address, Arc::as_ptr(gpu).addr())),
            };
        }
        // If the GPU fails the step stays as it is. Its turn ends with it, not before the placer has waited for the
        // stream.
        match step {
            Step::Waits(turn) if Arc::strong_count(&self.reading) == 1 && turn.has_come() => {
                let mark = match registry.locate_signal(signal) {
                    // SAFETY: inside registered memory of this GPU, a multiple of 8. It stays registered until the
                    // placer has seen the stream come this far.
                    Ok(Spot { address, gpu: Some(gpu), .. }) => Some(unsafe { gpu.read(address) }?),
                    // A registration that has ended since accepts no signal any more.
                    _ => None,
                };
                *step = match (mark, mem::replace(step, Step::DONE)) {
                    (Some(mark), Step::Waits(turn)) => Step::Read(mark, turn, Arc::clone(&self.reading)),
                    _ => Step::DONE,
                };
            }
            Step::Read(mark, ..) if mark.is_reached()? => {
                let sum = mark.gpu.number_read().wrapping_add(signal.value);
                let place = registry.locate_signal(signal).ok();
                let written = place.map(|place| write(&mark.gpu, place.address, sum)).transpose()?;
                *step = match (written, mem::replace(step, Step::DONE)) {
                    (Some(mark), Step::Read(_, turn, _)) => Step::Written(Some(mark), Some(turn)),
                    _ => Step::DONE,
                };
            }
            _ => {}
        }
        Ok(())
    }

    /// A registration has ended.
    pub(crate) fn forget(&mut self, region: u32) {
        self.kept.retain(|(of, _), _| *of != region);
    }
}

fn write(gpu: &Arc<Gpu>, address: usize, sum: u64) -> Result<Mark> {
    // SAFETY: inside registered memory of this GPU, a multiple of 8. It stays registered until the placer has seen the
    // stream come this far.
    unsafe { gpu.write(address, sum) }
}

fn add_in_host_memory(address: usize, value: u64) {
    // SAFETY: the address is a multiple of 8 and lies, with the 7 bytes behind it, inside registered host memory. The
    // memory stays valid while it is registered, and the placer, which calls this, also ends registrations. NCCL and
    // GPUs use signals atomically, too.
    let number = unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address)) };
    // Bytes placed before become visible before the signal.
    number.fetch_add(value, Ordering::AcqRel);
}

#[cfg(test)]
mod tests {
    use super::super::cuda::simulation as gpu;
    use super::super::gpu::Gpus;
    use super::super::registry::Region;
    use super::*;

    /// Its number may still be written if another group has read it.
    #[test]
    fn a_turn_lasts_until_a_failed_signal_is_let_go() {
        gpu::begin(1, 0);
        let (gpus, registry, turns, numbers) = (Gpus::default(), Registry::default(), Arc::default(), [0_u64; 1]);
        let address = numbers.as_ptr().expose_provenance();
        let gpu = Some(gpus.found_by(gpu::driver(), address, 2).expect("a simulated GPU"));
        registry.add(Region { address, size: 8, gpu, only_ours: false }).expect("a registration");
        let (mut signals, signal) = (Signals::of(Arc::clone(&turns)), Signal { region: 1, offset: 0, value: 5 });
        let mut step = Step::New;
        while !matches!(step, Step::Read(..)) {
            signals.advance(&registry, &signal, &mut step).expect("nothing fails");
        }
        gpus.ask();
        gpu::records(0);
        assert!(signals.advance(&registry, &signal, &mut step).is_err());
        assert_eq!(gpu::waiting(), 1, "the write is on its way");
        let other = turns.take(address, 1);
        assert!(!other.has_come());
        gpus.settle();
        drop(step);
        assert!(other.has_come());
    }
}
