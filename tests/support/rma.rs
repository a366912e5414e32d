//! Plays NCCL's one-sided side: drives `ncclRmaPlugin_v14` to `_v16` of a plugin as NCCL's threads do.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use towline::host::{Code, Plugin, Properties, Result, log};
use towline::nccl::ffi;

use super::flagcx::Object;

/// The table of an opened plugin in one version.
#[derive(Clone)]
pub struct Rma {
    table: Table,
    // Keeps the library mapped.
    _plugin: Plugin,
}

#[derive(Clone, Copy)]
enum Table {
    V14(&'static ffi::ncclRma_v14_t),
    V15(&'static ffi::ncclRma_v15_t),
    V16(&'static ffi::ncclRma_v16_t),
}

/// What carries a listener's address to the other ranks.
pub type RmaHandle = [u8; ffi::NCCL_NET_HANDLE_MAXSIZE as usize];

/// The contexts of a block.
const CONTEXTS: u8 = 4;

/// A place in registered memory.
#[derive(Clone, Copy, Debug)]
pub struct Spot {
    /// The registration; none where there are no bytes.
    pub mr: Option<Object>,
    /// The place in it.
    pub offset: u64,
}

/// A signal behind a put.
#[derive(Clone, Copy, Debug)]
pub struct PutSignal {
    /// Where its number is.
    pub at: Spot,
    /// What to add; none to add 1 by the operation of its own.
    pub value: Option<u64>,
}

// SAFETY: the table is never written, and its functions take calls from any thread.
unsafe impl Send for Rma {}
// SAFETY: see above.
unsafe impl Sync for Rma {}

/// Calls an entry that all versions have alike.
macro_rules! call {
    ($self:ident . $entry:ident ( $($argument:expr),* $(,)? )) => {{
        let entry = match $self.table {
            Table::V14(table) => table.$entry,
            Table::V15(table) => table.$entry,
            Table::V16(table) => table.$entry,
        };
        match entry {
            // SAFETY: the arguments are as NCCL gives them: places that live through the call and pointers of the
            // plugin's own, whose misuse is the plugin's to refuse. The library is mapped.
            Some(entry) => Code::check(unsafe { entry($($argument),*) }),
            None => Err(Code::NotOffered(stringify!($entry))),
        }
    }};
}

/// Calls an entry that has flags before its request since v15.
macro_rules! call_with_flags {
    ($self:ident . $entry:ident ( $($argument:expr),* ; $request:expr )) => {{
        let code = match $self.table {
            // SAFETY: as in `call`.
            Table::V14(table) => table.$entry.map(|entry| unsafe { entry($($argument),*, $request) }),
            // SAFETY: as in `call`. Flag 1: more follow.
            Table::V15(table) => table.$entry.map(|entry| unsafe { entry($($argument),*, 1, $request) }),
            // SAFETY: as in `call`.
            Table::V16(table) => table.$entry.map(|entry| unsafe { entry($($argument),*, 0, $request) }),
        };
        code.map_or(Err(Code::NotOffered(stringify!($entry))), Code::check)
    }};
}

impl Spot {
    fn raw(self) -> *mut c_void {
        self.mr.map_or(null_mut(), Object::raw)
    }
}

impl Rma {
    /// The table of `plugin` in this version, if it has one.
    pub fn of(plugin: &Plugin, version: u32) -> Option<Self> {
        let symbol = plugin.symbol(&format!("ncclRmaPlugin_v{version}"))?;
        let table = match version {
            // SAFETY: by its name it is this table, which is never written, in a library that `self` keeps mapped.
            14 => Table::V14(unsafe { &*symbol.cast() }),
            // SAFETY: as above.
            15 => Table::V15(unsafe { &*symbol.cast() }),
            // SAFETY: as above.
            16 => Table::V16(unsafe { &*symbol.cast() }),
            _ => return None,
        };
        Some(Self { table, _plugin: plugin.clone() })
    }

    /// Begins for the communicator with this id.
    pub fn init(&self, comm_id: u64) -> Result<Object> {
        let mut ctx = null_mut();
        call!(self.init(&raw mut ctx, comm_id, log::logger()))?;
        Object::of(ctx).ok_or(Code::NotOffered("a context"))
    }

    /// How many devices there are.
    pub fn devices(&self) -> Result<c_int> {
        let mut count = 0;
        call!(self.devices(&raw mut count))?;
        Ok(count)
    }

    /// The plugin's properties of a device, and its `netDeviceType`.
    pub fn properties(&self, dev: c_int) -> Result<(Properties, u32)> {
        // SAFETY: integers, floats and pointers, for which zero is a value.
        let mut raw: ffi::ncclNetProperties_v12_t = unsafe { std::mem::zeroed() };
        call!(self.getProperties(dev, &raw mut raw))?;
        // SAFETY: the strings are NULL or the plugin's, which keeps them while it is mapped.
        Ok((unsafe { Properties::from_v12(&raw) }, raw.netDeviceType))
    }

    /// Begins to listen.
    pub fn listen(&self, ctx: Object, dev: c_int) -> Result<(Object, RmaHandle)> {
        let (mut handle, mut comm) = ([0_u8; ffi::NCCL_NET_HANDLE_MAXSIZE as usize], null_mut());
        call!(self.listen(ctx.raw(), dev, handle.as_mut_ptr().cast(), &raw mut comm))?;
        Object::of(comm).map(|comm| (comm, handle)).ok_or(Code::NotOffered("a listener"))
    }

    /// Connects all ranks, whose handles these are; it waits. The context is not the plugin's, as in NCCL 2.30.7.
    pub fn connect(&self, handles: &[RmaHandle], rank: usize, listener: Object) -> Result<Object> {
        let mut handles = handles.to_vec();
        let mut places: Vec<*mut c_void> = handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let (ranks, rank, mut comm) = (places.len() as c_int, rank as c_int, null_mut());
        let not_ours = 64 as *mut c_void;
        call!(self.connect(not_ours, places.as_mut_ptr(), ranks, rank, listener.raw(), &raw mut comm))?;
        Object::of(comm).ok_or(Code::NotOffered("a group"))
    }

    /// Makes a context of a group.
    pub fn create_context(&self, group: Object) -> Result<Object> {
        let mut config = ffi::ncclRmaConfig_v14_t { nContexts: CONTEXTS.into(), trafficClass: -1, rankStride: 1 };
        let mut context = null_mut();
        call!(self.createContext(group.raw(), &raw mut config, &raw mut context))?;
        Object::of(context).ok_or(Code::NotOffered("a context"))
    }

    /// Registers memory, an address and a size, of this kind.
    ///
    /// # Safety
    /// It stays valid until the registration has ended or the group is closed.
    pub unsafe fn reg_mr(&self, group: Object, memory: (usize, usize), kind: c_int, flags: u64) -> Result<Object> {
        let ((address, size), mut mr) = (memory, null_mut());
        call!(self.regMrSym(group.raw(), address as *mut c_void, size, kind, flags, &raw mut mr))?;
        Object::of(mr).ok_or(Code::NotOffered("a registration"))
    }

    /// Offers memory by a file of DMA-BUF that is none.
    pub fn reg_mr_dmabuf(&self, group: Object, (address, size): (usize, usize)) -> Result<Object> {
        let mut mr = null_mut();
        let address = address as *mut c_void;
        call!(self.regMrSymDmaBuf(group.raw(), address, size, ffi::NCCL_PTR_DMABUF as c_int, 0, -1, 0, &raw mut mr))?;
        Object::of(mr).ok_or(Code::NotOffered("a registration"))
    }

    /// Ends a registration.
    pub fn dereg_mr(&self, group: Object, mr: Object) -> Result<()> {
        call!(self.deregMrSym(group.raw(), mr.raw()))
    }

    /// Begins a put, with a signal behind it if there is one.
    pub fn put(
        &self,
        context: Object,
        (from, size, to): (Spot, usize, Spot),
        rank: u32,
        signal: Option<PutSignal>,
    ) -> Result<Object> {
        let mut request = null_mut();
        let (context, source, target) = (context.raw(), from.raw(), to.raw());
        // Of the block's contexts any: they share all promises.
        let number = (from.offset % u64::from(CONTEXTS)) as c_int;
        match signal {
            None => call_with_flags!(self.iput(
                context, number, from.offset, source, size, to.offset, target, rank; &raw mut request
            ))?,
            Some(PutSignal { at, value }) => {
                let operation = if value.is_some() { ffi::NCCL_RMA_SIGNAL_ADD } else { ffi::NCCL_RMA_SIGNAL_INC };
                // With an increment the value means nothing.
                let added = value.unwrap_or(77);
                // What NCCL asks of strong ones Towline promises of weak ones, too.
                let is_strong = value.is_none();
                call_with_flags!(self.iputSignal(
                    context, number, from.offset, source, size, to.offset, target, rank, at.offset, at.raw(), added,
                    operation, is_strong; &raw mut request
                ))?;
            }
        }
        Object::of(request).ok_or(Code::NotOffered("a request"))
    }

    /// Begins a get.
    pub fn get(&self, context: Object, (from, size, to): (Spot, usize, Spot), rank: u32) -> Result<Object> {
        let mut request = null_mut();
        call_with_flags!(self.iget(
            context.raw(), 0, from.offset, from.raw(), size, to.offset, to.raw(), rank; &raw mut request
        ))?;
        Object::of(request).ok_or(Code::NotOffered("a request"))
    }

    /// Flushes what has come; none when there is nothing to wait for.
    pub fn flush(&self, context: Object, mr: Object, rank: u32) -> Result<Option<Object>> {
        let mut request = null_mut();
        call!(self.iflush(context.raw(), 0, mr.raw(), rank, &raw mut request))?;
        Ok(Object::of(request))
    }

    /// Whether a request is done.
    pub fn test(&self, group: Object, request: Object) -> Result<bool> {
        let mut done = -1;
        call!(self.test(group.raw(), request.raw(), &raw mut done))?;
        Ok(done != 0)
    }

    /// Whether the plugin knows of an error.
    pub fn has_error(&self, context: Object) -> Result<bool> {
        let mut has_error = false;
        call!(self.queryLastError(context.raw(), &raw mut has_error))?;
        Ok(has_error)
    }

    /// Whether any signal makes all puts visible; only v16 has it.
    pub fn signals_flush_all(&self, group: Object) -> Option<Result<bool>> {
        let Table::V16(table) = self.table else { return None };
        let mut answer = 0xff_u8;
        // SAFETY: as in `call`; the struct has one byte.
        let code = unsafe { table.getRmaProperties?(group.raw(), (&raw mut answer).cast()) };
        Some(Code::check(code).map(|()| answer != 0))
    }

    /// Ends a context.
    pub fn destroy_context(&self, context: Object) -> Result<()> {
        call!(self.destroyContext(context.raw()))
    }

    /// Closes a group.
    pub fn close_group(&self, group: Object) -> Result<()> {
        call!(self.closeColl(group.raw()))
    }

    /// Closes a listener.
    pub fn close_listener(&self, listener: Object) -> Result<()> {
        call!(self.closeListen(listener.raw()))
    }

    /// Ends what `init` began.
    pub fn finalize(&self, ctx: Object) -> Result<()> {
        call!(self.finalize(ctx.raw()))
    }
}
