//! From the host's interfaces and the configuration to the physical devices, with the reason for the log.

use super::{Plan, Rail, ranks};
use crate::os::config::{Config, Family, Rails, is_blank_or_quote, nearest};
use crate::os::error::{Cause, Error, Result};
use crate::os::interfaces::{self, Interface, Selection, UNKNOWN_SPEED_MBPS, Why};
use crate::os::sysfs::Sysfs;
use std::fmt;

/// The devices of this host, and the reasons for the choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Discovery {
    /// The physical devices in NCCL's order; at least one.
    pub plans: Vec<Plan>,
    /// Which rule chose the interfaces.
    pub why: Why,
    /// Warnings that are not failures: a named rail that is missing, or is down.
    pub warnings: Vec<String>,
    /// Interfaces that `TOWLINE_RAILS=all` skips, each with the reason.
    pub passed_over: Vec<String>,
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
                let state = if rail.running { "" } else { ", down" };
                write!(f, "{plus}{}:{}({} Mbit/s{assumed}{state})", rail.name, rail.address.ip(), rail.speed_mbps)?;
            }
        }
        write!(f, "; {}", self.why)?;
        self.passed_over.iter().try_for_each(|reason| write!(f, "; {reason}"))
    }
}

/// The devices that the configuration selects on this host.
///
/// # Errors
/// When no interface is left, with a list of the existing interfaces; or when the system does not list them.
pub fn discover(config: &Config) -> Result<Discovery> {
    let all = interfaces::list()?;
    // A look-up of NCCL_COMM_ID's host may take a while, and only one rule needs it.
    let hint = if config.socket_ifname.is_none() { config.comm_id.as_deref() } else { None };
    let selection = Selection {
        names: config.socket_ifname.as_deref(),
        family: config.socket_family,
        rendezvous: hint.and_then(interfaces::rendezvous),
    };
    from_list(&all, &selection, config, &Sysfs::default())
}

fn from_list(all: &[Interface], selection: &Selection<'_>, config: &Config, sysfs: &Sysfs) -> Result<Discovery> {
    let mut warnings = Vec::new();
    let (chosen, why) = match &config.rails {
        Rails::Single => interfaces::choose(all, selection),
        Rails::All => interfaces::choose_also_down(all, selection, |one| sysfs.is_bridge(&one.name)),
        Rails::List(names) => {
            let (mut found, missing) = interfaces::named(all, names, selection.family);
            warnings.extend(missing.iter().map(|name| missing_rail(name, all)));
            // A device is offered only when it works now.
            if !found.iter().any(|one| one.running) {
                found.clear();
            }
            (found, Why::Rails)
        }
    };
    if chosen.is_empty() {
        let error = nothing_left(all, &why, config.socket_family);
        return Err(match &config.rails {
            Rails::List(names) => meant_rails(names, all).map_or(error.clone(), |hint| error.with_hint(hint)),
            _ => error,
        });
    }
    if let Why::Asked(list) = &why {
        let filter = interfaces::Filter::new(list);
        warnings.extend(filter.missed(&chosen).into_iter().map(|name| missing_name(name, all)));
    }
    let (chosen, passed_over) =
        if config.rails == Rails::All { ranks::wires(chosen, sysfs) } else { (chosen, Vec::new()) };
    let mut rails: Vec<Rail> = chosen.iter().map(|interface| rail(interface, config, sysfs)).collect();
    if config.speed.is_none() {
        ranks::settle_unknown_speeds(&mut rails, |rail| sysfs.is_overlay(&rail.name));
    }
    let plans = match config.rails {
        Rails::Single => rails.into_iter().map(|rail| Plan::new(vec![rail], sysfs)).collect(),
        Rails::All | Rails::List(_) => {
            presume_speed_of_down(&mut rails, config);
            warnings.extend(rails.iter().filter(|rail| !rail.running).map(down_rail));
            vec![Plan::new(rails, sysfs)]
        }
    };
    Ok(Discovery { plans, why, warnings, passed_over })
}

fn rail(interface: &Interface, config: &Config, sysfs: &Sysfs) -> Rail {
    let known = sysfs.speed_mbps(&interface.name);
    Rail {
        name: interface.name.clone(),
        index: interface.index,
        address: interface.address,
        speed_mbps: known.or(config.speed).unwrap_or(UNKNOWN_SPEED_MBPS),
        speed_is_known: known.is_some(),
        running: interface.running,
    }
}

