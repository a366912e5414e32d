//! Strings by number: a table that any thread may add to without a lock and without allocation.
//!
//! NCCL describes events with C strings ("AllReduce", "RING", …): few, short, always the same ones. On NCCL's thread
//! each is looked up by content and becomes a [`Name`], two bytes that need no lifetime. Entries are never removed,
//! so a name can be resolved at any time, also as the C string that a chained profiler wants.
//!
//! The table holds what fits; what does not becomes [`Name::OTHER`]. It must not know what the strings mean.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Longest string kept, without the terminating zero; longer ones are cut.
const LONGEST: usize = 51;

/// How many different strings there is room for; NCCL has about fifty.
const ENTRIES: usize = 1024;

/// How many places are tried for one string.
const PROBES: usize = 64;

/// How often the state of a place is read that another thread is filling.
const SPINS: usize = 4096;

const EMPTY: u32 = 0;
const READY: u32 = 2;

/// The state of a place that is being filled with a string of this hash.
fn writing(hash: u32) -> u32 {
    hash | 1
}

/// A string in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Name(u16);

#[repr(align(64))]
struct Entry {
    state: AtomicU32,
    hash: AtomicU32,
    length: UnsafeCell<u8>,
    text: UnsafeCell<[u8; LONGEST + 1]>,
}

/// How many addresses are remembered.
const RECENTS: usize = 64;

/// Addresses of strings, each with the number of what was there (16 bits): NCCL passes the same constants with every
/// call. What is there now is compared with it, which takes a quarter of the time of looking it up.
static RECENT: [AtomicU64; RECENTS] = [const { AtomicU64::new(0) }; RECENTS];

struct Table([Entry; ENTRIES]);

// SAFETY: only the thread that moved `state` from EMPTY to `writing` writes `length` and `text`. They are read only
// after `state` was seen READY (Acquire), which that thread stored (Release) after writing. They never change again.
unsafe impl Sync for Table {}

static TABLE: Table = Table(
    [const {
        Entry {
            state: AtomicU32::new(EMPTY),
            hash: AtomicU32::new(0),
            length: UnsafeCell::new(0),
            text: UnsafeCell::new([0; LONGEST + 1]),
        }
    }; ENTRIES],
);

impl Name {
    /// No string (a null pointer, a field that the descriptor's version does not have).
    pub(crate) const NONE: Name = Name(0);

    /// A string that found no room.
    pub(crate) const OTHER: Name = Name(u16::MAX);

    /// The string's number. A bounded number of places is tried. One that another thread fills with the same string
    /// just now is waited for, for a bounded time: after that the string is in the table twice.
    pub(crate) fn new(text: &[u8]) -> Name {
        if text.is_empty() {
            return Self::NONE;
        }
        let text = &text[..text.len().min(LONGEST)];
        let hash = hash(text);
        let writing = writing(hash);
        for probe in 0..PROBES {
            // Place 0 means "none", so it is never used.
            let index = (hash as usize + probe) % (ENTRIES - 1) + 1;
            let entry = &TABLE.0[index];
            let mut state = entry.state.load(Ordering::Acquire);
            if state == EMPTY {
                match entry.state.compare_exchange(EMPTY, writing, Ordering::Acquire, Ordering::Acquire) {
                    Ok(_) => {
                        entry.fill(text, hash);
                        return Name(index as u16);
                    }
                    Err(other) => state = other,
                }
            }
            for spin in 1..=SPINS {
                if state != writing {
                    break;
                }
                // The other thread may be interrupted.
                if spin % 64 == 0 {
                    std::thread::yield_now()
                } else {
                    std::hint::spin_loop()
                }
                state = entry.state.load(Ordering::Acquire);
            }
            if state == READY && entry.hash.load(Ordering::Relaxed) == hash && entry.text() == text {
                return Name(index as u16);
            }
        }
        Self::OTHER
    }

