//! Operations that have arrived from one rank and are on their way into memory: copies to a GPU happen after they are
//! begun.
//!
//! Operations end in the order in which they arrived. A signal waits for all bytes before it, except
//! those whose copies are in the stream of the GPU that holds the signal: there it is appended behind them at once.

use std::collections::VecDeque;
use std::sync::Arc;

use super::gpu::{Gpu, Mark};
use super::registry::Registry;
use super::signals::{Signals, Step};
use super::wire::Header;
use crate::os::error::Result;

struct Landing {
    header: Header,
    refused: bool,
    /// Reached when its bytes are in place; None once they are.
    bytes: Option<Mark>,
    signal: Step,
}

/// The landings of one rank, the oldest first.
#[derive(Default)]
pub(crate) struct Landings(VecDeque<Landing>);

impl Landings {
    /// All bytes of an operation have arrived, and are in place when this mark is reached. `refused`: the bytes were
    /// dropped, and there is no signal.
    pub(crate) fn push(&mut self, header: Header, refused: bool, bytes: Option<Mark>) {
        let signal = if refused || header.signal.region == 0 { Step::DONE } else { Step::New };
        self.0.push_back(Landing { header, refused, bytes, signal });
    }

    /// Advances all landings that can advance. Passes finished ones, and whether each was refused, to `landed`.
    ///
    /// # Errors
    /// When a GPU has failed.
    pub(crate) fn advance(
        &mut self,
        registry: &Registry,
        signals: &mut Signals,
        landed: &mut Vec<(Header, bool)>,
    ) -> Result<()> {
        // The GPUs whose streams have not reached the landings checked so far.
        let mut late: Vec<Arc<Gpu>> = Vec::new();
        let mut is_first = true;
        let mut done = 0;
        for landing in &mut self.0 {
            note(&mut late, &mut landing.bytes)?;
            if matches!(landing.signal, Step::New) {
                match registry.locate_signal(&landing.header.signal) {
                    Ok(place) if late.iter().all(|gpu| place.gpu.as_ref().is_some_and(|own| Arc::ptr_eq(gpu, own))) => {
                    }
                    Ok(_) => break,
                    Err(_) => {
                        landing.refused = !registry.has_ended(landing.header.signal.region);
                        landing.signal = Step::DONE;
                    }
                }
            }
            signals.advance(registry, &landing.header.signal, &mut landing.signal)?;
            let Step::Written(mark, turn) = &mut landing.signal else { break };
            note(&mut late, mark)?;
            if mark.is_none() {
                *turn = None;
            }
            is_first &= late.is_empty();
            done += usize::from(is_first);
        }
        landed.extend(self.0.drain(..done).map(|landing| (landing.header, landing.refused)));
        Ok(())
    }

    /// How many are not done.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether all are done.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes all that are not done.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = Header> {
        std::mem::take(&mut self.0).into_iter().map(|landing| landing.header)
    }
}

/// Forgets a mark that is reached, or notes its GPU.
fn note(late: &mut Vec<Arc<Gpu>>, mark: &mut Option<Mark>) -> Result<()> {
    if let Some(waited_for) = mark {
        if waited_for.is_reached()? {
            *mark = None;
        } else if !late.iter().any(|gpu| Arc::ptr_eq(gpu, &waited_for.gpu)) {
            late.push(Arc::clone(&waited_for.gpu));
        }
    }
    Ok(())
}
