//! The kind of a network interface, as far as it decides whether its speed is meaningful and whether it has a wire of
//! its own.
//!
//! Some drivers report a speed that is unrelated to the path: veth always reports 10 Gb/s, tun and tap 10 Mb/s or 10
//! Gb/s. NCCL chooses the number of channels by the speed, so such a value does as much harm as a wrong one. The
//! driver's name comes from `ethtool -i` (`ETHTOOL_GDRVINFO`), because sysfs does not have it for virtual interfaces.

use std::ffi::c_char;
use std::mem::size_of;
use std::os::fd::AsRawFd;

/// Drivers whose speed is a constant in their source.
const CLAIMS: [&str; 5] = ["veth", "tun", "dummy", "ifb", "netdevsim"];

/// Drivers that put packets into other packets: what they send leaves by another interface of the host.
const OVERLAYS: [&str; 10] = ["vxlan", "geneve", "wireguard", "tun", "gre", "gretap", "ipip", "ip6tnl", "sit", "xfrm"];

/// Hardware types of tunnels (`ARPHRD_*` in `linux/if_arp.h`): none, IPIP, IP6IP6, SIT, IPGRE, IP6GRE.
const TUNNELS: [i64; 6] = [65534, 768, 769, 776, 778, 823];

/// Whether this driver reports the same speed whatever the path carries.
pub(crate) fn claims_its_speed(driver: &str) -> bool {
    CLAIMS.contains(&driver)
}

/// Whether an interface with this driver, `DEVTYPE` of its uevent, or hardware type is an overlay.
pub(crate) fn is_overlay(driver: Option<&str>, devtype: Option<&str>, hardware: Option<i64>) -> bool {
    driver.into_iter().chain(devtype).any(|kind| OVERLAYS.contains(&kind))
        || hardware.is_some_and(|kind| TUNNELS.contains(&kind))
}

/// `SIOCETHTOOL` of `linux/sockios.h`.
const SIOCETHTOOL: libc::Ioctl = 0x8946;

/// `ETHTOOL_GDRVINFO` of `linux/ethtool.h`.
const ETHTOOL_GDRVINFO: u32 = 3;

/// `struct ethtool_drvinfo` of `linux/ethtool.h`.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

const _: () = assert!(size_of::<DriverInfo>() == 196);

/// The driver of an interface of this network namespace, by `ethtool`. None when the kernel does not report it.
pub(crate) fn driver(name: &str) -> Option<String> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).ok()?;
    let mut info = DriverInfo { command: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
    // SAFETY: all zeroes is a valid value of this struct of numbers and a union of plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut info).cast();
    // SAFETY: the kernel reads `request` and writes at most a `struct ethtool_drvinfo` to `info`; both outlive the
    // call.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
    if answer != 0 {
        return None;
    }
    let length = info.driver.iter().position(|byte| *byte == 0).unwrap_or(info.driver.len());
    let driver = std::str::from_utf8(&info.driver[..length]).ok()?;
    (!driver.is_empty()).then(|| driver.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_that_only_claim_a_speed_and_overlays_are_known_by_name() {
        assert!(claims_its_speed("veth") && claims_its_speed("tun") && !claims_its_speed("mlx5_core"));
        assert!(is_overlay(Some("vxlan"), None, Some(1)) && is_overlay(None, Some("wireguard"), None));
        assert!(is_overlay(None, None, Some(65534)) && !is_overlay(Some("macvlan"), Some("vlan"), Some(1)));
    }

    #[test]
    fn an_interface_that_is_not_there_has_no_driver() {
        assert_eq!(driver("nosuchinterface"), None);
        assert_eq!(driver("a name that is too long for the kernel"), None);
    }
}
