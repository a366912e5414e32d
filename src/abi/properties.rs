//! A device's properties in the shape that each version of the interface has for them.

use std::ffi::c_int;
use std::ptr;

use super::guard::guard;
use super::pointer::Out;
use crate::nccl::ffi::{self, ncclNetDeviceType, ncclResult_t};
use crate::os::error::{Error, Result};
use crate::plugin::devices::DeviceProperties;
use crate::plugin::facade;

/// One version's struct of device properties.
pub(super) trait Properties {
    /// The latency of TCP that this version reports to NCCL, in microseconds.
    const TCP_LATENCY_US: f32;
    /// The struct for device number `dev`.
    fn new(dev: c_int, device: &'static DeviceProperties) -> Self;
}

/// `getProperties` of every version.
pub(super) unsafe extern "C" fn get_properties<P: Properties, const API: u8>(
    dev: c_int,
    props: *mut P,
) -> ncclResult_t {
    guard::<API>("getProperties", || {
        // SAFETY: NCCL's promise: null or a place for this version's struct.
        let mut props = unsafe { Out::new(props, "props") }?;
        props.set(P::new(dev, facade::device_properties(dev)?));
        Ok(())
    })
}

/// Implements [`Properties`] for one struct: the latency of TCP, its fields by name, and where each comes from.
macro_rules! properties {
    ($type:ident, $latency:expr; $($field:ident),*) => {
        impl Properties for ffi::$type {
            const TCP_LATENCY_US: f32 = $latency;

            fn new(dev: c_int, device: &'static DeviceProperties) -> Self {
                // Only members need the number, and not every version reports them.
                let _ = dev;
                Self {
                    name: device.name.as_ptr(),
                    pciPath: device.pci_path.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
                    guid: device.guid,
                    ptrSupport: device.ptr_support,
                    speed: device.speed_mbps,
                    port: device.port,
                    maxComms: device.max_comms,
                    $($field: properties!(@$field device dev)),*
                }
            }
        }
    };
    (@latency $device:ident $dev:ident) => { if $device.is_tcp { Self::TCP_LATENCY_US } else { 0.0 } };
    (@maxRecvs $device:ident $dev:ident) => { $device.max_recvs };
    (@netDeviceType $device:ident $dev:ident) => { HOST };
    (@netDeviceVersion $device:ident $dev:ident) => { ffi::NCCL_NET_DEVICE_INVALID_VERSION };
    (@regIsGlobal $device:ident $dev:ident) => { c_int::from($device.reg_is_global) };
    (@forceFlush $device:ident $dev:ident) => { c_int::from($device.force_flush) };
    (@vProps $device:ident $dev:ident) => { VDevice::of(&$device.members, $dev) };
    (@maxP2pBytes $device:ident $dev:ident) => { $device.max_p2p_bytes };
    (@maxCollBytes $device:ident $dev:ident) => { $device.max_coll_bytes };
    (@maxMultiRequestSize $device:ident $dev:ident) => { $device.max_multi_request };
    (@railId $device:ident $dev:ident) => { $device.rail };
    (@planeId $device:ident $dev:ident) => { $device.plane };
}

/// Leaves NCCL's own estimate in force, as its Socket does.
const NCCLS_OWN: f32 = 0.0;

/// The latency that NCCL 2.12 to 2.19 get, measured with 2.18.3 and 2.19.3. Later releases use a later version of the
/// interface.
///
/// These releases load no tuner from the network's library: only the speed, which sets the number of channels, and the
/// latency steer their choice. `graph/tuning.cc` adds the latency to each step between nodes, for Simple twice. So a
/// larger one leads to trees instead of rings, and to LL instead of Simple. Both send fewer messages, and one thread of
/// NCCL's handles those of all channels. At 0, all-reduces of 256 and 512 KiB, and all-gathers and reduce-scatters of
/// 128 KiB, took 1.3 to 2 times as long as over the best tuning of Socket; at 30, 0.8 to 1.1 times. Values from 28 to 40
/// do the same. The price is that NCCL 2.18 uses trees with LL for all-reduces of 8 to 32 KiB, which take 1.0 to 1.4
/// times as long as with Socket's best tuning (one H200, `benches/nccl_networks.sh`).
///
/// All ranks must get the same value, or they choose differently and the job hangs: this is a constant.
const WITHOUT_TUNER: f32 = 30.0;

/// No code on the GPU moves data for us.
const HOST: ncclNetDeviceType = ffi::NCCL_NET_DEVICE_HOST;

properties!(ncclNetProperties_v4_t, NCCLS_OWN;);
properties!(ncclNetProperties_v6_t, WITHOUT_TUNER; latency, maxRecvs);
properties!(ncclNetProperties_v7_t, WITHOUT_TUNER; latency, maxRecvs, netDeviceType, netDeviceVersion);
properties!(ncclNetProperties_v8_t, NCCLS_OWN; latency, maxRecvs, netDeviceType, netDeviceVersion, regIsGlobal);
properties!(ncclNetProperties_v9_t, NCCLS_OWN; latency, maxRecvs, netDeviceType, netDeviceVersion, regIsGlobal, forceFlush,
    vProps, maxP2pBytes, maxCollBytes);
properties!(ncclNetProperties_v11_t, NCCLS_OWN; latency, maxRecvs, netDeviceType, netDeviceVersion, regIsGlobal, forceFlush,
    vProps, maxP2pBytes, maxCollBytes, maxMultiRequestSize);
properties!(ncclNetProperties_v12_t, NCCLS_OWN; latency, maxRecvs, netDeviceType, netDeviceVersion, regIsGlobal, forceFlush,
    vProps, maxP2pBytes, maxCollBytes, maxMultiRequestSize, railId, planeId);

/// The members of a virtual device: up to 4 in v9 to v11, 8 in v12.
pub(super) trait VDevice: Sized {
    /// The struct that names `members`; device `dev` alone where they do not fit.
    fn of(members: &[i32], dev: c_int) -> Self;
    /// The numbers of the members.
    fn members(&self) -> Result<&[c_int]>;
}

macro_rules! vdevice {
    ($type:ident) => {
        impl VDevice for ffi::$type {
            fn of(members: &[i32], dev: c_int) -> Self {
                let mut devs = Self { ndevs: 0, devs: Default::default() }.devs;
                let members = if (1..=devs.len()).contains(&members.len()) { members } else { &[dev] };
                devs[..members.len()].copy_from_slice(members);
                // At most 8.
                Self { ndevs: members.len() as c_int, devs }
            }

            fn members(&self) -> Result<&[c_int]> {
                let most = self.devs.len();
                let n = usize::try_from(self.ndevs).ok().filter(|n| (1..=most).contains(n));
                n.map(|n| &self.devs[..n]).ok_or_else(|| {
                    Error::argument(format!("a virtual device of {} devices; 1 to {most} are possible", self.ndevs))
                })
            }
        }
    };
}

vdevice!(ncclNetVDeviceProps_v9_t);
vdevice!(ncclNetVDeviceProps_v12_t);

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use proptest::prelude::*;