/// Most drivers report no speed without a carrier. Rails of one device are mostly alike, so such a rail counts as the
/// slowest running one: NCCL reads the speed once, and the rail will come back.
fn presume_speed_of_down(rails: &mut [Rail], config: &Config) {
    let slowest = rails.iter().filter(|rail| rail.running && rail.speed_is_known).map(|rail| rail.speed_mbps).min();
    let Some(presumed) = slowest.filter(|_| config.speed.is_none()) else { return };
    for rail in rails.iter_mut().filter(|rail| !rail.running && !rail.speed_is_known) {
        rail.speed_mbps = presumed;
    }
}

fn down_rail(rail: &Rail) -> String {
    format!("rail {} ({}) is down now; it will be used when it comes back", rail.name, rail.address.ip())
}

fn missing_rail(name: &str, all: &[Interface]) -> String {
    if all.iter().any(|one| one.name == *name) {
        return format!("TOWLINE_RAILS names {name}, which has no usable address; it is left out");
    }
    let hint = nearest(name, all.iter().map(|one| one.name.as_str()));
    let hint = hint.map(|near| format!(" (did you mean {near}?)")).unwrap_or_default();
    format!("TOWLINE_RAILS names {name}, and there is no such interface with an address; it is left out{hint}")
}

fn missing_name(name: &str, all: &[Interface]) -> String {
    let hint = nearest(name, all.iter().filter(|one| one.running).map(|one| one.name.as_str()));
    let hint = hint.filter(|near| !near.starts_with(name)).map(|near| format!(" (did you mean {near}?)"));
    format!(
        "NCCL_SOCKET_IFNAME names {name}, which fits no running interface with a usable address; the others are used{}",
        hint.unwrap_or_default()
    )
}

/// The list that was probably meant, when all rails of a list are missing.
fn meant_rails(names: &[String], all: &[Interface]) -> Option<String> {
    let near = |name: &String| nearest(name, all.iter().map(|one| one.name.as_str()).filter(|near| near != name));
    let is_there = |name: &str| all.iter().any(|one| one.name == *name);
    if names.iter().any(|name| is_there(name)) {
        return None;
    }
    let pieces = || names.iter().flat_map(|name| name.split(':'));
    let meant =
        if pieces().all(is_there) { pieces().collect() } else { names.iter().map(near).collect::<Option<Vec<_>>>()? };
    Some(format!("did you mean TOWLINE_RAILS={}? TOWLINE_RAILS takes whole names", meant.join(",")))
}

