//! A connection for the simulations of other rooms: both cores, and real bytes, which move when the cores say so.

use super::Dice;
use super::ledger::Ledger;
use super::world::{Mischief, World};
use crate::os::error::Result;

/// Both ends. Streams stall, are cut and reconnect, as in an honest game.
pub(crate) struct Link(World);

impl Link {
    pub(crate) fn new(seed: u64) -> Result<Self> {
        let mut world = World::new(seed, Mischief::None)?;
        world.ledger = Ledger::of_memory();
        Ok(Self(world))
    }

    /// Sends what is at this address, which may be read until it is sent. Gives its number.
    pub(crate) fn send(&mut self, address: usize, size: usize) -> usize {
        self.0.ledger.more_to_send(address, size as u64)
    }

    /// Receives into what is at this address, which may be written until it is received. Gives its number.
    pub(crate) fn receive(&mut self, address: usize, size: usize) -> usize {
        self.0.ledger.more_to_receive(address, size as u64)
    }

    pub(crate) fn is_sent(&self, number: usize) -> bool {
        self.0.ledger.is_sent(number)
    }

    /// How many bytes have come, if all have.
    pub(crate) fn received(&self, number: usize) -> Option<u64> {
        self.0.ledger.received(number)
    }

    /// One thing happens.
    pub(crate) fn step(&mut self) -> Result<()> {
        self.0.step()
    }

    /// How many sends there have been.
    pub(crate) fn sends(&self) -> usize {
        self.0.ledger.sends.len()
    }

    pub(crate) fn is_all_sent(&self) -> bool {
        self.0.ledger.is_all_sent()
    }
}

/// The dice of a seed, for other rooms.
pub(crate) struct Luck(Dice);

impl Luck {
    pub(crate) fn of(seed: u64) -> Self {
        Self(Dice::of(seed))
    }

    pub(crate) fn roll(&mut self, below: u64) -> u64 {
        self.0.roll(below)
    }
}
