//! Device properties of every API version as one struct.
//!
//! Guarantees: a field that a version does not have holds what NCCL assumes for it.

use std::ffi::{CStr, c_char};

use crate::nccl::ffi;

/// A plugin's properties of one device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Properties {
    /// The device's name, as shown in NCCL's log.
    pub name: String,
    /// Its PCI directory below /sys, when it has one.
    pub pci_path: Option<String>,
    /// Equal for the functions of one physical card.
    pub guid: u64,
    /// `NCCL_PTR_HOST`, `NCCL_PTR_CUDA`, `NCCL_PTR_DMABUF` as bits.
    pub ptr_support: i32,
    /// v8 and later: a registration holds for every connection. NCCL assumes not.
    pub reg_is_global: bool,
    /// v9 and later: flush after every receive into GPU memory.
    pub force_flush: bool,
    /// Megabits per second.
    pub speed_mbps: i32,
    /// Port number.
    pub port: i32,
    /// v5 and later: microseconds, 0 when unknown.
    pub latency_us: f32,
    /// The most connections.
    pub max_comms: i32,
    /// v5 and later: the largest group of receives. One before.
    pub max_recvs: i32,
    /// v7 and later: what moves the data, `NCCL_NET_DEVICE_HOST` before.
    pub device_type: u32,
    /// v7 and later.
    pub device_version: i32,
    /// v9 and later: the physical devices behind this one. Empty before.
    pub members: Vec<i32>,
    /// v9 and later: the largest message, 0 when the version does not contain it.
    pub max_p2p_bytes: usize,
    /// v9 and later: the largest collective message, 0 when the version does not contain it.
    pub max_coll_bytes: usize,
    /// v11 and later: requests in one multi-request. One before.
    pub max_multi_request: i32,
    /// v12: which rail of the network the device is on, −1 when unknown.
    pub rail_id: i16,
    /// v12: which plane of the network, −1 when unknown.
    pub plane_id: i16,
}

/// # Safety
/// `text` is NULL or points to a NUL-terminated string.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: the caller promises that a pointer that is not NULL points to a NUL-terminated string.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn members(count: i32, devices: &[i32]) -> Vec<i32> {
    devices[..usize::try_from(count).unwrap_or(0).min(devices.len())].to_vec()
}

/// One conversion per layout: the fields that all have, then the group of fields that came with v5, v7, v8 and so on.
macro_rules! conversion {
    ($name:ident, $raw:ty $(, $group:ident)*) => {
        /// From the layout of this version.
        ///
        /// # Safety
        /// The strings of `raw` are NULL or NUL-terminated.
        pub unsafe fn $name(raw: &$raw) -> Self {
            #[allow(unused_mut, reason = "v4 has no groups")]
            let mut all = Self {
                // SAFETY: the caller's promise.
                name: unsafe { text(raw.name) }.unwrap_or_default(),
                // SAFETY: the caller's promise.
                pci_path: unsafe { text(raw.pciPath) },
                guid: raw.guid,
                ptr_support: raw.ptrSupport,
                speed_mbps: raw.speed,
                port: raw.port,
                max_comms: raw.maxComms,
                ..Self::assumed()
            };
            $( conversion!(@$group all raw); )*
            all
        }
    };
    (@v5 $all:ident $raw:ident) => {
        $all.latency_us = $raw.latency;
        $all.max_recvs = $raw.maxRecvs;
    };
    (@v7 $all:ident $raw:ident) => {
        $all.device_type = $raw.netDeviceType;
        $all.device_version = $raw.netDeviceVersion;
    };
    (@v8 $all:ident $raw:ident) => {
        $all.reg_is_global = $raw.regIsGlobal != 0;
    };
    (@v9 $all:ident $raw:ident) => {
        $all.force_flush = $raw.forceFlush != 0;
        $all.members = members($raw.vProps.ndevs, &$raw.vProps.devs);
        $all.max_p2p_bytes = $raw.maxP2pBytes;
        $all.max_coll_bytes = $raw.maxCollBytes;
    };
    (@v11 $all:ident $raw:ident) => {
        $all.max_multi_request = $raw.maxMultiRequestSize;
    };
    (@v12 $all:ident $raw:ident) => {
        $all.rail_id = $raw.railId;
        $all.plane_id = $raw.planeId;
    };
}

impl Properties {
    /// What NCCL takes for granted where a version is silent.
    fn assumed() -> Self {
        Self {
            name: String::new(),
            pci_path: None,
            guid: 0,
            ptr_support: 0,
            reg_is_global: false,
            force_flush: false,
            speed_mbps: 0,
            port: 0,
            latency_us: 0.0,
            max_comms: 0,
            max_recvs: 1,
            device_type: ffi::NCCL_NET_DEVICE_HOST,
            device_version: 0,
            members: Vec::new(),
            max_p2p_bytes: 0,
            max_coll_bytes: 0,
            max_multi_request: 1,
            rail_id: -1,
            plane_id: -1,
        }
    }

    conversion!(from_v4, ffi::ncclNetProperties_v4_t);
    conversion!(from_v6, ffi::ncclNetProperties_v6_t, v5);
    conversion!(from_v7, ffi::ncclNetProperties_v7_t, v5, v7);
    conversion!(from_v8, ffi::ncclNetProperties_v8_t, v5, v7, v8);
    conversion!(from_v9, ffi::ncclNetProperties_v9_t, v5, v7, v8, v9);
    conversion!(from_v11, ffi::ncclNetProperties_v11_t, v5, v7, v8, v9, v11);
    conversion!(from_v12, ffi::ncclNetProperties_v12_t, v5, v7, v8, v9, v11, v12);
}
