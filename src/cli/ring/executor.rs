//! Carries out a program over a link.
//!
//! Guarantees: at most [`SLOTS`] transfers are in flight each way; a slot is touched only while no transfer uses it;
//! what arrives has exactly the size that was expected. Sends may still be in flight when [`Ring::run`] returns, as
//! between two of NCCL's kernels; [`Ring::drain`] waits for them.

use std::ops::Range;

use super::program::{Action, Step};
use super::{Link, SLOTS};

/// Where an all-reduce reads and writes.
pub(crate) enum Buffers<'a> {
    OutOfPlace { input: &'a [f32], output: &'a mut [f32] },
    InPlace(&'a mut [f32]),
}

impl Buffers<'_> {
    fn input(&self, elements: &Range<usize>) -> &[f32] {
        match self {
            Self::OutOfPlace { input, .. } => &input[elements.clone()],
            Self::InPlace(both) => &both[elements.clone()],
        }
    }

    fn output(&mut self, elements: &Range<usize>) -> &mut [f32] {
        match self {
            Self::OutOfPlace { output, .. } => &mut output[elements.clone()],
            Self::InPlace(both) => &mut both[elements.clone()],
        }
    }
}

/// One rank's place in the ring. The counters run on from one all-reduce to the next; a transfer uses the slot that is
/// its number modulo [`SLOTS`].
pub(crate) struct Ring<L: Link> {
    link: L,
    sends_begun: usize,
    sends_over: usize,
    /// A filled slot that the transport did not take yet: its elements.
    waiting: Option<usize>,
    receives_begun: usize,
    receives_over: usize,
    /// The size of the oldest receive, once it is over and until it is consumed.
    arrived: Option<usize>,
}

impl<L: Link> Ring<L> {
    pub(crate) fn new(link: L) -> Self {
        Self { link, sends_begun: 0, sends_over: 0, waiting: None, receives_begun: 0, receives_over: 0, arrived: None }
    }

    /// The link, to pass it the operation of its messages.
    pub(crate) fn link_mut(&mut self) -> &mut L {
        &mut self.link
    }

    /// Leaves the ring, once nothing is in flight.
    pub(crate) fn into_link(self) -> L {
        self.link
    }

    /// Performs `program`.
    pub(crate) fn run(&mut self, program: &[Step], mut buffers: Buffers<'_>) -> Result<(), L::Error> {
        let mut ahead = program.iter().filter(|step| step.action.receives()).map(|step| step.elements.len()).peekable();
        for step in program {
            // While this step waits, receives are posted for the steps to come and everything in flight is tested:
            // a transport may need that to move at all.
            loop {
                let mut moved = self.post_receives(&mut ahead)?;
                moved |= self.push_waiting()?;
                moved |= self.collect_sends()?;
                moved |= self.collect_receive()?;
                let has_room = !step.action.sends() || self.has_free_send_slot();
                if has_room && (!step.action.receives() || self.has_received(step.elements.len())?) {
                    break;
                }
                if !moved {
                    self.link.idle()?;
                }
            }
            self.perform(step, &mut buffers);
            self.push_waiting()?;
        }
        // A filled slot must leave before we return: the neighbour waits for it.
        while self.waiting.is_some() {
            if !self.push_waiting()? && !self.collect_sends()? {
                self.link.idle()?;
            }
        }
        Ok(())
    }

    /// Waits until no send is in flight.
    pub(crate) fn drain(&mut self) -> Result<(), L::Error> {
        while self.sends_over < self.sends_begun {
            if !self.collect_sends()? {
                self.link.idle()?;
            }
        }
        Ok(())
    }

    fn perform(&mut self, step: &Step, buffers: &mut Buffers<'_>) {
        let elements = &step.elements;
        let count = elements.len();
        let from = step.action.receives().then_some(self.receives_over % SLOTS);
        let to = step.action.sends().then_some(self.sends_begun % SLOTS);
        let (received, to_send) = self.link.slots(from, to);
        let received = &received[..if from.is_some() { count } else { 0 }];
        let to_send = &mut to_send[..if to.is_some() { count } else { 0 }];
        match step.action {
            Action::Send => to_send.copy_from_slice(buffers.input(elements)),
            Action::RecvReduceSend => add(to_send, received, buffers.input(elements)),
            Action::RecvReduceCopySend => {
                add(to_send, received, buffers.input(elements));
                buffers.output(elements).copy_from_slice(to_send);
            }
            Action::RecvCopySend => {
                to_send.copy_from_slice(received);
                buffers.output(elements).copy_from_slice(received);
            }
            Action::Recv => buffers.output(elements).copy_from_slice(received),
        }
        if step.action.receives() {
            self.arrived = None;
            self.receives_over += 1;
        }
        if step.action.sends() {
            self.waiting = Some(count);
        }
    }

    fn post_receives(
        &mut self,
        ahead: &mut std::iter::Peekable<impl Iterator<Item = usize>>,
    ) -> Result<bool, L::Error> {
        let mut posted = false;
        while self.receives_begun - self.receives_over < SLOTS {
            let Some(&elements) = ahead.peek() else { break };
            if !self.link.start_receive(self.receives_begun % SLOTS, elements)? {
                break;
            }
            ahead.next();
            self.receives_begun += 1;
            posted = true;
        }
        Ok(posted)
    }

    fn push_waiting(&mut self) -> Result<bool, L::Error> {
        let Some(elements) = self.waiting else { return Ok(false) };
        let taken = self.link.start_send(self.sends_begun % SLOTS, elements)?;
        if taken {
            self.waiting = None;
            self.sends_begun += 1;
        }
        Ok(taken)
    }

    fn collect_sends(&mut self) -> Result<bool, L::Error> {
        let before = self.sends_over;
        while self.sends_over < self.sends_begun && self.link.is_sent(self.sends_over % SLOTS)? {
            self.sends_over += 1;
        }
        Ok(self.sends_over > before)
    }

    fn has_free_send_slot(&self) -> bool {
        self.waiting.is_none() && self.sends_begun - self.sends_over < SLOTS
    }

    fn collect_receive(&mut self) -> Result<bool, L::Error> {
        if self.arrived.is_some() || self.receives_begun == self.receives_over {
            return Ok(false);
        }
        self.arrived = self.link.received_bytes(self.receives_over % SLOTS)?;
        Ok(self.arrived.is_some())
    }

    /// Whether the oldest receive is over, with as many elements as are due.
    fn has_received(&self, elements: usize) -> Result<bool, L::Error> {
        let expected = elements * size_of::<f32>();
        match self.arrived {
            Some(arrived) if arrived != expected => Err(self.link.wrong_size(expected, arrived)),
            arrived => Ok(arrived.is_some()),
        }
    }
}

fn add(to: &mut [f32], a: &[f32], b: &[f32]) {
    for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
        *to = a + b;
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
