//! Plays FlagCX: drives `flagcxNetAdaptorPlugin_v1` of a plugin as FlagCX's own path does.
//!
//! What differs from NCCL is here: a handle of which 64 bytes reach the peer, which writes a pointer over the last 8;
//! sizes of receives that are an `int` with anything behind it; no context and no finalize.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::null_mut;

use towline::host::{Code, Plugin, Properties, Result};
use towline::nccl::ffi;

/// The table of an opened plugin.
#[derive(Clone, Debug)]
pub struct FlagCx {
    table: &'static ffi::flagcxNetAdaptor_v1_t,
    // Keeps the library mapped.
    _plugin: Plugin,
}

/// What travels to the peer: 64 bytes.
#[derive(Clone, Copy)]
pub struct FlagCxHandle(pub [u8; 64]);

/// Which end of a connection, or what makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Send,
    Recv,
    Listen,
}

/// A pointer of the plugin's: a listener, a connection, a registration or a request. The caller keeps FlagCX's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object(*mut c_void);

// SAFETY: the pointer only goes back to the plugin, which takes calls from any thread.
unsafe impl Send for Object {}
// SAFETY: see above.
unsafe impl Sync for Object {}

// SAFETY: the table is never written, and its functions take calls from any thread.
unsafe impl Send for FlagCx {}
// SAFETY: see above.
unsafe impl Sync for FlagCx {}

impl Object {
    pub fn of(raw: *mut c_void) -> Option<Self> {
        (!raw.is_null()).then_some(Self(raw))
    }

    pub fn raw(self) -> *mut c_void {
        self.0
    }
}

macro_rules! call {
    ($self:ident . $entry:ident ( $($argument:expr),* $(,)? )) => {
        match $self.table.$entry {
            // SAFETY: the arguments are as FlagCX gives them: places that live through the call and pointers of the
            // plugin's own, whose misuse is the plugin's to refuse. The library is mapped.
            Some(entry) => Code::check(unsafe { entry($($argument),*) }),
            None => Err(Code::NotOffered(stringify!($entry))),
        }
    };
}

impl FlagCx {
    /// The table of `plugin`, if it has one.
    pub fn of(plugin: &Plugin) -> Option<Self> {
        let table = plugin.symbol("flagcxNetAdaptorPlugin_v1")?.cast::<ffi::flagcxNetAdaptor_v1_t>();
        // SAFETY: by its name it is this table, which is never written, in a library that `self` keeps mapped.
        Some(Self { table: unsafe { &*table }, _plugin: plugin.clone() })
    }

    /// The table itself.
    pub fn table(&self) -> &ffi::flagcxNetAdaptor_v1_t {
        self.table
    }

    /// What FlagCX does when it chooses a network: `init`, then the number of devices.
    pub fn init(&self) -> Result<c_int> {
        let mut count = 0;
        call!(self.init())?;
        call!(self.devices(&raw mut count))?;
        Ok(count)
    }

    /// The plugin's properties of a device.
    pub fn properties(&self, dev: c_int) -> Result<Properties> {
        // SAFETY: integers, floats and pointers, for which zero is a value.
        let mut raw: ffi::ncclNetProperties_v8_t = unsafe { std::mem::zeroed() };
        call!(self.getProperties(dev, &raw mut raw))?;
        // SAFETY: the strings are NULL or the plugin's, which keeps them while it is mapped.
        Ok(unsafe { Properties::from_v8(&raw) })
    }

    /// The number of the device with this name.
    pub fn device_named(&self, name: &CStr) -> Result<c_int> {
        let (name, mut dev) = (CString::from(name), -1);
        call!(self.getDevFromName(name.as_ptr().cast_mut(), &raw mut dev))?;
        Ok(dev)
    }

    /// The receiving side's beginning.
    pub fn listen(&self, dev: c_int) -> Result<(Object, FlagCxHandle)> {
        let (mut handle, mut comm) = (FlagCxHandle([0; 64]), null_mut());
        call!(self.listen(dev, handle.0.as_mut_ptr().cast(), &raw mut comm))?;
        Object::of(comm).map(|comm| (comm, handle)).ok_or(Code::NotOffered("a listener"))
    }

