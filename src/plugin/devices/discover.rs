//! From the host's interfaces and the configuration to the physical devices, with the reason for the log.

use super::{Plan, Rail, UNKNOWN_SPEED_MBPS};
use crate::os::config::{Config, Rails, nearest};
use crate::os::error::{Cause, Error, Result};
use crate::os::interfaces::{self, Interface, Why, Wish};
use crate::os::sysfs::Sysfs;
use std::fmt;

/// The devices of this host, and why these.
#[derive(Debug, Clone, PartialEq)]
pub struct Discovery {
    /// The physical devices in NCCL's order; at least one.
    pub plans: Vec<Plan>,
    /// Which rule chose the interfaces.
    pub why: Why,
    /// What the user should know although it is no failure: a named rail that is not there.
    pub warnings: Vec<String>,
}

/// The one line that `NCCL_DEBUG=INFO` shows.
impl fmt::Display for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("using")?;
        for (number, plan) in self.plans.iter().enumerate() {
            write!(f, " [{number}]")?;
            for (index, rail) in plan.rails.iter().enumerate() {
                let plus = if index == 0 { "" } else { "+" };
                let assumed = if rail.speed_is_known { "" } else { " assumed" };
                write!(f, "{plus}{}:{}({} Mbit/s{assumed})", rail.name, rail.address.ip(), rail.speed_mbps)?;
            }
        }
        write!(f, "; {}", self.why)
    }
}

/// The devices that the configuration asks for on this host.
///
/// # Errors
/// When no interface is left, with the interfaces that there are; or when the system does not list them.
pub fn discover(config: &Config) -> Result<Discovery> {
    let all = interfaces::list()?;
    // A look-up of NCCL_COMM_ID's host may take a while, and only one rule wants it.
    let hint = if config.socket_ifname.is_none() { config.comm_id.as_deref() } else { None };
    let wish = Wish {
        names: config.socket_ifname.as_deref(),
        family: config.socket_family,
        rendezvous: hint.and_then(interfaces::rendezvous),
    };
    from_list(&all, &wish, config, &Sysfs::default())
}

fn from_list(all: &[Interface], wish: &Wish<'_>, config: &Config, sysfs: &Sysfs) -> Result<Discovery> {
    let mut warnings = Vec::new();
    let (chosen, why) = match &config.rails {
        Rails::Single | Rails::All => interfaces::choose(all, wish),
        Rails::List(names) => {
            let (found, missing) = interfaces::named(all, names, wish.family);
            warnings.extend(missing.iter().map(|name| missing_rail(name, all)));
            (found, Why::Rails)
        }
    };
    if chosen.is_empty() {
        return Err(nothing_left(all, &why));
    }
    let rails = chosen.iter().map(|interface| rail(interface, config, sysfs));
    let plans = match config.rails {
        Rails::Single => rails.map(|rail| Plan::new(vec![rail], sysfs)).collect(),
        Rails::All | Rails::List(_) => vec![Plan::new(rails.collect(), sysfs)],
    };
    Ok(Discovery { plans, why, warnings })
}

fn rail(interface: &Interface, config: &Config, sysfs: &Sysfs) -> Rail {
    let known = sysfs.speed_mbps(&interface.name);
    Rail {
        name: interface.name.clone(),
        index: interface.index,
        address: interface.address,
        speed_mbps: known.or(config.speed).unwrap_or(UNKNOWN_SPEED_MBPS),
        speed_is_known: known.is_some(),
    }
}

fn missing_rail(name: &str, all: &[Interface]) -> String {
    if all.iter().any(|one| one.name == *name) {
        return format!("TOWLINE_RAILS names {name}, which is not running or has no usable address; it is left out");
    }
    let hint = nearest(name, all.iter().map(|one| one.name.as_str()));
    let hint = hint.map(|near| format!(" (did you mean {near}?)")).unwrap_or_default();
    format!("TOWLINE_RAILS names {name}, and there is no such interface with an address; it is left out{hint}")
}

