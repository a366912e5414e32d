//! Connecting one queue pair with the peer's, outside the threads of its connection.
//!
//! On RoCE the kernel resolves the peer's link address in that call, for a second or more if a link has just come up. A
//! connection that continues over other queue pairs must not block NCCL's thread for that. So a separate thread
//! connects the replacement of a lost queue pair, and hands over the result.

use super::aside::Aside;
use super::verbs::{Ece, QueuePair, Refused, Route, Timeouts};
use crate::os::error::Result;

/// The state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// It is bound to its port.
    Bound,
    /// It receives.
    Receiving,
    /// It sends, too.
    Sending,
}

/// The progress of connecting a queue pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Linked {
    step: Step,
    /// It uses no options beyond the standard: one of the two sides has none.
    pub(super) without_ece: bool,
}

impl Linked {
    /// A queue pair that is bound to its port.
    pub(super) const BOUND: Self = Self { step: Step::Bound, without_ece: false };
}

/// The parameters for connecting a queue pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    /// The options that the peer offers beyond the standard.
    pub(super) ece: Option<Ece>,
    pub(super) route: Route,
    pub(super) timeouts: Timeouts,
    pub(super) first_packet: u32,
}

impl Plan {
    /// Does the remaining steps.
    ///
    /// # Errors
    /// When the device refuses; it may be tried again.
    pub(super) fn carry_out(&self, pair: &QueuePair, linked: &mut Linked) -> std::result::Result<(), Refused> {
        if linked.step == Step::Bound {
            linked.without_ece = !self.ece.map_or(Ok(false), |ece| pair.set_ece(ece))?;
            pair.connect(&self.route)?;
            linked.step = Step::Receiving;
        }
        if linked.step == Step::Receiving {
            pair.start(self.timeouts, self.first_packet)?;
            linked.step = Step::Sending;
        }
        Ok(())
    }
}

/// A queue pair, and the result of connecting it.
type Outcome = (QueuePair, Linked, Result<()>);

/// A queue pair that a thread is connecting. When this is dropped first, the thread ends the queue pair.
pub(super) struct Apart {
    element: u64,
    outcome: Aside<Outcome>,
}

impl Apart {
    pub(super) fn start(pair: QueuePair, plan: Plan) -> Self {
        let element = pair.element();
        let connect = move || {
            let mut linked = Linked::BOUND;
            let connected = plan.carry_out(&pair, &mut linked).map_err(Refused::into_error);
            (pair, linked, connected)
        };
        // While a queue pair is connecting, its connection is polled anyway.
        Self { element, outcome: Aside::start(connect, || ()) }
    }

    /// The address by which asynchronous events identify the queue pair.
    pub(super) fn element(&self) -> u64 {
        self.element
    }

    /// The queue pair, when the thread is done with it.
    pub(super) fn take(&self) -> Option<Outcome> {
        self.outcome.take()
    }
}