    use super::*;

    fn device(members: Vec<i32>) -> &'static DeviceProperties {
        Box::leak(Box::new(DeviceProperties {
            name: c"eth7".into(),
            pci_path: None,
            guid: 0x1122_3344_5566_7788,
            ptr_support: 5,
            reg_is_global: true,
            force_flush: false,
            speed_mbps: 25_000,
            port: 1,
            is_tcp: true,
            max_comms: 65_536,
            max_recvs: 8,
            members,
            max_p2p_bytes: 1 << 40,
            max_coll_bytes: 1 << 39,
            max_multi_request: 1,
            rail: -1,
            plane: 3,
        }))
    }

    #[test]
    fn every_version_tells_the_same_device() {
        let device = device(vec![2]);
        macro_rules! check {
            ($($type:ident)*) => { $({
                let p = ffi::$type::new(2, device);
                // SAFETY: the name points into `device`, which is never freed.
                assert_eq!(unsafe { CStr::from_ptr(p.name) }, c"eth7");
                assert!(p.pciPath.is_null());
                assert_eq!((p.guid, p.ptrSupport, p.speed), (0x1122_3344_5566_7788, 5, 25_000));
                assert_eq!((p.port, p.maxComms), (1, 65_536));
            })* };
        }
        check!(ncclNetProperties_v4_t ncclNetProperties_v5_t ncclNetProperties_v6_t ncclNetProperties_v7_t
            ncclNetProperties_v8_t ncclNetProperties_v9_t ncclNetProperties_v10_t ncclNetProperties_v11_t
            ncclNetProperties_v12_t);
        let p = ffi::ncclNetProperties_v12_t::new(2, device);
        assert_eq!((p.latency.to_bits(), p.maxRecvs), (0, 8));
        assert_eq!((p.regIsGlobal, p.forceFlush, p.netDeviceType, p.netDeviceVersion), (1, 0, 0, 0));
        assert_eq!((p.vProps.ndevs, p.vProps.devs[0]), (1, 2));
        assert_eq!((p.maxP2pBytes, p.maxCollBytes, p.maxMultiRequestSize), (1 << 40, 1 << 39, 1));
        assert_eq!((p.railId, p.planeId), (-1, 3));
    }

    #[test]
    fn members_that_an_older_struct_cannot_hold_become_the_device_alone() {
        let device = device(vec![0, 1, 2, 3, 4]);
        let old = ffi::ncclNetProperties_v11_t::new(9, device).vProps;
        assert_eq!((old.ndevs, old.devs[0]), (1, 9));
        let new = ffi::ncclNetProperties_v12_t::new(9, device).vProps;
        assert_eq!((new.ndevs, &new.devs[..5]), (5, &[0, 1, 2, 3, 4][..]));
    }

    #[test]
    fn a_virtual_device_has_as_many_members_as_its_struct_or_fewer_and_at_least_one() {
        for (ndevs, good) in [(-1, false), (0, false), (1, true), (4, true), (5, false)] {
            let props = ffi::ncclNetVDeviceProps_v9_t { ndevs, devs: [3, 2, 1, 0] };
            assert_eq!(props.members().is_ok_and(|m| m == &[3, 2, 1, 0][..ndevs as usize]), good, "{ndevs}");
        }
    }

    proptest! {
        /// The latency decides the algorithm: ranks whose devices of one backend differ must get the same value.
        #[test]
        fn the_latency_is_the_same_whatever_the_device(
            speed_mbps: i32, guid: u64, port: i32, ptr_support: i32, max_comms: i32, number in 0..16i32
        ) {
            let other = device(vec![number]).clone();
            let tcp = Box::leak(Box::new(DeviceProperties { speed_mbps, guid, port, ptr_support, max_comms, ..other.clone() }));
            let rdma = Box::leak(Box::new(DeviceProperties { is_tcp: false, ..tcp.clone() }));
            macro_rules! latencies {
                ($of:expr; $($type:ident)*) => { [$( ffi::$type::new(number, $of).latency ),*] };
            }
            macro_rules! all {
                ($of:expr) => {
                    latencies!($of; ncclNetProperties_v6_t ncclNetProperties_v7_t ncclNetProperties_v8_t
                        ncclNetProperties_v9_t ncclNetProperties_v11_t ncclNetProperties_v12_t)
                };
            }
            prop_assert_eq!(all!(tcp), [30.0, 30.0, 0.0, 0.0, 0.0, 0.0]);
            prop_assert_eq!(all!(rdma), [0.0; 6]);
        }
    }
}
