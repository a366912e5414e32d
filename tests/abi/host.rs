//! The host against the built library: what other tests take for granted.

use crate::support::pair::Pair;
use towline::host::log::Capture;
use towline::host::{ApiVersion, Code, Context, Net, Plugin};

fn context(version: ApiVersion) -> Context {
    let plugin = Plugin::open_default().expect("the library lies beside the test");
    Net::of(&plugin, Some(version)).unwrap().init().unwrap()
}

#[test]
fn a_pair_moves_data_under_every_version() {
    for version in ApiVersion::NEWEST_FIRST {
        let context = context(version);
        assert_eq!(context.net().name(), "Towline");
        let properties = context.properties(0).unwrap();
        assert!(!properties.name.is_empty() && properties.speed_mbps > 0, "{properties:?}");
        let pair = Pair::connect(&context, 0).unwrap();
        for size in [0, 1, 4097, 300_000] {
            let data: Vec<u8> = (0..size).map(|i| (i * 7 + i / 251) as u8).collect();
            assert_eq!(pair.transfer(&data).unwrap(), data, "{version}, {size} bytes");
            assert_eq!(pair.transfer_into(&data, size + 100).unwrap(), data, "{version}, a larger receive");
        }
        pair.close().unwrap();
    }
}

#[test]
fn a_group_takes_its_parts_by_tag() {
    let context = context(ApiVersion::V12);
    let pair = Pair::connect(&context, 0).unwrap();
    let (a, b, c) = (vec![1; 10], vec![2; 200_000], vec![3; 1]);
    let arrived = pair.exchange(&[(7, &a[..]), (9, &b), (7, &c)], &[(9, 300_000), (7, 10), (7, 10)]).unwrap();
    assert_eq!(arrived, [b, a, c]);
}

#[test]
fn v4_has_no_groups_and_old_versions_no_large_messages() {
    let context = context(ApiVersion::V4);
    let pair = Pair::connect(&context, 0).unwrap();
    assert!(matches!(pair.exchange(&[], &[(0, 8), (1, 8)]), Err(Code::NotOffered(_))));
    assert_eq!(context.make_vdevice(&[0]), Err(Code::NotOffered("makeVDevice")));
    let (listener, handle) = context.listen(0).unwrap();
    assert_eq!(handle.bytes().len(), 64);
    drop(listener);
}

#[test]
fn the_logger_hears_the_plugin() {
    let capture = Capture::start();
    assert!(context(ApiVersion::V12).listen(4711).is_err());
    let records = capture.records();
    assert!(records.iter().any(|record| record.text.contains("4711")), "{records:?}");
}