fn nothing_left(all: &[Interface], why: &Why, family: Option<Family>) -> Error {
    let mut seen: Vec<String> = Vec::new();
    for one in all {
        let state = if one.running { "" } else { " (not running)" };
        let text = format!("{}{state}", one.name);
        if !seen.contains(&text) {
            seen.push(text);
        }
    }
    let there = if seen.is_empty() { "none".to_owned() } else { seen.join(", ") };
    if let Why::Asked(text) = why
        && let Some(meant) = interfaces::meant(all, text)
    {
        let what = format!("no network interface can be used: {why}; interfaces with an address: {there}");
        let rule =
            if text.contains(is_blank_or_quote) { " NCCL takes blanks and quotes for parts of names" } else { "" };
        let hint = format!("did you mean NCCL_SOCKET_IFNAME={meant}?{rule}");
        return Error::new(Cause::System, what).with_hint(hint);
    }
    let has = |family: Family| {
        let is_of = |ip: std::net::IpAddr| ip.is_ipv6() == (family == Family::V6) && !ip.is_loopback();
        all.iter().any(|one| one.running && is_of(one.address.ip()))
    };
    let hint = match why {
        _ if family.is_some_and(|family| !has(family)) => {
            "NCCL_SOCKET_FAMILY asks for a family of which no running interface has an address: give one to an interface, or \
             set another family on all hosts"
        }
        Why::Asked(_) => "correct or unset NCCL_SOCKET_IFNAME (and NCCL_SOCKET_FAMILY, if set)",
        Why::Rails => "bring one of them up, or correct or unset TOWLINE_RAILS (and NCCL_SOCKET_FAMILY, if set)",
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

    /// A sysfs in which eth1 has a speed and is a second port, br-1f2e is a bridge, and nothing else is known.
    fn sysfs() -> (tempfile::TempDir, Sysfs) {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, mac) in [("eth0", "02:00:00:00:00:01"), ("eth1", "02:00:00:00:00:02")] {
            let at = dir.path().join("class/net").join(name);
            std::fs::create_dir_all(&at).expect("an interface");
            std::fs::write(at.join("address"), mac).expect("a file");
        }
        std::fs::write(dir.path().join("class/net/eth1/speed"), "25000\n").expect("a file");
        std::fs::write(dir.path().join("class/net/eth1/dev_port"), "1\n").expect("a file");
        std::fs::create_dir_all(dir.path().join("class/net/br-1f2e/bridge")).expect("a bridge");
        let sysfs = Sysfs::at(dir.path());
        (dir, sysfs)
    }

    fn with(pairs: &[(&str, &str)]) -> Result<Discovery> {
        with_on(&host(), pairs)
    }

    fn with_on(host: &[Interface], pairs: &[(&str, &str)]) -> Result<Discovery> {
        let (config, complaints) = Config::from_pairs(pairs.iter().copied());
        assert_eq!(complaints, []);
        let selection =
            Selection { names: config.socket_ifname.as_deref(), family: config.socket_family, rendezvous: None };
        let (_dir, sysfs) = sysfs();
        from_list(host, &selection, &config, &sysfs)
    }

    #[test]
    fn by_default_each_chosen_interface_is_a_device() {
        let found = with(&[]).expect("devices");
        assert_eq!(found.plans.iter().map(Plan::name).collect::<Vec<_>>(), ["eth0", "eth1"]);
        assert_ne!(found.plans[0].guid, found.plans[1].guid);
        assert_eq!(
            found.to_string(),
            "using [0]eth0:10.0.0.1(12500 Mbit/s assumed) [1]eth1:10.0.1.1(25000 Mbit/s); running, and not docker, lo \
             or virbr"
        );
    }

    #[test]
    fn rails_make_one_device_of_all_interfaces_or_of_those_named() {
        let all = with(&[("TOWLINE_RAILS", "all"), ("NCCL_SOCKET_IFNAME", "=eth0,eth1")]).expect("devices");
        assert_eq!(all.plans.iter().map(Plan::name).collect::<Vec<_>>(), ["eth0+eth1"]);
        assert_eq!(all.plans[0].rails.iter().map(|rail| rail.speed_mbps).sum::<u32>(), 12_500 + 25_000);
        let both = with(&[("TOWLINE_RAILS", "eth0,eth9")]).expect("devices");
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
        assert_eq!(speeds(&[("NCCL_SOCKET_IFNAME", "eth0")]), [UNKNOWN_SPEED_MBPS]);
        assert_eq!(speeds(&[]), [12_500, 25_000], "never above one that the system knows");
        assert_eq!(speeds(&[("TOWLINE_SPEED", "400000")]), [400_000, 25_000], "a known speed stays");
    }

    #[test]
    fn a_missing_rail_is_left_out_with_a_warning_that_names_the_nearest() {
        let found = with(&[("TOWLINE_RAILS", "eth0,ehto1,eth1")]).expect("devices");
        assert_eq!((found.plans[0].name().as_str(), found.warnings.len()), ("eth0+eth1", 1));
        assert!(found.warnings[0].contains("ehto1") && found.warnings[0].contains("did you mean eth"));
        let mut host = host();
        host.push(up("six0", "2001:db8::1"));
        let pairs = [("TOWLINE_RAILS", "eth0,six0"), ("NCCL_SOCKET_FAMILY", "AF_INET")];
        let found = with_on(&host, &pairs).expect("devices");
        assert_eq!((found.plans[0].name().as_str(), found.warnings.len()), ("eth0", 1));
        assert!(found.warnings[0].contains("six0, which has no usable address"), "{:?}", found.warnings);
    }

    #[test]
    fn when_no_rail_is_there_the_nearest_names_are_told() {
        let hint =
            |rails: &str| with(&[("TOWLINE_RAILS", rails)]).map(|_| ()).expect_err("nothing is left").to_string();
        assert!(hint("eth").contains("did you mean TOWLINE_RAILS=eth0?"), "{}", hint("eth"));
        assert!(hint("ehto0,ETH1").contains("did you mean TOWLINE_RAILS=eth0,eth1?"), "{}", hint("ehto0,ETH1"));
        // The kernel takes this for eth0.
        assert!(hint("eth0:eth1").contains("did you mean TOWLINE_RAILS=eth0,eth1?"), "{}", hint("eth0:eth1"));
        assert!(hint("eth9").contains("bring one of them up"), "it is down: {}", hint("eth9"));
    }

    #[test]
    fn a_name_in_a_list_that_fits_nothing_is_told() {
        let warnings = |list: &str| with(&[("NCCL_SOCKET_IFNAME", list)]).expect("devices").warnings;
        let told = warnings("eth0,eht1");
        assert!(told.len() == 1 && told[0].contains("eht1") && told[0].contains("did you mean eth1?"), "{told:?}");
        assert_eq!(warnings("=eth0,eth").len(), 1, "exact names");
        assert!(warnings("eth0,eth9")[0].contains("no running interface"));
        for list in ["eth0,eth1", "ib,eth", "^eth7,lo", "=eth0,eth1", "eth"] {
            assert_eq!(warnings(list), Vec::<String>::new(), "{list}");
        }
    }

    #[test]
    fn a_rail_that_is_down_keeps_its_place_and_is_told() {
        let found = with(&[("TOWLINE_RAILS", "eth9,eth1")]).expect("devices");
        let plan = &found.plans[0];
        assert_eq!(plan.rails.iter().map(|rail| rail.name.as_str()).collect::<Vec<_>>(), ["eth9", "eth1"]);
        assert_eq!(plan.name(), "eth1+eth9", "what is running is named first");
        assert_eq!(plan.port, 1, "and its card is the device's");
        assert_eq!(found.warnings, ["rail eth9 (10.0.9.1) is down now; it will be used when it comes back"]);
        assert!(
            found.to_string().contains("[0]eth9:10.0.9.1(25000 Mbit/s assumed, down)+eth1:10.0.1.1(25000 Mbit/s);")
        );
        // Processes that start while it is up and while it is not agree on the device.
        let all_up: Vec<_> = host().into_iter().map(|one| Interface { running: true, ..one }).collect();
        let later = with_on(&all_up, &[("TOWLINE_RAILS", "eth9,eth1")]).expect("devices");
        assert_eq!((later.plans[0].guid, later.warnings.len()), (plan.guid, 0));
        assert_eq!(later.plans[0].name(), "eth9+eth1");
    }

    #[test]
    fn the_unknown_speed_of_a_rail_that_is_down_is_that_of_the_slowest_that_runs() {
        let speed = |pairs: &[(&str, &str)]| with(pairs).expect("devices").plans[0].properties(vec![0]).speed_mbps;
        assert_eq!(speed(&[("TOWLINE_RAILS", "eth9,eth1")]), 50_000);
        assert_eq!(
            speed(&[("TOWLINE_RAILS", "eth9,eth0")]),
            UNKNOWN_SPEED_MBPS as i32,
            "the assumed speed counts once"
        );
        assert_eq!(speed(&[("TOWLINE_RAILS", "eth9,eth1"), ("TOWLINE_SPEED", "10000")]), 35_000);
    }

    #[test]
    fn all_rails_are_those_that_the_rule_would_choose_if_they_were_running() {
        let idle = |name: &str, address: &str| Interface { running: false, ..up(name, address) };
        let mut host = host();
        host.extend([idle("br-1f2e", "172.18.0.1"), idle("docker0", "172.17.0.1")]);
        let names = |host: &[Interface], pairs: &[(&str, &str)]| {
            let found = with_on(host, &[&[("TOWLINE_RAILS", "all")], pairs].concat()).expect("devices");
            found.plans[0].rails.iter().map(|rail| rail.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&host, &[]), ["eth0", "eth1", "eth9"], "no bridge without ports, unasked");
        assert_eq!(names(&host, &[("NCCL_SOCKET_IFNAME", "eth1,br-")]), ["eth1", "br-1f2e"]);
        assert_eq!(with_on(&host, &[]).expect("devices").plans.len(), 2, "a device of its own must be running");
        host.extend([up("ib0", "10.9.0.1"), idle("ib1", "10.9.1.1")]);
        assert_eq!(names(&host, &[]), ["ib0", "ib1"]);
        // An interface that is down decides no rule.
        host.retain(|one| one.name != "ib0");
        assert_eq!(names(&host, &[]), ["eth0", "eth1", "eth9", "ib1"]);
    }

    #[test]
    fn a_device_whose_rails_are_all_down_is_not_offered() {
        for pairs in [
            [("TOWLINE_RAILS", "eth9"), ("NCCL_SOCKET_IFNAME", "eth0")],
            [("TOWLINE_RAILS", "all"), ("NCCL_SOCKET_IFNAME", "eth9")],
        ] {
            let error = with(&pairs).expect_err("nothing runs").to_string();
            assert!(
                error.contains("no network interface can be used") && error.contains("eth9 (not running)"),
                "{error}"
            );
        }
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
        for name in ["eth0", ""] {
            let pairs = [("NCCL_SOCKET_FAMILY", "AF_INET6"), ("NCCL_SOCKET_IFNAME", name)];
            let error = with(&pairs).expect_err("IPv4 only").to_string();
            assert!(error.contains("NCCL_SOCKET_FAMILY asks for a family of which no running"), "{error}");
        }
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
