//! The list that was probably meant when a list selects no interface.

use super::Interface;
use crate::os::config::{is_blank_or_quote, nearest};

/// The nearest list in the syntax of `NCCL_SOCKET_IFNAME`, in which NCCL takes every character literally: blanks,
/// quotes, a second `=` and other separators. None when the list cannot be improved.
pub(crate) fn meant(all: &[Interface], text: &str) -> Option<String> {
    meant_with(all, text, super::index_of)
}

fn meant_with(all: &[Interface], text: &str, index_of: impl Fn(&str) -> u32) -> Option<String> {
    let bare = text.trim_matches(is_blank_or_quote);
    let names = bare.trim_start_matches(['^', '=']);
    let signs = &bare[..bare.len() - names.len()];
    let mut sign = String::new();
    // Each counts once, the caret first.
    sign.extend(['^', '='].into_iter().filter(|one| signs.contains(*one)));
    let mut found: Vec<String> = Vec::new();
    for name in names.split(|c: char| is_blank_or_quote(c) || matches!(c, ',' | ';')).filter(|name| !name.is_empty()) {
        let name = real_name(all, name, &index_of);
        if !found.contains(&name) {
            found.push(name);
        }
    }
    let list = format!("{sign}{}", found.join(","));
    (!found.is_empty() && list != text).then_some(list)
}

/// The kernel's name of the interface that a name, an alternative name or an address stands for; else the nearest name;
/// else the name itself.
fn real_name(all: &[Interface], name: &str, index_of: &impl Fn(&str) -> u32) -> String {
    let by = |is_it: &dyn Fn(&Interface) -> bool| all.iter().find(|one| is_it(one)).map(|one| one.name.clone());
    let is_prefix = all.iter().any(|one| one.name.starts_with(name));
    if is_prefix {
        return name.to_owned();
    }
    let index = index_of(name);
    by(&|one| index != 0 && one.index == index)
        .or_else(|| by(&|one| name.parse().is_ok_and(|ip: std::net::IpAddr| one.address.ip() == ip)))
        .or_else(|| nearest(name, all.iter().map(|one| one.name.as_str())).map(str::to_owned))
        .unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_people_write_lead_to_the_list_that_nccl_reads() {
        let one = |name: &str, index, address: [u8; 4]| Interface {
            name: name.into(),
            index,
            address: (address, 0).into(),
            mask: None,
            running: true,
        };
        let all = [one("lo", 1, [127, 0, 0, 1]), one("eth0", 2, [10, 9, 1, 1]), one("eth1", 3, [10, 9, 2, 1])];
        let meant = |text: &str| meant_with(&all, text, |name| if name == "enp4s0" { 2 } else { 0 });
        for (text, right) in [
            ("\"eth0\"", "eth0"),
            ("eth0 ", "eth0"),
            (" eth0", "eth0"),
            ("eth0, eth1", "eth0,eth1"),
            ("==eth0", "=eth0"),
            ("eth0;eth1", "eth0,eth1"),
            ("eth0 eth1", "eth0,eth1"),
            ("10.9.1.1", "eth0"),
            ("Eth0", "eth0"),
            ("enp4s0", "eth0"),
            ("=enp4s0,eth1", "=eth0,eth1"),
            ("ehto", "eth0"),
        ] {
            assert_eq!(meant(text).as_deref(), Some(right), "{text}");
        }
        for text in ["eth0", "=eth0,eth1", "^=eth0", "^", "=", "", "wlan9999"] {
            assert_eq!(meant(text), None, "{text}");
        }
    }
}
