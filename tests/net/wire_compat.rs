//! Hosts are upgraded one by one: this build exchanges verified data with the library of an older release, in both
//! directions and in every interface version that both have, in clear, checksummed and encrypted.
//!
//! The older library comes from `TOWLINE_OLDER_LIBRARY`; `tests/wire_compat.sh` builds one and runs this.

use crate::support::pair::Pair;
use crate::support::{child, context, key_file_of, pattern, versions, watchdog};
use towline::host::{ApiVersion, Context, Init, Net, Plugin};

const SIZES: [usize; 8] = [0, 1, 129, 4096, (16 << 10) + 1, (64 << 10) + 1, 512 << 10, (4 << 20) + 3];

fn older_plugin() -> Plugin {
    let file = std::env::var_os("TOWLINE_OLDER_LIBRARY").expect("TOWLINE_OLDER_LIBRARY names the older library");
    Plugin::open(file).expect("the older library opens")
}

fn older_context(plugin: &Plugin, version: ApiVersion) -> Context {
    let net = Net::of(plugin, Some(version)).expect("the older library exports the version");
    net.init_with(&Init { comm_id: 7, ..Init::default() }).expect("init of the older library")
}

/// Every size from one library into the other.
fn exchange(from: &Context, to: &Context, what: &str) {
    let pair = Pair::between((from, 0), (to, 0)).unwrap_or_else(|code| panic!("{what}: no connection: {code}"));
    for (seed, size) in SIZES.into_iter().enumerate() {
        let sent = pattern(seed, size);
        let arrived = pair.transfer(sent).unwrap_or_else(|code| panic!("{what}, {size} bytes: {code}"));
        assert!(arrived == sent, "{what}: {size} bytes arrived changed");
    }
    pair.close().unwrap_or_else(|code| panic!("{what}: close: {code}"));
}

fn both_ways() {
    let _watchdog = watchdog(100);
    let plugin = older_plugin();
    let shared = plugin.versions();
    assert!(shared.contains(&ApiVersion::V12) && shared.len() == versions().len(), "{shared:?}");
    for version in versions() {
        let (now, older) = (context(version), older_context(&plugin, version));
        exchange(&older, &now, &format!("{version}, from the older library to this one"));
        exchange(&now, &older, &format!("{version}, from this library to the older one"));
    }
    // NCCL's release, and so the interface, need not be the same on both hosts either.
    exchange(&older_context(&plugin, ApiVersion::V6), &context(ApiVersion::V12), "v6 of the older library to v12");
    exchange(&context(ApiVersion::V12), &older_context(&plugin, ApiVersion::V6), "v12 to v6 of the older library");
}

#[test]
#[ignore = "needs an older build: tests/wire_compat.sh"]
fn an_older_release_and_this_one_exchange_data_in_clear() {
    child::alone("wire_compat::an_older_release_and_this_one_exchange_data_in_clear", &[], both_ways);
}

#[test]
#[ignore = "needs an older build: tests/wire_compat.sh"]
fn an_older_release_and_this_one_exchange_checksummed_data() {
    child::alone(
        "wire_compat::an_older_release_and_this_one_exchange_checksummed_data",
        &[("TOWLINE_CHECKSUM", "1")],
        both_ways,
    );
}

#[test]
#[ignore = "needs an older build: tests/wire_compat.sh"]
fn an_older_release_and_this_one_exchange_encrypted_data() {
    let (_dir, key) = key_file_of(b"the quick brown fox jumps over the lazy dog");
    let key = [("TOWLINE_KEY_FILE", key.to_str().expect("a path"))];
    child::alone("wire_compat::an_older_release_and_this_one_exchange_encrypted_data", &key, both_ways);
}
