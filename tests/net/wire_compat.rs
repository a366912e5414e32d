//! Hosts are upgraded one by one: this build exchanges verified data with the library of an older release, in both
//! directions and in every interface version that both have, in clear, checksummed and encrypted, over one stream and
//! over four, and while streams are cut. Over TCP only.
//!
//! The older library comes from `TOWLINE_OLDER_LIBRARY`; `tests/wire_compat.sh` builds one and runs this.

use std::time::{Duration, Instant};

use crate::support::pair::Pair;
use crate::support::{
    PATIENCE, child, context, cut, eventually, key_file_of, part, pattern, streams, versions, watchdog,
};
use towline::host::{ApiVersion, Context, Init, Memory, Net, Part, Plugin};

const SIZES: [usize; 8] = [0, 1, 129, 4096, (16 << 10) + 1, (64 << 10) + 1, 512 << 10, (4 << 20) + 3];

fn older_plugin() -> Plugin {
    let file = std::env::var_os("TOWLINE_OLDER_LIBRARY").expect("TOWLINE_OLDER_LIBRARY names the older library");
    Plugin::open(file).expect("the older library opens")
}

fn older_context(plugin: &Plugin, version: ApiVersion) -> Context {
    let net = Net::of(plugin, Some(version)).expect("the older library exports the version");
    net.init_with(&Init { comm_id: 7, ..Init::default() }).expect("init of the older library")
}

/// One that leads from one library into the other, and no other in this process.
fn connect(from: &Context, to: &Context, what: &str) -> Pair {
    eventually("the streams of the connection before are closed", PATIENCE, || streams().is_empty().then_some(()));
    Pair::between((from, 0), (to, 0)).unwrap_or_else(|code| panic!("{what}: no connection: {code}"))
}

fn transfer(pair: &Pair, seed: usize, size: usize, what: &str) {
    let sent = pattern(seed, size);
    let arrived = pair.transfer(sent).unwrap_or_else(|code| panic!("{what}, {size} bytes: {code}"));
    assert!(arrived == sent, "{what}: {size} bytes arrived changed");
}

/// Both ends of a connection's streams, once it has so many: they join while long messages travel.
fn grown(pair: &Pair, wanted: usize, what: &str) -> Vec<i32> {
    eventually(&format!("{what}: {wanted} streams"), PATIENCE, || {
        transfer(pair, wanted, 1 << 20, what);
        Some(streams()).filter(|ends| ends.len() >= 2 * wanted)
    })
}

/// Every size from one library into the other.
fn exchange(from: &Context, to: &Context, wanted: usize, what: &str) {
    let pair = connect(from, to, what);
    for (seed, size) in SIZES.into_iter().enumerate() {
        transfer(&pair, seed, size, what);
    }
    grown(&pair, wanted, what);
    SIZES.into_iter().for_each(|size| transfer(&pair, wanted, size, what));
    pair.close().unwrap_or_else(|code| panic!("{what}: close: {code}"));
}

fn both_ways(wanted: usize) {
    let _watchdog = watchdog(100);
    let plugin = older_plugin();
    let shared = plugin.versions();
    assert!(shared.contains(&ApiVersion::V12) && shared.len() == versions().len(), "{shared:?}");
    for version in versions() {
        let (now, older) = (context(version), older_context(&plugin, version));
        exchange(&older, &now, wanted, &format!("{version}, from the older library to this one"));
        exchange(&now, &older, wanted, &format!("{version}, from this library to the older one"));
    }
    // NCCL's release, and so the interface, need not be the same on both hosts either.
    let (older, now) = (older_context(&plugin, ApiVersion::V6), context(ApiVersion::V12));
    exchange(&older, &now, wanted, "v6 of the older library to v12");
    exchange(&now, &older, wanted, "v12 to v6 of the older library");
}

#[test]
#[ignore = "needs an older build: tests/wire_compat.sh"]
fn an_older_release_and_this_one_exchange_data_in_clear() {
    child::alone("wire_compat::an_older_release_and_this_one_exchange_data_in_clear", &[], || both_ways(1));
}

