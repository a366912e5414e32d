//! NCCL's rules for choosing interfaces, each on a simulated host.

use super::*;
use proptest::prelude::*;

fn entry(name: &str, address: &str, mask: Option<&str>, running: bool) -> Interface {
    let (ip, scope) = address.split_once('%').unwrap_or((address, "0"));
    let address = match ip.parse().expect("an address") {
        IpAddr::V4(ip) => SocketAddrV4::new(ip, 0).into(),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, 0, 0, scope.parse().expect("a number")).into(),
    };
    Interface { name: name.into(), index: 1, address, mask: mask.map(|mask| mask.parse().expect("a mask")), running }
}

fn up(name: &str, address: &str) -> Interface {
    entry(name, address, None, true)
}

fn host() -> Vec<Interface> {
    vec![
        up("lo", "127.0.0.1"),
        entry("eth0", "10.0.0.5", Some("255.255.255.0"), true),
        entry("eth1", "10.0.1.5", Some("255.255.255.0"), true),
        entry("eth10", "10.0.10.5", Some("255.255.255.0"), false),
        up("docker0", "172.17.0.1"),
        up("virbr0", "192.168.122.1"),
        up("lo", "::1"),
        up("eth0", "2001:db8::5"),
        up("eth0", "fe80::5%2"),
        entry("eth2", "fe80::6%4", Some("ffff:ffff:ffff:ffff::"), true),
    ]
}

fn names_for(all: &[Interface], selection: &Selection<'_>) -> Vec<String> {
    choose(all, selection).0.into_iter().map(|interface| interface.name).collect()
}

fn asked(names: &str) -> Vec<String> {
    names_for(&host(), &Selection { names: Some(names), ..Selection::default() })
}

#[test]
fn unasked_it_takes_all_but_docker_loopback_and_virbr_with_the_first_address_of_each() {
    let (chosen, why) = choose(&host(), &Selection::default());
    let brief: Vec<_> = chosen.iter().map(|one| (one.name.as_str(), one.address.to_string())).collect();
    assert_eq!(brief, [("eth0", "10.0.0.5:0".into()), ("eth1", "10.0.1.5:0".into()), ("eth2", "[fe80::6%4]:0".into())]);
    assert_eq!(why, Why::Ordinary);
}

#[test]
fn infiniband_names_come_before_everything_but_what_was_asked() {
    let mut all = host();
    all.push(up("ib0", "10.9.0.1"));
    assert_eq!(names_for(&all, &Selection::default()), ["ib0"]);
    let near_eth1 = Selection { rendezvous: Some("10.0.1.9:1".parse().expect("an address")), ..Selection::default() };
    assert_eq!(names_for(&all, &near_eth1), ["ib0"]);
    assert_eq!(names_for(&all, &Selection { names: Some("eth"), ..Selection::default() }), ["eth0", "eth1", "eth2"]);
}

#[test]
fn names_are_prefixes_unless_exact_and_a_caret_excludes() {
    assert_eq!(asked("eth"), ["eth0", "eth1", "eth2"]);
    assert_eq!(asked("=eth1"), ["eth1"]);
    assert_eq!(asked("=eth"), Vec::<String>::new());
    assert_eq!(asked("^eth"), ["lo", "docker0", "virbr0"]);
    assert_eq!(asked("^=eth0"), ["lo", "eth1", "docker0", "virbr0", "eth2"]);
    assert_eq!(asked("lo,docker"), ["lo", "docker0"]);
    assert_eq!(asked("=eth1:1,,:2,eth2"), ["eth1", "eth2"]);
    assert_eq!(asked("wlan"), Vec::<String>::new(), "asked for and not there: no fallback");
    assert_eq!(asked("=eth10"), Vec::<String>::new(), "not running");
    assert_eq!(asked("e"), ["eth0", "eth1", "eth2"], "one character is as good as unset");
    assert_eq!(asked("^"), ["eth0", "eth1", "eth2"]);
}

#[test]
fn a_forced_family_takes_the_address_of_that_family() {
    let six = choose(&host(), &Selection { family: Some(Family::V6), ..Selection::default() }).0;
    let brief: Vec<_> = six.iter().map(|one| one.address.to_string()).collect();
    assert_eq!(brief, ["[2001:db8::5]:0", "[fe80::6%4]:0"]);
    let four = choose(&host(), &Selection { family: Some(Family::V4), ..Selection::default() }).0;
    assert!(four.iter().all(|one| one.address.is_ipv4()));
    assert_eq!(four.len(), 2);
}

#[test]
fn the_subnet_of_nccl_comm_id_narrows_the_choice_to_one() {
    let near = |address: &str| {
        let selection = Selection { rendezvous: Some(address.parse().expect("an address")), ..Selection::default() };
        names_for(&host(), &selection)
    };
    assert_eq!(near("10.0.1.77:4000"), ["eth1"]);
    assert_eq!(near("10.0.10.1:4000"), ["eth10"], "NCCL does not ask whether it is running here");
    assert_eq!(near("192.0.2.1:4000"), ["eth0", "eth1", "eth2"]);
    assert_eq!(near("[fe80::99%4]:4000"), ["eth2"]);
    assert_eq!(near("[fe80::99%5]:4000"), ["eth0", "eth1", "eth2"], "another link");
}