    /// The number of a C string; [`Name::NONE`] for a null pointer.
    ///
    /// # Safety
    /// `text` is null, or points to a string that ends with a zero byte.
    pub(crate) unsafe fn from_ptr(text: *const c_char) -> Name {
        if text.is_null() {
            return Self::NONE;
        }
        // Mixed, since NCCL's constants lie side by side.
        let recent = &RECENT[text.addr().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58];
        let word = recent.load(Ordering::Acquire);
        if word >> 16 == text.addr() as u64 {
            let name = Name(word as u16);
            // SAFETY: the caller promises a terminated string, and that of a name in the table is one.
            if unsafe { libc::strcmp(text, name.as_ptr()) } == 0 {
                return name;
            }
        }
        // SAFETY: the caller promises a terminated string.
        let bytes = unsafe { CStr::from_ptr(text) }.to_bytes();
        let name = Self::new(bytes);
        // One that was cut would never be found equal.
        if name != Self::NONE && name != Self::OTHER && bytes.len() <= LONGEST {
            recent.store((text.addr() as u64) << 16 | u64::from(name.0), Ordering::Release);
        }
        name
    }

    /// The string; empty for [`Name::NONE`], "?" for [`Name::OTHER`] and for what is not UTF-8.
    pub fn text(self) -> &'static str {
        match self {
            Self::NONE => "",
            Self::OTHER => "?",
            Name(index) => std::str::from_utf8(TABLE.0[usize::from(index)].text()).unwrap_or("?"),
        }
    }

    /// The string for C, valid for ever; null for [`Name::NONE`].
    pub(crate) fn as_ptr(self) -> *const c_char {
        match self {
            Self::NONE => std::ptr::null(),
            Self::OTHER => c"?".as_ptr(),
            // The text is followed by at least one zero, because it is cut at LONGEST.
            Name(index) => TABLE.0[usize::from(index)].text.get().cast(),
        }
    }

    /// Whether there is a string.
    pub(crate) fn is_some(self) -> bool {
        self != Self::NONE
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Self::new(text.as_bytes())
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.text())
    }
}

impl Entry {
    /// Writes the text and publishes the entry; only for the thread that won it.
    fn fill(&self, text: &[u8], hash: u32) {
        // SAFETY: only this thread moved the entry from EMPTY, so no other reads or writes it until READY is stored.
        unsafe {
            *self.length.get() = text.len() as u8;
            (&mut *self.text.get())[..text.len()].copy_from_slice(text);
        }
        self.hash.store(hash, Ordering::Relaxed);
        self.state.store(READY, Ordering::Release);
    }

    /// The text of an entry that was seen READY (a [`Name`] exists only for such).
    fn text(&'static self) -> &'static [u8] {
        // SAFETY: the entry was READY, so its bytes never change again.
        unsafe { &(&*self.text.get())[..usize::from(*self.length.get())] }
    }
}

/// FNV-1a: short strings, no need for more.
fn hash(text: &[u8]) -> u32 {
    text.iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_string_is_the_same_name_on_every_thread() {
        let together = std::sync::Barrier::new(8);
        let add = |i| {
            together.wait();
            Name::from(format!("func-{i}").as_str())
        };
        let all: Vec<Vec<Name>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| (0..40).map(add).collect())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (i, name) in all[0].iter().enumerate() {
            assert_eq!(name.text(), format!("func-{i}"));
        }
        assert!(all.iter().all(|names| *names == all[0]), "{all:?}");
        assert_eq!(Name::from("AllReduce"), Name::from("AllReduce"));
        assert_ne!(Name::from("AllReduce"), Name::from("AllGather"));
    }

    #[test]
    fn what_is_at_an_address_counts_and_not_what_was_there() {
        let mut place = *b"RING\0";
        // SAFETY: each ends with a zero.
        let mut name = |text: &[u8; 5]| unsafe {
            place = *text;
            Name::from_ptr(place.as_ptr().cast())
        };
        let names = [b"RING\0", b"RING\0", b"TREE\0", b"RIN\0G", b"RING\0"].map(|text| name(text).text());
        assert_eq!(names, ["RING", "RING", "TREE", "RIN", "RING"]);
    }

    #[test]
    fn null_empty_and_overlong_strings_are_no_trouble() {
        // SAFETY: null is allowed.
        assert_eq!(unsafe { Name::from_ptr(std::ptr::null()) }, Name::NONE);
        assert_eq!(Name::from("").text(), "");
        let long = "x".repeat(200);
        let name = Name::from(long.as_str());
        assert_eq!(name.text().len(), LONGEST);
        // SAFETY: the table's strings end with a zero.
        assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }.to_bytes().len(), LONGEST);
    }
}
