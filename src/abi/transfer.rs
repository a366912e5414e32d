//! What the sends, receives and flushes of all versions have in common, once their arguments are lined up.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::guard::guard;
use super::pointer::{Out, Size, array, dress, id, value};
use crate::nccl::ffi::ncclResult_t;
use crate::os::error::{Error, Result};
use crate::plugin::facade::{self, MAX_PARTS, Part};

/// The arguments of a grouped call: arrays of `n` values each.
pub(super) struct Group<S> {
    pub(super) n: c_int,
    pub(super) data: *mut *mut c_void,
    pub(super) sizes: *mut S,
    /// None where the call has no tags: every part's tag is 0.
    pub(super) tags: Option<*mut c_int>,
    pub(super) mhandles: *mut *mut c_void,
    /// Null where the version, or the call, has no profiler handles.
    pub(super) phandles: *mut *mut c_void,
}

/// `isend` of every version.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `request`.
pub(super) unsafe fn send<const API: u8>(
    comm: *mut c_void,
    part: impl FnOnce() -> Result<Part>,
    request: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("isend", || {
        // SAFETY: this function's contract.
        let request = unsafe { not_now(request) }?;
        answer(request, facade::isend(id(comm, "sendComm")?, part()?)?);
        Ok(())
    })
}

/// `irecv` of every version.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `request` and the arrays of `group`.
pub(super) unsafe fn receive<S: Size, const API: u8>(
    comm: *mut c_void,
    group: &Group<S>,
    request: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("irecv", || {
        // From v9 on `*request` may hold a hint that completion is optional. We always complete: it is overwritten.
        // SAFETY: this function's contract.
        let request = unsafe { not_now(request) }?;
        let comm = id(comm, "recvComm")?;
        let started = if group.n == 1 {
            // Nearly every group.
            // SAFETY: this function's contract.
            facade::irecv(comm, &[unsafe { group.only(Size::bytes) }?])
        } else {
            // SAFETY: this function's contract.
            let (parts, n) = unsafe { group.parts(Size::bytes) }?;
            facade::irecv(comm, &parts[..n])
        };
        answer(request, started?);
        Ok(())
    })
}

/// `iflush` of every version. The sizes are `int` even where receives are larger, so a large one may arrive truncated.
/// A flush only needs to know whether there is anything to flush, and only that is passed on faithfully.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `request` and the arrays of `group`.
pub(super) unsafe fn flush<const API: u8>(
    comm: *mut c_void,
    group: &Group<c_int>,
    request: *mut *mut c_void,
) -> ncclResult_t {
    guard::<API>("iflush", || {
        // SAFETY: this function's contract.
        let request = unsafe { not_now(request) }?;
        // SAFETY: this function's contract.
        let (parts, n) = unsafe { group.parts(|size| Ok(size.unsigned_abs() as usize)) }?;
        answer(request, facade::iflush(id(comm, "recvComm")?, &parts[..n])?);
        Ok(())
    })
}

/// One part from the arguments of a call.
#[inline]
pub(super) fn part(
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    phandle: *mut c_void,
) -> Result<Part> {
    if data.is_null() && size > 0 {
        return Err(nothing_there(size));
    }
    Ok(Part { data: data.cast(), size, tag, mr: mhandle.addr(), profiler: phandle })
}

impl<S: Copy> Group<S> {
    /// The part of a group of one.
    ///
    /// # Safety
    /// NCCL's promise (see [`super`]) for the arrays.
    #[inline]
    unsafe fn only(&self, bytes: impl Fn(S) -> Result<usize>) -> Result<Part> {
        // SAFETY: this function's contract; every array has a value.
        unsafe {
            let (data, size) = (*value(self.data, "data")?, bytes(*value(self.sizes, "sizes")?)?);
            let mhandle = *value(self.mhandles, "mhandles")?;
            let tag = self.tags.map_or(Ok(0), |tags| value(tags, "tags").copied())?;
            let phandle = if self.phandles.is_null() { ptr::null_mut() } else { *value(self.phandles, "phandles")? };
            part(data, size, tag, mhandle, phandle)
        }
    }

    /// Gathers the arrays into parts.
    ///
    /// # Safety
    /// NCCL's promise (see [`super`]) for the arrays.
    unsafe fn parts(&self, bytes: impl Fn(S) -> Result<usize>) -> Result<([Part; MAX_PARTS], usize)> {
        let n = usize::try_from(self.n).ok().filter(|n| (1..=MAX_PARTS).contains(n));
        let n = n.ok_or_else(|| Error::argument(format!("a group of {}; 1 to {MAX_PARTS} are possible", self.n)))?;
        // SAFETY: this function's contract; every array has `n` values.
        let (data, sizes, mhandles, tags, phandles) = unsafe {
            (
                array(self.data, n, "data")?,
                array(self.sizes, n, "sizes")?,
                array(self.mhandles, n, "mhandles")?,
                self.tags.map(|tags| array(tags, n, "tags")).transpose()?,
                (!self.phandles.is_null()).then(|| array(self.phandles, n, "phandles")).transpose()?,
            )
        };
        let none = Part { data: ptr::null_mut(), size: 0, tag: 0, mr: 0, profiler: ptr::null_mut() };
        let mut parts = [none; MAX_PARTS];
        for (i, slot) in parts[..n].iter_mut().enumerate() {
            let tag = tags.map_or(0, |tags| tags[i]);
            let phandle = phandles.map_or(ptr::null_mut(), |phandles| phandles[i]);
            *slot = part(data[i], bytes(sizes[i])?, tag, mhandles[i], phandle)?;
        }
        Ok((parts, n))
    }
}

#[cold]
fn nothing_there(size: usize) -> Error {
    Error::argument(format!("the argument `data` is a null pointer, and the size is {size}"))
}

/// The place for the request, which means "not now" (and, after a failure, "none") until it is answered.
///
/// # Safety
/// NCCL's promise (see [`super`]) for `request`.
unsafe fn not_now(request: *mut *mut c_void) -> Result<Out<*mut c_void>> {
    // SAFETY: this function's contract.
    let mut request = unsafe { Out::new(request, "request") }?;
    request.set(ptr::null_mut());
    Ok(request)
}

fn answer(mut place: Out<*mut c_void>, request: Option<usize>) {
    if let Some(request) = request {
        place.set(dress(request));
    }
}
