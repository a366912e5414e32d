//! Opaque handles: what NCCL holds in its `void*` for contexts, communicators, registrations and requests.
//!
//! A handle is never an address. It is a number that encodes the kind of object, its place in a never-freed
//! [`Table`](super::table::Table), and the generation of that place. So a handle from another plugin, a handle that was
//! closed, or a request tested twice is recognised and refused without dereferencing anything. The kind is in the low
//! three bits and is at least 4. So no handle is 0, 1 or 2, which have a meaning of their own in NCCL (NCCL 2.24 and
//! later preset a receive's request to 1 as a hint).

use crate::os::error::{Error, Result};

/// The kind of object that a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// One transfer in flight.
    Request = 4,
    /// A listening, sending or receiving communicator.
    Comm = 5,
    /// One `init`.
    Context = 6,
    /// A memory registration.
    Memory = 7,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Comm => "communicator",
            Self::Context => "context",
            Self::Memory => "memory registration",
        }
    }
}

const KIND_BITS: u32 = 3;
const SLOT_BITS: u32 = 9;

/// How many places of a table a handle can distinguish: communicators open at one time in a process. With kind and slot
/// the place fills the lower half of a handle.
pub(crate) const MAX_INDEX: usize = 1 << (32 - SLOT_BITS - KIND_BITS);

/// A decoded handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    /// The kind of the named object.
    pub kind: Kind,
    /// The place in the table.
    pub index: u32,
    /// The request slot within that place; 0 for everything but requests.
    pub slot: u16,
    /// Which occupant of the place (or of the slot) is meant.
    pub generation: u32,
}

impl Handle {
    /// The value to return to NCCL. Never 0, 1 or 2.
    #[inline]
    pub(crate) fn encode(self) -> usize {
        debug_assert!(self.slot < 1 << SLOT_BITS && (self.index as usize) < MAX_INDEX);
        let value = u64::from(self.generation) << 32
            | u64::from(self.index) << (KIND_BITS + SLOT_BITS)
            | u64::from(self.slot) << KIND_BITS
            | u64::from(self.kind as u8);
        value as usize
    }

    /// Reads a value from NCCL, which must name an object of kind `expected`.
    ///
    /// # Errors
    /// [`Cause::Argument`](crate::os::error::Cause::Argument) when it is null or anything else.
    #[inline]
    pub(crate) fn decode(value: usize, expected: Kind) -> Result<Self> {
        if value & ((1 << KIND_BITS) - 1) != expected as usize {
            return Err(Self::refused(value, expected));
        }
        let value = value as u64;
        Ok(Self {
            kind: expected,
            slot: (value >> KIND_BITS & ((1 << SLOT_BITS) - 1)) as u16,
            index: (value >> (KIND_BITS + SLOT_BITS) & (MAX_INDEX as u64 - 1)) as u32,
            generation: (value >> 32) as u32,
        })
    }

    #[cold]
    fn refused(value: usize, expected: Kind) -> Error {
        if value == 0 {
            return Error::argument(format!("the {} is a null pointer", expected.name()));
        }
        Error::argument(format!("{value:#x} is not a Towline {}", expected.name()))
            .with_hint("it may belong to another network plugin")
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_handle_survives_the_round_trip_and_is_never_a_value_nccl_reserves(
            index in 0..MAX_INDEX as u32, slot in 0..1_u16 << SLOT_BITS, generation: u32
        ) {
            for kind in [Kind::Request, Kind::Comm, Kind::Context, Kind::Memory] {
                let handle = Handle { kind, index, slot, generation };
                let value = handle.encode();
                prop_assert!(value > 3);
                prop_assert_eq!(Handle::decode(value, kind).unwrap(), handle);
            }
        }

        #[test]
        fn an_address_is_not_taken_for_a_handle(address: usize) {
            // Every address aligned to eight, as all heap pointers are, has kind bits 0.
            prop_assert!(Handle::decode(address & !7, Kind::Request).is_err());
        }
    }
}