#[test]
#[ignore = "needs an older build: tests/wire_compat.sh"]
fn an_older_release_and_this_one_exchange_checksummed_data() {
    child::alone(
        "wire_compat::an_older_release_and_this_one_exchange_checksummed_data",
        &[("TOWLINE_CHECKSUM", "1")],
        || both_ways(1),
    );
}

#[test]
#[ignore = "needs an older build: tests/wire_compat.sh"]
fn an_older_release_and_this_one_exchange_encrypted_data() {
    let (_dir, key) = key_file_of(b"the quick brown fox jumps over the lazy dog");
    let key = [("TOWLINE_KEY_FILE", key.to_str().expect("a path"))];
    child::alone("wire_compat::an_older_release_and_this_one_exchange_encrypted_data", &key, || both_ways(1));
}

/// Machines of two cores have one stream for each connection otherwise.
const FOUR: [(&str, &str); 2] = [("TOWLINE_STREAMS", "4"), ("TOWLINE_WORKERS", "2")];

#[test]
#[ignore = "needs an older build: tests/wire_compat.sh"]
fn an_older_release_and_this_one_exchange_data_over_four_streams() {
    child::alone("wire_compat::an_older_release_and_this_one_exchange_data_over_four_streams", &FOUR, || both_ways(4));
}

/// Long messages from one library into the other. During each a stream is cut, at one end and then at the other, and
/// made again.
fn exchange_under_cuts(from: &Context, to: &Context, what: &str) {
    // Of quick transfers few are still under way when the stream is cut.
    const ROUNDS: usize = 100;
    const HITS: usize = 8;
    const SIZE: usize = 16 << 20;
    let pair = connect(from, to, what);
    let mut hit = 0;
    for round in 0..ROUNDS {
        if hit == HITS {
            break;
        }
        let what = format!("{what}, round {round}");
        let ends = grown(&pair, 4, &what);
        let (sent, target) = (pattern(round, SIZE), Memory::new(SIZE));
        // SAFETY: the pattern is static, and the target outlives the transfer: what does not end ends the test.
        let (received, mut left) = unsafe {
            let received = pair.recv.post(&[Part::all(&target, None)]).expect("irecv");
            (received, vec![pair.send.post(part(sent, None)).expect("isend")])
        };
        let start = Instant::now();
        while !left.is_empty() && start.elapsed() < Duration::from_millis(1 + round as u64 % 4) {
            left.retain(|request| pair.send.test(request).expect("a send").is_none());
        }
        hit += usize::from(cut(ends[round % ends.len()]) && !left.is_empty());
        pair.finish(received, &left).unwrap_or_else(|code| panic!("{what}: {code}"));
        assert!(target.bytes() == sent, "{what}: arrived changed");
    }
    assert_eq!(hit, HITS, "{what}: so few of {ROUNDS} messages lost a stream");
    pair.close().unwrap_or_else(|code| panic!("{what}: close: {code}"));
}

#[test]
#[ignore = "needs an older build: tests/wire_compat.sh"]
fn an_older_release_and_this_one_mend_their_streams() {
    let both_ways = || {
        let _watchdog = watchdog(100);
        let plugin = older_plugin();
        let (now, older) = (context(ApiVersion::V12), older_context(&plugin, ApiVersion::V12));
        exchange_under_cuts(&older, &now, "from the older library to this one");
        exchange_under_cuts(&now, &older, "from this library to the older one");
    };
    if child::role().is_some() {
        return both_ways();
    }
    let (_dir, key) = key_file_of(b"the quick brown fox jumps over the lazy dog");
    let key = ("TOWLINE_KEY_FILE", key.to_str().expect("a path"));
    for protection in [None, Some(("TOWLINE_CHECKSUM", "1")), Some(key)] {
        let variables: Vec<_> = FOUR.into_iter().chain(protection).collect();
        child::alone("wire_compat::an_older_release_and_this_one_mend_their_streams", &variables, both_ways);
    }
}
