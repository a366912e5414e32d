//! What the variables make of queue pairs and registrations: SoftRoCE shows hardly anything of it in its packets, so
//! `faulty_verbs.c`, which stands between the plugin and libibverbs, keeps what the plugin asks of the device. It fails
//! nothing here.
//!
//! These tests need two RDMA devices, as the test machine has them: rxe0, which sends, and rxe1, which receives.

#![cfg(feature = "rdma")]

use crate::support::injector::{Injector, faulty_verbs};
use crate::support::machine::machine;
use crate::support::pair::Pair;
use crate::support::{PATIENCE, child, eventually, net, pattern, watchdog};
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Init, Memory, Part};

/// Runs the test `name` in a process with the injector and these variables.
fn watched(name: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    let library = faulty_verbs();
    let mut all = vec![("LD_PRELOAD", library.to_str().expect("text")), ("FAULTY_VERBS_RECORD", "1")];
    all.extend_from_slice(variables);
    child::alone(name, &all, body);
}

/// What was kept of a device's queue pairs, a line for each.
fn pairs_of(device: &str) -> Vec<String> {
    let text = Injector::text(c"faulty_verbs_made");
    text.lines().filter_map(|line| line.strip_prefix(device)).map(|rest| format!("{rest} ")).collect()
}

/// A connection over which messages have gone.
fn used(context: &Context) -> Pair {
    let pair = Pair::between((context, 0), (context, 1)).expect("a connection");
    for size in [10, 100_000] {
        assert!(pair.transfer(pattern(size, size)).expect("a transfer") == pattern(size, size));
    }
    pair
}

/// Every queue pair of the device has all these words.
fn has(device: &str, words: &[&str]) {
    let pairs = pairs_of(device);
    assert!(!pairs.is_empty(), "no queue pair of {device}");
    for word in words {
        assert!(pairs.iter().all(|pair| pair.contains(&format!(" {word} "))), "{device}: {word}: {pairs:?}");
    }
}

/// Whether that place of a device's GID table holds a GID with this beginning and RoCE version 2.
fn holds(device: &str, index: usize, begins: &str) -> bool {
    let dir = format!("/sys/class/infiniband/{device}/ports/1");
    let read = |what: &str| std::fs::read_to_string(format!("{dir}/{what}/{index}")).unwrap_or_default();
    read("gids").starts_with(begins) && read("gid_attrs/types").trim() == "RoCE v2"
}

/// The first such place, as the injector has it.
fn gid(device: &str, begins: &str) -> String {
    format!("gid={}", (0..64).find(|index| holds(device, *index, begins)).expect("such a GID"))
}

/// IPv6 addresses and neighbours go with a link that goes down, which other tests have it do.
fn have_ipv6_addresses() {
    let command = "ip -6 addr replace fd07::1/64 dev veth0 nodad && ip -6 addr replace fd07::2/64 dev veth1 nodad && \
                   ip neigh replace fd07::2 lladdr $(cat /sys/class/net/veth1/address) dev veth0 nud permanent && \
                   ip neigh replace fd07::1 lladdr $(cat /sys/class/net/veth0/address) dev veth1 nud permanent";
    machine(command);
    eventually("their GIDs", PATIENCE, || {
        let has = |device| (0..64).any(|index| holds(device, index, "fd07:"));
        (has("rxe0") && has("rxe1")).then_some(())
    });
}

/// Variables, and the words for the sending and for the receiving device.
type Row<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str], &'a [&'a str]);