#[test]
fn docker_then_loopback_then_virbr_only_when_nothing_else_is_there() {
    let mut all = host();
    all.retain(|one| !one.name.starts_with("eth"));
    assert_eq!(choose(&all, &Selection::default()).1, Why::LastResort("docker"));
    all.retain(|one| one.name != "docker0");
    assert_eq!(names_for(&all, &Selection::default()), ["lo"]);
    all.retain(|one| one.name != "lo");
    assert_eq!(names_for(&all, &Selection::default()), ["virbr0"]);
    all.clear();
    assert_eq!(choose(&all, &Selection::default()), (vec![], Why::Nothing));
}

#[test]
fn rails_are_found_by_exact_name_in_the_order_asked() {
    let ask: Vec<String> = ["eth1", "eth", "eth0", "eth10"].map(String::from).to_vec();
    let (found, missing) = named(&host(), &ask, None);
    assert_eq!(found.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["eth1", "eth0", "eth10"]);
    assert_eq!(missing, ["eth"]);
    assert!(!found[2].running, "a rail may be down for now");
}

#[test]
fn nccl_comm_id_is_understood_in_all_its_forms() {
    let text = |id: &str| rendezvous(id).map(|address| address.to_string());
    assert_eq!(text("10.1.2.3:5000").as_deref(), Some("10.1.2.3:5000"));
    assert_eq!(text("[2001:db8::1]:5000").as_deref(), Some("[2001:db8::1]:5000"));
    let lo = rendezvous("[fe80::1%lo]:5000").expect("an address");
    assert!(matches!(lo, SocketAddr::V6(v6) if v6.scope_id() == 1), "{lo}");
    for bad in ["", "nonsense", "[2001:db8::1", "[zz]:1"] {
        assert_eq!(text(bad), None, "{bad}");
    }
}

#[test]
fn the_system_lists_loopback() {
    let all = list().expect("a list");
    let lo = all.iter().find(|one| one.address.ip() == IpAddr::V4(Ipv4Addr::LOCALHOST)).expect("127.0.0.1");
    assert_eq!((lo.name.as_str(), lo.index, lo.running), ("lo", 1, true));
    assert_eq!(lo.mask, Some(IpAddr::V4(Ipv4Addr::new(255, 0, 0, 0))));
}

fn any_host() -> impl Strategy<Value = Vec<Interface>> {
    let one = (0usize..24, any::<bool>(), any::<u16>(), prop::bool::weighted(0.8)).prop_map(|(name, six, low, run)| {
        let kinds = ["eth", "ib", "lo", "docker", "virbr", "ens"];
        let name = format!("{}{}", kinds[name % kinds.len()], name / kinds.len());
        let address = if six { format!("2001:db8::{low:x}") } else { format!("10.0.{}.{}", low >> 8, low & 255) };
        entry(&name, &address, None, run)
    });
    prop::collection::vec(one, 0..40)
}

proptest! {
    #[test]
    fn whatever_is_chosen_is_running_unique_and_not_too_many(all in any_host(), spec in "[=^]{0,2}(eth|ib|lo|ens)?[0-3]?(,e)?") {
        let (chosen, _) = choose(&all, &Selection { names: Some(&spec), ..Selection::default() });
        prop_assert!(chosen.len() <= MAX_INTERFACES);
        for (index, one) in chosen.iter().enumerate() {
            prop_assert!(one.running);
            prop_assert!(chosen[..index].iter().all(|other| other.name != one.name));
            // The first usable entry of that interface, and no later one.
            prop_assert_eq!(all.iter().find(|other| other.name == one.name && other.running), Some(one));
        }
    }

    #[test]
    fn what_is_down_is_added_and_changes_nothing_else(all in any_host(), spec in "[=^]{0,2}(eth|ib|lo|ens)?[0-3]?(,e)?") {
        let selection = Selection { names: Some(&spec), ..Selection::default() };
        let ((chosen, why), (more, also)) = (choose(&all, &selection), choose_also_down(&all, &selection, |_| false));
        prop_assert_eq!(why, also);
        prop_assert!(more.len() <= MAX_INTERFACES);
        let running: Vec<_> = more.iter().filter(|one| one.running).cloned().collect();
        prop_assert_eq!(&running, &chosen);
        prop_assert!(!chosen.is_empty() || more.is_empty());
        for (index, one) in more.iter().enumerate() {
            prop_assert!(more[..index].iter().all(|other| other.name != one.name || other.running != one.running));
        }
    }

    #[test]
    fn a_list_and_its_exclusion_part_the_interfaces(name in "[a-z]{1,3}[0-9]", list in "=?[a-z]{1,2}(,[a-z]{1,3}[0-9])?") {
        prop_assert_ne!(Filter::new(&list).passes(&name), Filter::new(&format!("^{list}")).passes(&name));
    }

    #[test]
    fn something_is_chosen_whenever_something_runs(all in any_host()) {
        let (chosen, why) = choose(&all, &Selection::default());
        prop_assert_eq!(chosen.is_empty(), !all.iter().any(|one| one.running));
        prop_assert_eq!(chosen.is_empty(), why == Why::Nothing);
    }
}
