//! Duplicate address detection of IPv6 (RFC 4862): an address cannot be used while the kernel asks on the link whether
//! another host has it, and never if one has.

use std::net::{IpAddr, Ipv6Addr};

use super::Interface;

/// `IFA_F_DADFAILED` and `IFA_F_TENTATIVE` of `linux/if_addr.h`.
const FAILED: u32 = 0x08;
const TENTATIVE: u32 = 0x40;

fn table() -> String {
    std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default()
}

/// The flags of an address in the kernel's table: address, index, prefix, scope, flags, name, all but the last in
/// hexadecimal.
fn flags_of(table: &str, address: Ipv6Addr) -> u32 {
    let wanted = format!("{:032x}", address.to_bits());
    let line = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.first() == Some(&&*wanted));
    line.and_then(|words| u32::from_str_radix(words.get(4)?, 16).ok()).unwrap_or(0)
}

/// Whether the kernel is still checking this address for duplicates.
pub(crate) fn is_tentative(address: IpAddr) -> bool {
    let IpAddr::V6(address) = address else { return false };
    flags_of(&table(), address) & (TENTATIVE | FAILED) == TENTATIVE
}

/// Leaves out the addresses that another host also has, and logs each once.
pub(super) fn leave_out(all: &mut Vec<Interface>) {
    let table = table();
    all.retain(|one| {
        let IpAddr::V6(address) = one.address.ip() else { return true };
        let is_failed = flags_of(&table, address) & FAILED != 0;
        if is_failed && super::super::log::once_per(("a duplicate address", address)).is_some() {
            tracing::warn!(
                "{address} of {} is not used: another host on the link has the same address (ip -6 address show dadfailed)",
                one.name
            );
        }
        !is_failed
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_of_an_address_are_found() {
        let table = "fd000009000000000000000000000001 02 40 00 48     eth0\n\
                     fd000009000000000000000000000003 02 40 00 c0     eth0\n\
                     00000000000000000000000000000001 01 80 10 80       lo\n";
        let flags = |address: &str| flags_of(table, address.parse().expect("an address"));
        assert_eq!(flags("fd00:9::1"), TENTATIVE | FAILED);
        assert_eq!(flags("fd00:9::3") & (TENTATIVE | FAILED), TENTATIVE);
        assert_eq!((flags("::1"), flags("fd00:9::4")), (0x80, 0));
        assert_eq!(flags_of("\n \nfd", Ipv6Addr::LOCALHOST), 0);
    }
}
