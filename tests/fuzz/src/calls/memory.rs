//! Buffers that notice who touches what they do not own: each ends where a page begins that nobody may touch, and
//! while it is nobody's its own pages are like that too, for the kernel as well; or it is on the heap and freed, which
//! the address sanitizer watches.

use std::cell::RefCell;
use std::ptr::null_mut;

/// The most that a buffer holds.
pub const MOST: usize = 160 << 10;
const PAGE: usize = 4096;
const STRIDE: usize = MOST + PAGE;
const PLACES: usize = 48;

/// Memory for one part of a request.
pub enum Buffer {
    /// Freed when it is let go.
    Heap(Box<[u8]>),
    /// A place before a guard page, and its length.
    Edge(usize, usize),
}

struct Arena {
    base: *mut u8,
    free: Vec<usize>,
}

thread_local! {
    static ARENA: RefCell<Arena> = RefCell::new(Arena::new());
}

impl Arena {
    fn new() -> Self {
        let (none, how) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping, which stays for the life of the process.
        let base = unsafe { libc::mmap(null_mut(), STRIDE * PLACES, none, how, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Self { base: base.cast(), free: (0..PLACES).collect() }
    }

    fn start(&self, place: usize, len: usize) -> *mut u8 {
        // SAFETY: the end of the place's memory, where its guard page begins, and `len` bytes, at most MOST, before it.
        unsafe { self.base.add(place * STRIDE + MOST - len) }
    }

    fn protect(&self, place: usize, len: usize, how: libc::c_int) {
        let bytes = len.next_multiple_of(PAGE);
        // SAFETY: whole pages of the place, which the caller owns.
        let code = unsafe { libc::mprotect(self.start(place, bytes).cast(), bytes, how) };
        assert_eq!(code, 0, "the memory's protection can be changed");
    }
}

impl Buffer {
    /// One of `len` bytes; on the heap when it shall be, or no place is left.
    pub fn new(len: usize, heap: bool) -> Self {
        let place = if heap { None } else { ARENA.with_borrow_mut(|arena| arena.free.pop()) };
        let Some(place) = place else { return Self::Heap(vec![0; len].into()) };
        ARENA.with_borrow(|arena| arena.protect(place, len, libc::PROT_READ | libc::PROT_WRITE));
        Self::Edge(place, len)
    }

    /// What a transport is told.
    pub fn pointer(&mut self) -> *mut u8 {
        match self {
            Self::Heap(bytes) => bytes.as_mut_ptr(),
            Self::Edge(place, len) => ARENA.with_borrow(|arena| arena.start(*place, *len)),
        }
    }

    /// Its bytes, while the transport has no right to them.
    pub fn bytes(&mut self) -> &mut [u8] {
        let pointer = self.pointer();
        let len = match self {
            Self::Heap(bytes) => bytes.len(),
            Self::Edge(_, len) => *len,
        };
        // SAFETY: the memory is this buffer's own, readable and writable until it is dropped.
        unsafe { std::slice::from_raw_parts_mut(pointer, len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Self::Edge(place, len) = *self {
            ARENA.with_borrow_mut(|arena| {
                arena.protect(place, len, libc::PROT_NONE);
                // At the other end of the queue, so that it stays untouchable for a while.
                arena.free.insert(0, place);
            });
        }
    }
}
