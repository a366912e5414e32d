//! The memory that the other ranks of a group may write and read, numbered from 1 in the order of registrations.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::gpu::Gpu;
use super::wire::Signal;
use crate::os::error::{Error, Result};

/// Registered memory.
#[derive(Clone, Default)]
pub(crate) struct Region {
    /// Where it begins.
    pub address: usize,
    /// Its bytes.
    pub size: usize,
    /// The GPU that has it; none for host memory.
    pub gpu: Option<Arc<Gpu>>,
    /// Only Towline writes its numbers, which are 0 at first: NCCL's promise for its signals.
    pub only_ours: bool,
}

/// A place in registered memory.
#[derive(Clone, Default)]
pub(crate) struct Spot {
    /// Its address.
    pub address: usize,
    /// As the region's.
    pub gpu: Option<Arc<Gpu>>,
    /// As the region's.
    pub only_ours: bool,
}

/// All registrations of a group.
#[derive(Default)]
pub(crate) struct Registry {
    regions: Mutex<Vec<Option<Region>>>,
}

impl Registry {
    fn regions(&self) -> MutexGuard<'_, Vec<Option<Region>>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds memory and returns its number. An entry without bytes replaces memory that cannot be registered: all ranks
    /// count alike, so it uses up a number, too.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) fn add(&self, region: Region) -> Result<u32> {
        let mut regions = self.regions();
        let number = u32::try_from(regions.len() + 1).map_err(|_| Error::usage("too many registrations"))?;
        regions.push(Some(region));
        Ok(number)
    }

    /// Ends a registration. Its number is never used again.
    pub(crate) fn remove(&self, number: u32) {
        if let Some(index) = index(number)
            && let Some(place) = self.regions().get_mut(index)
        {
            *place = None;
        }
    }

    /// Whether there is such a registration.
    pub(crate) fn has(&self, number: u32) -> bool {
        index(number).is_some_and(|index| self.regions().get(index).is_some_and(Option::is_some))
    }

    /// Whether there was such a registration, and it has ended.
    pub(crate) fn has_ended(&self, number: u32) -> bool {
        index(number).is_some_and(|index| self.regions().get(index).is_some_and(Option::is_none))
    }

    /// The address of these bytes. A range without bytes may be anywhere.
    ///
    /// # Errors
    /// When they are not all inside that registration.
    pub(crate) fn locate(&self, number: u32, offset: u64, size: u64) -> Result<Spot> {
        if size == 0 {
            return Ok(Spot::default());
        }
        let region = index(number).and_then(|index| self.regions().get(index).cloned().flatten());
        let region = region.ok_or_else(|| Error::argument(format!("there is no registration number {number}")))?;
        let is_inside = offset.checked_add(size).is_some_and(|end| end <= region.size as u64);
        if !is_inside {
            return Err(Error::argument(format!(
                "{size} bytes at {offset} are not inside registration {number}, which has {} bytes",
                region.size
            )));
        }
        let Region { address, gpu, only_ours, .. } = region;
        Ok(Spot { address: address + offset as usize, gpu, only_ours })
    }

    /// Where a signal is, whose address is a multiple of 8.
    ///
    /// # Errors
    /// When it is not inside that registration, or not aligned.
    pub(crate) fn locate_signal(&self, signal: &Signal) -> Result<Spot> {
        let spot = self.locate(signal.region, signal.offset, 8)?;
        if !spot.address.is_multiple_of(8) {
            return Err(Error::argument(format!("a signal at {}, which is no multiple of 8", signal.offset)));
        }
        Ok(spot)
    }

    /// Ends all registrations.
    pub(crate) fn clear(&self) {
        self.regions().iter_mut().for_each(|region| *region = None);
    }
}

fn index(number: u32) -> Option<usize> {
    (number as usize).checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_a_registration_is_ever_located() {
        let registry = Registry::default();
        let number = registry.add(Region { address: 4096, size: 100, ..Region::default() }).unwrap();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let narrow = state >> 56;
            [narrow % 110, state, u64::MAX - narrow % 110, 100][(state >> 32) as usize % 4]
        };
        let mut found = 0;
        for _ in 0..100_000 {
            let (offset, size) = (random(), random());
            if let Ok(Spot { address, .. }) = registry.locate(number, offset, size)
                && size > 0
            {
                assert!(address >= 4096 && address as u64 + size <= 4196, "{offset} {size}");
                found += 1;
            }
            if let Ok(Spot { address, .. }) = registry.locate_signal(&Signal { region: number, offset, value: 1 }) {
                assert!(address.is_multiple_of(8) && (4096..=4188).contains(&address), "{offset}");
            }
        }
        assert!(found > 100, "{found}");
    }

    #[test]
    fn a_number_is_not_given_again() {
        let registry = Registry::default();
        let region = Region { address: 8, size: 8, ..Region::default() };
        let first = registry.add(region.clone()).unwrap();
        registry.remove(first);
        let second = registry.add(region).unwrap();
        assert_ne!(first, second);
        assert!(registry.locate(first, 0, 1).is_err() && registry.locate(second, 0, 8).is_ok());
        assert!(registry.locate(0, 0, 1).is_err() && registry.locate(0, 0, 0).is_ok());
    }
}
