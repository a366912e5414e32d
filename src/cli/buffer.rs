//! Buffers that a plugin moves: in host memory, or in GPU memory with a copy in host memory to fill and to check.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::rc::Rc;

use crate::host::{Code, Context, Memory, Mr, PTR_CUDA, PTR_DMABUF, RecvComm, SendComm};
use crate::os::error::{Error, Result};

use super::cuda::{Gpu, GpuMemory};

/// Where buffers are, and how a plugin reaches them.
#[derive(Clone, Default)]
pub(crate) struct Place(Option<OnGpu>);

#[derive(Clone)]
struct OnGpu {
    gpu: Rc<Gpu>,
    /// What the device's `ptrSupport` offers.
    offers: c_int,
}

impl Place {
    /// GPU number `index`, if one is wanted, for a device of a plugin; else host memory.
    ///
    /// # Errors
    /// When the device does not take GPU memory, or there is no such GPU.
    pub(crate) fn choose(index: Option<i32>, context: &Context, device: i32) -> Result<Self> {
        let Some(index) = index else { return Ok(Self::default()) };
        let asking = |code: Code| code.while_doing("asking for the device's properties");
        let properties = context.properties(device).map_err(asking)?;
        let offers = properties.ptr_support & (PTR_CUDA | PTR_DMABUF);
        if offers == 0 {
            return Err(Error::usage(format!("device {} takes no GPU memory, only host memory", properties.name))
                .with_hint(
                    "GPU memory needs RDMA with nvidia_peermem or DMA-BUF, which `towline doctor` looks for; without \
                     --gpu the buffers are in host memory",
                ));
        }
        Ok(Self(Some(OnGpu { gpu: Gpu::open(index)?, offers })))
    }
}

/// A connection that registers memory.
pub(crate) trait Registers {
    /// By its address.
    fn by_address(&self, data: *mut c_void, size: usize, kind: c_int) -> std::result::Result<Mr, Code>;
    /// By its DMA-BUF descriptor, from the first byte on.
    fn by_descriptor(&self, data: *mut c_void, size: usize, kind: c_int, fd: c_int) -> std::result::Result<Mr, Code>;
}

macro_rules! registers {
    ($($comm:ident)+) => {$(
        impl Registers for $comm {
            fn by_address(&self, data: *mut c_void, size: usize, kind: c_int) -> std::result::Result<Mr, Code> {
                self.reg_mr(data, size, kind)
            }

            fn by_descriptor(&self, data: *mut c_void, size: usize, kind: c_int, fd: c_int) -> std::result::Result<Mr, Code> {
                self.reg_mr_dmabuf((data, size), kind, (0, fd))
            }
        }
    )+};
}

registers!(SendComm RecvComm);

/// A buffer for transfers. Dropping it frees the memory: registrations and connections must have ended.
pub(crate) struct Buffer {
    host: Memory,
    device: Option<(GpuMemory, OnGpu)>,
}

impl Buffer {
    /// `len` bytes in a place.
    pub(crate) fn new(len: usize, place: &Place) -> Result<Self> {
        let on_gpu = |on: &OnGpu| Ok((GpuMemory::new(&on.gpu, len)?, on.clone()));
        Ok(Self { host: Memory::new(len), device: place.0.as_ref().map(on_gpu).transpose()? })
    }

    /// How many bytes.
    pub(crate) fn len(&self) -> usize {
        self.host.len()
    }

    /// The address of byte `offset`, for a plugin.
    pub(crate) fn at(&self, offset: usize) -> *mut c_void {
        match &self.device {
            Some((memory, _)) => memory.address().wrapping_byte_add(offset),
            None => self.host.at(offset),
        }
    }

    /// The bytes in host memory: the buffer itself, or its copy.
    pub(crate) fn host(&self) -> &Memory {
        &self.host
    }

    /// The same bytes, mutable; [`Buffer::upload`] copies changes into the buffer.
    pub(crate) fn host_mut(&mut self) -> &mut [u8] {
        self.host.bytes_mut()
    }

    /// Whether what was received must be flushed before it is read.
    pub(crate) fn is_flushed(&self) -> bool {
        self.device.is_some()
    }

    /// Copies a part of the host copy into GPU memory; a buffer in host memory needs nothing.
    pub(crate) fn upload(&self, range: Range<usize>) -> Result<()> {
        self.device.as_ref().map_or(Ok(()), |(memory, _)| memory.write(range.start, &self.host.bytes()[range]))
    }

    /// Copies a part of GPU memory into the host copy; a buffer in host memory needs nothing.
    pub(crate) fn download(&mut self, range: Range<usize>) -> Result<()> {
        let Self { host, device } = self;
        device.as_ref().map_or(Ok(()), |(memory, _)| memory.read(range.start, &mut host.bytes_mut()[range]))
    }

    /// Registers all of it: GPU memory through DMA-BUF where the device and the driver can, else by its address, as
    /// NCCL does.
    pub(crate) fn register(&self, comm: &impl Registers) -> Result<Mr> {
        let registering = |code: Code| code.while_doing("registering memory");
        let Some((memory, on)) = &self.device else {
            return comm.by_address(self.at(0), self.len(), crate::host::PTR_HOST).map_err(registering);
        };
        let registering = |code: Code| code.while_doing("registering GPU memory");
        if on.offers & PTR_DMABUF != 0 {
            let through = memory.export().and_then(|fd| match fd {
                Some(fd) => comm.by_descriptor(self.at(0), self.len(), PTR_CUDA, fd.as_raw_fd()).map_err(registering),
                None => Err(Error::usage("the CUDA driver has no DMA-BUF descriptors")
                    .with_hint("they came with CUDA 11.7; update the driver, or load nvidia_peermem")),
            });
            if through.is_ok() || on.offers & PTR_CUDA == 0 {
                return through;
            }
        }
        comm.by_address(self.at(0), self.len(), PTR_CUDA).map_err(registering)
    }

    /// Whether the guards around the part in host memory are unchanged.
    pub(crate) fn guards_intact(&self) -> bool {
        self.host.guards_intact()
    }
}