    /// One call of `connect`; the connecting side's memory of a handle is its own.
    pub fn connect(&self, dev: c_int, handle: &mut FlagCxHandle) -> Result<Option<Object>> {
        let mut comm = null_mut();
        call!(self.connect(dev, handle.0.as_mut_ptr().cast(), &raw mut comm))?;
        Ok(Object::of(comm))
    }

    /// One call of `accept`.
    pub fn accept(&self, listener: Object) -> Result<Option<Object>> {
        let mut comm = null_mut();
        call!(self.accept(listener.0, &raw mut comm))?;
        Ok(Object::of(comm))
    }

    /// Registers memory of this kind at an address.
    pub fn reg_mr(&self, comm: Object, address: usize, size: usize, kind: c_int) -> Result<Object> {
        let mut mr = null_mut();
        call!(self.regMr(comm.0, address as *mut c_void, size, kind, 0, &raw mut mr))?;
        Ok(Object(mr))
    }

    /// Registers memory at an address through a DMA-BUF descriptor.
    pub fn reg_mr_dmabuf(&self, comm: Object, address: usize, size: usize) -> Result<Object> {
        let mut mr = null_mut();
        let data = address as *mut c_void;
        call!(self.regMrDmaBuf(comm.0, data, size, ffi::NCCL_PTR_CUDA as c_int, 0, -1, 0, &raw mut mr))?;
        Ok(Object(mr))
    }

    /// Ends a registration.
    pub fn dereg_mr(&self, comm: Object, mr: Object) -> Result<()> {
        call!(self.deregMr(comm.0, mr.0))
    }

    /// Posts a send; none for "not now".
    ///
    /// # Safety
    /// The memory stays valid and unchanged until the request is over or the connection closed.
    pub unsafe fn isend(&self, comm: Object, data: *mut c_void, size: usize, mr: Object) -> Result<Option<Object>> {
        let mut request = null_mut();
        call!(self.isend(comm.0, data, size, 0, mr.0, null_mut(), &raw mut request))?;
        Ok(Object::of(request))
    }

    /// Posts a receive; none for "not now".
    ///
    /// # Safety
    /// The memory stays valid and untouched until the request is over or the connection closed.
    pub unsafe fn irecv(&self, comm: Object, data: *mut c_void, size: c_int, mr: Object) -> Result<Option<Object>> {
        /// As in FlagCX's memory: what lies behind the `int` is not its own.
        #[repr(C, align(8))]
        struct Step(c_int, u32);
        let (mut data, mut size, mut tags, mut mr) = (data, Step(size, 0xdead_beef), [0; 8], mr.0);
        let mut request = null_mut();
        let size = (&raw mut size).cast::<usize>();
        let tags = tags.as_mut_ptr();
        call!(self.irecv(comm.0, 1, &raw mut data, size, tags, &raw mut mr, null_mut(), &raw mut request))?;
        Ok(Object::of(request))
    }

    /// Whether a request is done, and the bytes of its message.
    pub fn test(&self, request: Object) -> Result<Option<c_int>> {
        let (mut done, mut size) = (0, -1);
        call!(self.test(request.0, &raw mut done, &raw mut size))?;
        Ok((done != 0).then_some(size))
    }

    /// Closes the communicator that `end` names.
    pub fn close(&self, end: End, comm: Object) -> Result<()> {
        match end {
            End::Send => call!(self.closeSend(comm.0)),
            End::Recv => call!(self.closeRecv(comm.0)),
            End::Listen => call!(self.closeListen(comm.0)),
        }
    }
}

impl FlagCxHandle {
    /// What FlagCX's connecting side does when the handle has arrived: its communicator's address goes over the last 8
    /// bytes.
    pub fn arrived(self, comm: usize) -> Self {
        let mut bytes = self.0;
        bytes[56..].copy_from_slice(&comm.to_ne_bytes());
        Self(bytes)
    }
}