fn nothing_left(all: &[Interface], why: &Why) -> Error {
    let mut seen: Vec<String> = Vec::new();
    for one in all {
        let state = if one.running { "" } else { " (not running)" };
        let text = format!("{}{state}", one.name);
        if !seen.contains(&text) {
            seen.push(text);
        }
    }
    let there = if seen.is_empty() { "none".to_owned() } else { seen.join(", ") };
    let hint = match why {
        Why::Asked(_) => "correct or unset NCCL_SOCKET_IFNAME (and NCCL_SOCKET_FAMILY, if set)",
        Why::Rails => "correct or unset TOWLINE_RAILS (and NCCL_SOCKET_FAMILY, if set)",
        _ => "bring an interface up and give it an address",
    };
    let what = format!("no network interface can be used: {why}; interfaces with an address: {there}");
    Error::new(Cause::System, what).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up(name: &str, address: &str) -> Interface {
        let address = std::net::SocketAddr::new(address.parse().expect("an address"), 0);
        Interface { name: name.into(), index: 2, address, mask: None, running: true }
    }

    fn host() -> Vec<Interface> {
        let down = Interface { running: false, ..up("eth9", "10.0.9.1") };
        vec![up("lo", "127.0.0.1"), up("eth0", "10.0.0.1"), up("eth1", "10.0.1.1"), down]
    }

    /// A sysfs in which eth1 has a speed and nobody else is known.
    fn sysfs() -> (tempfile::TempDir, Sysfs) {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, mac) in [("eth0", "02:00:00:00:00:01"), ("eth1", "02:00:00:00:00:02")] {
            let at = dir.path().join("class/net").join(name);
            std::fs::create_dir_all(&at).expect("an interface");
            std::fs::write(at.join("address"), mac).expect("a file");
        }
        std::fs::write(dir.path().join("class/net/eth1/speed"), "25000\n").expect("a file");
        let sysfs = Sysfs::at(dir.path());
        (dir, sysfs)
    }

    fn with(pairs: &[(&str, &str)]) -> Result<Discovery> {
        let (config, complaints) = Config::from_pairs(pairs.iter().copied());
        assert_eq!(complaints, []);
        let wish = Wish { names: config.socket_ifname.as_deref(), family: config.socket_family, rendezvous: None };
        let (_dir, sysfs) = sysfs();
        from_list(&host(), &wish, &config, &sysfs)
    }

    #[test]
    fn by_default_each_chosen_interface_is_a_device() {
        let found = with(&[]).expect("devices");
        assert_eq!(found.plans.iter().map(Plan::name).collect::<Vec<_>>(), ["eth0", "eth1"]);
        assert_ne!(found.plans[0].guid, found.plans[1].guid);
        assert_eq!(
            found.to_string(),
            "using [0]eth0:10.0.0.1(77000 Mbit/s assumed) [1]eth1:10.0.1.1(25000 Mbit/s); running, and not docker, lo \
             or virbr"
        );
    }

    #[test]
    fn rails_make_one_device_of_all_interfaces_or_of_those_named() {
        let all = with(&[("TOWLINE_RAILS", "all")]).expect("devices");
        assert_eq!(all.plans.iter().map(Plan::name).collect::<Vec<_>>(), ["eth0+eth1"]);
        assert_eq!(all.plans[0].rails.iter().map(|rail| rail.speed_mbps).sum::<u32>(), UNKNOWN_SPEED_MBPS + 25_000);
        let both = with(&[("TOWLINE_RAILS", "eth0,lo")]).expect("devices");
        assert_eq!(
            both.plans[0].properties(vec![0]).speed_mbps,
            UNKNOWN_SPEED_MBPS as i32,
            "the assumed speed counts once"
        );
        let list = with(&[("TOWLINE_RAILS", "eth1,lo"), ("NCCL_SOCKET_IFNAME", "eth0")]).expect("devices");
        assert_eq!(list.plans.iter().map(Plan::name).collect::<Vec<_>>(), ["eth1+lo"]);
        assert_eq!((list.why, list.warnings.len()), (Why::Rails, 0));
    }

    #[test]
    fn an_unknown_speed_is_the_named_constant_or_what_the_user_says() {
        let speeds = |pairs: &[(&str, &str)]| {
            let found = with(pairs).expect("devices");
            found.plans.iter().map(|plan| plan.rails[0].speed_mbps).collect::<Vec<_>>()
        };
        assert_eq!(speeds(&[]), [UNKNOWN_SPEED_MBPS, 25_000]);
        assert_eq!(speeds(&[("TOWLINE_SPEED", "400000")]), [400_000, 25_000], "a known speed stays");
    }

    #[test]
    fn a_missing_rail_is_left_out_with_a_warning_that_names_the_nearest() {
        let found = with(&[("TOWLINE_RAILS", "eth0,ehto1,eth9")]).expect("devices");
        assert_eq!(found.plans[0].name(), "eth0");
        assert!(found.warnings[0].contains("ehto1") && found.warnings[0].contains("did you mean eth"));
        assert!(found.warnings[1].contains("eth9") && found.warnings[1].contains("not running"));
    }

    #[test]
    fn no_interface_is_a_failure_that_tells_what_there_is_and_what_to_try() {
        let error = with(&[("NCCL_SOCKET_IFNAME", "=wlan0")]).expect_err("nothing matches").to_string();
        assert_eq!(
            error,
            "no network interface can be used: NCCL_SOCKET_IFNAME is =wlan0; interfaces with an address: lo, eth0, \
             eth1, eth9 (not running); correct or unset NCCL_SOCKET_IFNAME (and NCCL_SOCKET_FAMILY, if set)"
        );
        let error = with(&[("TOWLINE_RAILS", "wlan0")]).expect_err("nothing matches").to_string();
        assert!(error.ends_with("correct or unset TOWLINE_RAILS (and NCCL_SOCKET_FAMILY, if set)"), "{error}");
    }

    #[test]
    fn this_host_has_devices() {
        let (config, _) = Config::from_pairs([("NCCL_SOCKET_IFNAME", "=lo")]);
        let found = discover(&config).expect("every host has a loopback");
        assert_eq!(found.plans[0].name(), "lo");
        assert_eq!(found.plans[0].pci_path, None);
        assert_eq!(discover(&config).expect("again").plans, found.plans, "and they are the same next time");
    }
}
