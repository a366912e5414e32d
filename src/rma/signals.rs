//! Signals: numbers in registered memory that other ranks add to.
//!
//! In host memory the processor adds. In a GPU's memory only copies can, so the sum is made here and written: of a copy that is
//! kept here where NCCL promises that nothing else writes the number, else of what is read before. Only one number is read at a
//! time, so that no other addition comes between.

use std::collections::HashMap;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::gpu::{Gpu, Mark};
use super::registry::Registry;
use super::wire::Signal;
use crate::os::error::Result;

/// How far an addition is.
pub(crate) enum Step {
    /// Not begun.
    New,
    /// The number is read when this mark is reached. While the token lives no other is.
    Read(Mark, #[allow(dead_code, reason = "held until it is dropped")] Arc<()>),
    /// The sum is written, or will be when this mark is reached.
    Written(Option<Mark>),
}

/// What a group knows of its signals. The placer alone uses it.
#[derive(Default)]
pub(crate) struct Signals {
    /// Sums, by registration and place.
    kept: HashMap<(u32, u64), u64>,
    reading: Arc<()>,
}

impl Signals {
    /// Takes the next step of an addition.
    ///
    /// # Errors
    /// When its place is not inside its registration, or the GPU has failed.
    pub(crate) fn advance(&mut self, registry: &Registry, signal: &Signal, step: &mut Step) -> Result<()> {
        match step {
            Step::New => {
                let place = registry.locate_signal(signal)?;
                let Some(gpu) = &place.gpu else {
                    add_in_host_memory(place.address, signal.value);
                    *step = Step::Written(None);
                    return Ok(());
                };
                if place.only_ours {
                    let sum = self.kept.entry((signal.region, signal.offset)).or_insert(0);
                    *sum = sum.wrapping_add(signal.value);
                    *step = write(gpu, place.address, *sum)?;
                } else if Arc::strong_count(&self.reading) == 1 {
                    // SAFETY: inside registered memory of this GPU, a multiple of 8. It stays registered until the placer has
                    // seen the stream come this far.
                    let mark = unsafe { gpu.read(place.address) }?;
                    *step = Step::Read(mark, Arc::clone(&self.reading));
                }
            }
            Step::Read(mark, _) => {
                if mark.is_reached()? {
                    let sum = mark.gpu.number_read().wrapping_add(signal.value);
                    // A registration that has ended since takes no signal any more.
                    *step = match registry.locate_signal(signal) {
                        Ok(place) => write(&mark.gpu, place.address, sum)?,
                        Err(_) => Step::Written(None),
                    };
                }
            }
            Step::Written(_) => {}
        }
        Ok(())
    }

    /// A registration has ended.
    pub(crate) fn forget(&mut self, region: u32) {
        self.kept.retain(|(of, _), _| *of != region);
    }
}

fn write(gpu: &Arc<Gpu>, address: usize, sum: u64) -> Result<Step> {
    // SAFETY: inside registered memory of this GPU, a multiple of 8. It stays registered until the placer has seen the stream
    // come this far.
    let mark = unsafe { gpu.write(address, sum) }?;
    Ok(Step::Written(Some(mark)))
}

fn add_in_host_memory(address: usize, value: u64) {
    // SAFETY: the address is a multiple of 8 and lies, with the 7 bytes behind it, inside registered host memory, which stays
    // valid while it is registered; the placer, which calls this, also ends registrations. NCCL and GPUs use signals
    // atomically, too.
    let number = unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address)) };
    // What was placed before becomes visible before the signal.
    number.fetch_add(value, Ordering::AcqRel);
}
