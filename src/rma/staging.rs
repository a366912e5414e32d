//! Page-locked host memory between a GPU and the connections, which carry bytes of host memory only.
//!
//! It is made once for a group, with the first registration of a GPU's memory. Each other rank has a lane of its own in
//! each direction, so that no rank waits for the slots of another: such waits could go round in a circle.

use super::cuda::{Context, Driver};
use super::wire::PIECE;
use crate::os::error::Result;

/// The bytes of all lanes of a group together, unless it has very many or very few ranks.
const BYTES: usize = 32 << 20;
/// Slots of a lane. With two, one can be copied while the other travels.
const FEWEST: usize = 2;
const MOST: usize = 8;

/// All lanes of a group.
pub(crate) struct Staging {
    driver: &'static Driver,
    context: Context,
    memory: usize,
    slots: usize,
}

impl Staging {
    /// The staging memory for a group of `ranks` ranks.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub(crate) fn new(driver: &'static Driver, context: Context, ranks: u32) -> Result<Self> {
        let lanes = 2 * ranks as usize;
        let slots = (BYTES / (lanes * PIECE)).clamp(FEWEST, MOST);
        let memory = driver.host_memory(context, lanes * slots * PIECE)?;
        Ok(Self { driver, context, memory, slots })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.driver.free_host_memory(self.context, self.memory);
    }
}

/// The slots for one direction of one rank that are not in use.
pub(crate) struct Lane {
    number: usize,
    free: Option<Vec<usize>>,
}

impl Lane {
    /// The lane for bytes to a rank.
    pub(crate) fn to(rank: u32) -> Self {
        Self { number: 2 * rank as usize, free: None }
    }

    /// The lane for bytes from a rank.
    pub(crate) fn from(rank: u32) -> Self {
        Self { number: 2 * rank as usize + 1, free: None }
    }

    /// The address of a slot of [`PIECE`] bytes, if one is free.
    pub(crate) fn take(&mut self, staging: &Staging) -> Option<usize> {
        let first = staging.memory + self.number * staging.slots * PIECE;
        self.free.get_or_insert_with(|| (0..staging.slots).map(|slot| first + slot * PIECE).collect()).pop()
    }

    /// Nothing uses this slot any more.
    pub(crate) fn give_back(&mut self, slot: usize) {
        self.free.get_or_insert_default().push(slot);
    }
}