#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn each_variable_reaches_the_queue_pairs_of_its_side() {
    const NAME: &str = "attributes::each_variable_reaches_the_queue_pairs_of_its_side";
    const FOUR: &str = "0000:0000:0000:0000:0000:ffff:";
    if child::role().is_none() {
        have_ipv6_addresses();
    }
    let [four0, four1] = ["rxe0", "rxe1"].map(|device| gid(device, FOUR));
    let [six0, six1] = ["rxe0", "rxe1"].map(|device| gid(device, "fd07:"));
    // A place that both tables have, and that is not the one which the rules choose.
    let is_other =
        |index: &usize| ["rxe0", "rxe1"].iter().all(|device| holds(device, *index, "") && !holds(device, *index, FOUR));
    let other = (0..64).find(is_other).expect("such a place").to_string();
    let named = format!("gid={other}");
    let rows: [Row<'_>; 6] = [
        (
            &[],
            &["pkey=0", "sl=0", "tc=0", &four0, "timeout=20", "retries=7"],
            &["pkey=0", "sl=0", "tc=0", &four1, "timeout=20", "retries=7"],
        ),
        (
            &[("NCCL_IB_SL", "3"), ("NCCL_IB_TC", "104"), ("NCCL_IB_TIMEOUT", "17"), ("NCCL_IB_RETRY_CNT", "5")],
            &["sl=3", "tc=104", "timeout=17", "retries=5"],
            &["sl=3", "tc=104", "timeout=17", "retries=5"],
        ),
        (
            &[("NCCL_IB_TC", "104"), ("NCCL_IB_FIFO_TC", "184"), ("NCCL_IB_TIMEOUT", "0"), ("NCCL_IB_RETRY_CNT", "0")],
            &["sl=0", "tc=104", "timeout=0", "retries=0"],
            &["sl=0", "tc=184", "timeout=0", "retries=0"],
        ),
        (
            &[("NCCL_IB_ADDR_FAMILY", "AF_INET6"), ("NCCL_IB_TIMEOUT", "31")],
            &[&six0, "timeout=31"],
            &[&six1, "timeout=31"],
        ),
        (&[("NCCL_IB_GID_INDEX", &other), ("NCCL_IB_TIMEOUT", "32")], &[&named, "timeout=0"], &[&named, "timeout=0"]),
        (&[("NCCL_IB_ADDR_RANGE", "10.7.0.0/24"), ("NCCL_IB_QPS_PER_CONNECTION", "3")], &[&four0], &[&four1]),
    ];
    for (row, (variables, ..)) in rows.iter().enumerate() {
        let row = row.to_string();
        let variables = [variables, &[("ROW", row.as_str())][..]].concat();
        watched(NAME, &variables, || {
            let _watchdog = watchdog(60);
            let row: usize = std::env::var("ROW").expect("a row").parse().expect("a number");
            let context = net(ApiVersion::V12).init().expect("init");
            let (_, sender, receiver) = rows[row];
            // Made, not used: with some of these values nothing that SoftRoCE drops is ever sent again.
            let pair = Pair::between((&context, 0), (&context, 1)).expect("a connection");
            has("rxe0", sender);
            has("rxe1", receiver);
            let wanted: usize =
                std::env::var("NCCL_IB_QPS_PER_CONNECTION").map_or(1, |set| set.parse().expect("a number"));
            assert_eq!((pairs_of("rxe0").len(), pairs_of("rxe1").len()), (wanted, wanted));
            pair.close().expect("close");
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// The sender's communicator decides for both sides, as in NCCL: with v10 the receiver does not know its class.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn the_senders_communicator_chooses_the_class_of_both_sides_unless_a_variable_does() {
    const NAME: &str = "attributes::the_senders_communicator_chooses_the_class_of_both_sides_unless_a_variable_does";
    for variables in [&[][..], &[("NCCL_IB_TC", "104"), ("NCCL_IB_SL", "2")]] {
        watched(NAME, variables, || {
            let _watchdog = watchdog(60);
            for (round, version) in [ApiVersion::V10, ApiVersion::V12].into_iter().enumerate() {
                let class = [7, 9][round];
                let init = Init { traffic_class: class, ..Init::default() };
                let context = net(version).init_with(&init).expect("init");
                used(&context).close().expect("close");
                let own = format!("sl={class} tc={class} ");
                let expected = if std::env::var("NCCL_IB_TC").is_ok() { "sl=2 tc=104 " } else { &own };
                for device in ["rxe0", "rxe1"] {
                    let last = pairs_of(device).pop().expect("a queue pair");
                    assert!(last.contains(expected), "{version}, {device}: {expected}: {last}");
                }
                context.finalize().expect("finalize");
            }
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// SoftRoCE's ports have one partition key. Asking for another one is an error that says so.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn the_partition_key_is_asked_for_by_its_place() {
    watched("attributes::the_partition_key_is_asked_for_by_its_place", &[("NCCL_IB_PKEY", "0x5")], || {
        let _watchdog = watchdog(60);
        let log = Capture::start();
        let context = net(ApiVersion::V12).init().expect("init");
        match Pair::between((&context, 0), (&context, 1)) {
            Ok(_) => has("rxe1", &["pkey=5"]),
            Err(code) => {
                assert!(matches!(code, Code::SystemError | Code::RemoteError), "{code:?}");
                assert!(log.contains("with P_Key index 5 on rxe"), "{:?}", log.records());
            }
        }
    });
}

/// NCCL's memory may be written out of order where the user does not forbid it; Towline's own, which is polled, never.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn only_data_is_written_in_any_order_and_only_where_that_is_allowed() {
    const NAME: &str = "attributes::only_data_is_written_in_any_order_and_only_where_that_is_allowed";
    for ordering in ["0", "2"] {
        watched(NAME, &[("NCCL_IB_PCI_RELAXED_ORDERING", ordering)], || {
            let _watchdog = watchdog(60);
            let regions = || {
                let text = Injector::text(c"faulty_verbs_made");
                let line = text.lines().last().expect("a line").to_owned();
                let number = |name: &str| -> u32 {
                    let word = line.split(' ').find_map(|word| word.strip_prefix(name)).expect("a count");
                    word.parse().expect("a number")
                };
                (number("strict="), number("relaxed="))
            };
            let context = net(ApiVersion::V12).init().expect("init");
            let pair = Pair::between((&context, 0), (&context, 1)).expect("a connection");
            let (own, none) = regions();
            assert!(own > 0 && none == 0, "{own} strict, {none} relaxed of Towline's own");
            let memory = Memory::of(pattern(1, 5000));
            let source = pair.send.register(&memory).expect("regMr");
            let target = Memory::new(5000);
            let room = pair.recv.register(&target).expect("regMr");
            let relaxed = std::env::var("NCCL_IB_PCI_RELAXED_ORDERING").is_ok_and(|set| set == "2");
            assert_eq!(regions(), if relaxed { (own, 2) } else { (own + 2, 0) });
            // SAFETY: the memory lives until the requests ended.
            let posted = unsafe { pair.recv.post(&[Part::all(&target, Some(&room))]) }.expect("irecv");
            // SAFETY: as above.
            let sent = unsafe { pair.send.post(Part::all(&memory, Some(&source))) }.expect("isend");
            pair.finish(posted, &[sent]).expect("a transfer");
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// Options beyond the standard: both sides get what both know. Where one side's driver has none, or the user wants
/// none, the connection goes without.
#[test]
#[ignore = "needs RDMA devices: tests/rdma_vm/suite.sh"]
fn drivers_agree_on_options_or_go_without() {
    const NAME: &str = "attributes::drivers_agree_on_options_or_go_without";
    for offers in ["all", "rxe0", "rxe1", "none", "off"] {
        let on = if offers == "off" { "0" } else { "1" };
        let offering = if offers == "off" { "all" } else { offers };
        let variables = [("FAULTY_VERBS_ECE", offering), ("NCCL_IB_ECE_ENABLE", on), ("WHO_OFFERS", offers)];
        watched(NAME, &variables, || {
            let _watchdog = watchdog(60);
            let log = Capture::start();
            let context = net(ApiVersion::V12).init().expect("init");
            let pair = used(&context);
            let warnings: Vec<_> = log.records().into_iter().filter(|record| record.is_warning()).collect();
            assert!(warnings.is_empty(), "{warnings:?}");
            match std::env::var("WHO_OFFERS").expect("the part").as_str() {
                // Of 0x3f and 0xf3, what is common; each side sets it once.
                "all" => {
                    has("rxe0", &["set_ece=1", "ece=0x33"]);
                    has("rxe1", &["set_ece=1", "ece=0x33"]);
                }
                // Neither side gets options that the other side's driver does not accept.
                "rxe0" => {
                    has("rxe0", &["set_ece=0", "ece=0x3f"]);
                    has("rxe1", &["set_ece=0"]);
                }
                // The sender's driver is asked once, and says that it knows no options.
                "rxe1" => {
                    has("rxe0", &["set_ece=1"]);
                    has("rxe1", &["set_ece=0", "ece=0xf3"]);
                }
                _ => {
                    has("rxe0", &["set_ece=0"]);
                    has("rxe1", &["set_ece=0"]);
                }
            }
            pair.close().expect("close");
        });
        if child::role().is_some() {
            return;
        }
    }
}
