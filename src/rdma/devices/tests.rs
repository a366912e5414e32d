use super::*;

fn found(device: &str, number: u8, pci: &str) -> Found {
    Found {
        device: device.to_owned(),
        number,
        card: DeviceFacts {
            transport: Transport::InfiniBand,
            guid: 7,
            ports: 1,
            max_qp: 4096,
            max_qp_wr: 1024,
            max_cqe: 4096,
            max_rd_atomic: 16,
        },
        port: PortFacts {
            is_active: true,
            link_layer: Some(LinkLayer::Ethernet),
            active_mtu: 3,
            max_message_bytes: 1 << 30,
            gid_count: 4,
            lid: 0,
            active_width: 2,
            active_speed: 32,
            needs_grh: false,
        },
        rate_mbps: None,
        driver_mbps: None,
        pci_path: (!pci.is_empty()).then(|| PathBuf::from(format!("/sys/devices/pci0000:00/0000:00:01.0/{pci}"))),
    }
}

fn selection() -> Selection {
    Selection::from_config(&Config::default()).0
}

fn names(ports: &[(Port, PortFacts)]) -> Vec<String> {
    ports.iter().map(|(port, _)| format!("{}:{}", port.device, port.number)).collect()
}

#[test]
fn only_active_ports_of_known_networks_that_the_list_chose_are_used() {
    let mut down = found("mlx5_1", 1, "0000:18:00.0");
    down.port.is_active = false;
    let mut odd = found("opa0", 1, "0000:19:00.0");
    odd.port.link_layer = None;
    let all = vec![found("mlx5_0", 1, "0000:17:00.0"), down, odd, found("mlx5_2", 1, "0000:1a:00.0")];
    assert_eq!(names(&arrange(all.clone(), &selection())), ["mlx5_0:1", "mlx5_2:1"]);
    let chosen = Selection { filter: HcaFilter::parse("^mlx5_0"), ..selection() };
    assert_eq!(names(&arrange(all, &chosen)), ["mlx5_2:1"]);
}

/// EFA reports no link layer; a driver that reports one may still have another transport.
#[test]
fn ports_of_other_transports_are_left_out_with_a_sentence() {
    let like = |device: &str, transport, link_layer| {
        let mut port = found(device, 1, "0000:17:00.0");
        (port.card.transport, port.port.link_layer) = (transport, link_layer);
        port
    };
    let all = vec![
        like("rdmap0s6", Transport::Other, None),
        like("irdma0", Transport::Iwarp, Some(LinkLayer::Ethernet)),
        like("odd_0", Transport::InfiniBand, None),
        like("mlx5_0", Transport::InfiniBand, Some(LinkLayer::InfiniBand)),
    ];
    let said: Vec<String> = all.iter().filter_map(Found::obstacle).collect();
    assert_eq!(names(&arrange(all, &selection())), ["mlx5_0:1"]);
    assert_eq!(said.len(), 3, "{said:?}");
    assert!(said[0].starts_with("rdmap0s6:1 has a transport of its own") && said[1].contains("iWARP"), "{said:?}");
    assert!(said.iter().all(|said| said.ends_with("it is left out")), "{said:?}");
}

#[test]
fn ports_are_sorted_by_pci_address_and_those_without_one_come_last() {
    let all = || {
        vec![
            found("rxe0", 1, ""),
            found("mlx5_1", 1, "0000:ca:00.0"),
            found("mlx5_0", 1, "0000:17:00.1"),
            found("rxe1", 1, ""),
            found("mlx5_2", 1, "0000:17:00.0"),
        ]
    };
    assert_eq!(names(&arrange(all(), &selection())), ["mlx5_2:1", "mlx5_0:1", "mlx5_1:1", "rxe0:1", "rxe1:1"]);
    let unsorted = Selection { pci_order: false, ..selection() };
    assert_eq!(names(&arrange(all(), &unsorted))[..2], ["rxe0:1", "mlx5_1:1"]);
}

#[test]
fn functions_of_one_card_look_like_its_ports() {
    let all = || {
        vec![
            found("mlx5_0", 1, "0000:17:00.0"),
            found("mlx5_1", 1, "0000:17:00.1"),
            found("mlx5_2", 1, "0000:17:02.3"),
            found("mlx5_3", 1, "0000:18:00.0"),
        ]
    };
    let shown = |selection: &Selection| {
        let name = |port: &Port| port.pci_path.as_ref().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        arrange(all(), selection).iter().map(|(port, _)| (name(port), port.card_port)).collect::<Vec<_>>()
    };
    let text = |list: &[(&str, i32)]| list.iter().map(|(name, port)| ((*name).to_owned(), *port)).collect::<Vec<_>>();
    let merged = [("0000:17:00.0", 1), ("0000:17:00.0", 2), ("0000:17:00.0", 3), ("0000:18:00.0", 1)];
    assert_eq!(shown(&selection()), text(&merged));
    let apart = [("0000:17:00.0", 1), ("0000:17:00.0", 2), ("0000:17:02.0", 1), ("0000:18:00.0", 1)];
    assert_eq!(shown(&Selection { merge_vfs: false, ..selection() }), text(&apart));
}

#[test]
fn software_devices_are_no_ports_of_each_other() {
    let ports = arrange(vec![found("rxe0", 1, ""), found("rxe1", 1, "")], &selection());
    assert_eq!(ports.iter().map(|(port, _)| port.card_port).collect::<Vec<_>>(), [1, 1]);
    assert!(ports.iter().all(|(port, _)| port.pci_path.is_none()));
}

#[test]
fn speed_is_rate_times_width_or_what_the_kernel_knows_better() {
    let speed_of = |qp: u8, width: u8, rate: Option<u32>| {
        let mut port = found("mlx5_0", 1, "");
        (port.port.active_speed, port.port.active_width, port.rate_mbps) = (qp, width, rate);
        speed(&port)
    };
    assert_eq!(speed_of(1, 1, None), 2500);
    assert_eq!(speed_of(16, 2, None), 56_000);
    assert_eq!(speed_of(32, 2, Some(100_000)), 100_000);
    assert_eq!(speed_of(64, 2, None), 200_000);
    assert_eq!(speed_of(128, 2, Some(800_000)), 800_000, "XDR, which the encoding of older libraries lacks");
    assert_eq!(speed_of(128, 16, None), 200_000);
    let bonded = Found { driver_mbps: Some(1_600_000), ..found("mlx5_bond_0", 1, "") };
    assert_eq!(speed(&bonded), 1_600_000);
}

/// A host as laid out in sysfs: `(device, port, path below /sys/devices, rate)`, in libibverbs's order, that is sorted
/// by name.
type Tree<'a> = &'a [(&'a str, u8, &'a str, &'a str)];

/// The result of discovery on such a host, as NCCL gets it: each port's name, its card, and its port of the card.
fn shown(tree: Tree<'_>, selection: &Selection) -> Vec<(String, String, i32)> {
    let root = tempfile::tempdir().expect("a directory");
    for (device, number, path, rate) in tree {
        let class = root.path().join("class/infiniband").join(device);
        let port = class.join("ports").join(number.to_string());
        std::fs::create_dir_all(&port).expect("a port");
        std::fs::write(port.join("rate"), rate).expect("a file");
        let function = root.path().join("devices").join(path);
        if !path.is_empty() && !class.join("device").exists() {
            std::fs::create_dir_all(&function).expect("a function");
            std::os::unix::fs::symlink(&function, class.join("device")).expect("a link");
        }
    }
    let sysfs = RdmaSysfs::at(root.path());
    let found = |(device, number, ..): &(&str, u8, &str, &str)| Found {
        rate_mbps: sysfs.rate_mbps(device, *number),
        pci_path: sysfs.pci_path(device),
        ..super::tests::found(device, *number, "")
    };
    let card = |port: &Port| {
        let path = port.pci_path.as_ref().and_then(|path| path.file_name());
        path.map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    };
    let ports = arrange(tree.iter().map(found).collect(), selection);
    ports.iter().map(|(port, _)| (port.name(), card(port), port.card_port)).collect()
}

fn rows(list: &[(&str, &str, i32)]) -> Vec<(String, String, i32)> {
    list.iter().map(|(name, card, port)| ((*name).to_owned(), (*card).to_owned(), *port)).collect()
}

const NDR: &str = "400 Gb/sec (4X NDR)\n";

/// A DGX H100 with its eight compute cards and a dual-port storage card; NCCL_IB_HCA selects the compute ones.
#[test]
fn the_cards_of_a_dgx_h100_are_numbered_by_their_place_on_the_bus() {
    let tree: Tree<'_> = &[
        ("mlx5_0", 1, "pci0000:15/0000:15:01.0/0000:18:00.0", NDR),
        ("mlx5_1", 1, "pci0000:26/0000:26:01.0/0000:29:00.0", NDR),
        ("mlx5_10", 1, "pci0000:c7/0000:c7:01.0/0000:ce:00.0", NDR),
        ("mlx5_11", 1, "pci0000:d7/0000:d7:01.0/0000:dc:00.0", NDR),
        ("mlx5_2", 1, "pci0000:26/0000:26:01.0/0000:29:00.1", NDR),
        ("mlx5_3", 1, "pci0000:37/0000:37:01.0/0000:40:00.0", NDR),
        ("mlx5_4", 1, "pci0000:48/0000:48:01.0/0000:4f:00.0", NDR),
        ("mlx5_5", 1, "pci0000:59/0000:59:01.0/0000:5e:00.0", NDR),
        ("mlx5_6", 1, "pci0000:97/0000:97:01.0/0000:9a:00.0", NDR),
        ("mlx5_9", 1, "pci0000:b7/0000:b7:01.0/0000:c0:00.0", NDR),
    ];
    let filter = HcaFilter::parse("=mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11");
    let expected = [
        ("mlx5_0", "0000:18:00.0", 1),
        ("mlx5_3", "0000:40:00.0", 1),
        ("mlx5_4", "0000:4f:00.0", 1),
        ("mlx5_5", "0000:5e:00.0", 1),
        ("mlx5_6", "0000:9a:00.0", 1),
        ("mlx5_9", "0000:c0:00.0", 1),
        ("mlx5_10", "0000:ce:00.0", 1),
        ("mlx5_11", "0000:dc:00.0", 1),
    ];
    assert_eq!(shown(tree, &Selection { filter, ..selection() }), rows(&expected));
    // Without `NCCL_IB_HCA` the storage card's two functions are one card with two ports.
    let all = shown(tree, &selection());
    assert_eq!(all.len(), 10);
    assert_eq!(all[1..3], rows(&[("mlx5_1", "0000:29:00.0", 1), ("mlx5_2", "0000:29:00.0", 2)]));
}

/// ConnectX cards have a function for each port; older ones have one with two ports.
#[test]
fn both_kinds_of_dual_port_cards_have_two_ports() {
    let functions: Tree<'_> = &[
        ("mlx5_0", 1, "pci0000:00/0000:00:02.0/0000:03:00.0", NDR),
        ("mlx5_1", 1, "pci0000:00/0000:00:02.0/0000:03:00.1", NDR),
    ];
    assert_eq!(shown(functions, &selection()), rows(&[("mlx5_0", "0000:03:00.0", 1), ("mlx5_1", "0000:03:00.0", 2)]));
    let ports: Tree<'_> = &[
        ("mlx4_0", 1, "pci0000:00/0000:00:02.0/0000:03:00.0", "56 Gb/sec (4X FDR)\n"),
        ("mlx4_0", 2, "pci0000:00/0000:00:02.0/0000:03:00.0", "56 Gb/sec (4X FDR)\n"),
    ];
    let shown = shown(ports, &selection());
    assert_eq!(shown.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["mlx4_0", "mlx4_0:2"]);
}

/// A bond is one device with one port, on its first function.
#[test]
fn a_bond_is_one_device() {
    let tree: Tree<'_> = &[
        ("mlx5_2", 1, "pci0000:80/0000:80:01.0/0000:81:00.0", NDR),
        ("mlx5_bond_0", 1, "pci0000:00/0000:00:02.0/0000:03:00.0", "200 Gb/sec (4X HDR)\n"),
    ];
    let expected = [("mlx5_bond_0", "0000:03:00.0", 1), ("mlx5_2", "0000:81:00.0", 1)];
    assert_eq!(shown(tree, &selection()), rows(&expected));
}

/// A pod sees the virtual functions that it was given, and not their card: NCCL gets the card's place on the bus, or
/// each function's own.
#[test]
fn virtual_functions_in_a_pod_stand_for_their_cards_unless_the_user_keeps_them_apart() {
    let tree: Tree<'_> = &[
        ("mlx5_14", 1, "pci0000:15/0000:15:01.0/0000:18:00.4", NDR),
        ("mlx5_22", 1, "pci0000:37/0000:37:01.0/0000:40:01.2", NDR),
    ];
    assert_eq!(shown(tree, &selection()), rows(&[("mlx5_14", "0000:18:00.0", 1), ("mlx5_22", "0000:40:00.0", 1)]));
    let apart = Selection { merge_vfs: false, ..selection() };
    assert_eq!(shown(tree, &apart), rows(&[("mlx5_14", "0000:18:00.0", 1), ("mlx5_22", "0000:40:01.0", 1)]));
}

/// With data direct a card has a second function on the GPU's own bus, which is no device of its own. The card is one
/// device, at the place of its first function. (Towline does not use the second one.)
#[test]
fn a_data_direct_card_is_one_device_at_its_first_function() {
    let tree: Tree<'_> = &[("mlx5_0", 1, "pci0000:00/0000:00:00.0/0000:03:00.0", "800 Gb/sec (4X XDR)\n")];
    assert_eq!(shown(tree, &selection()), rows(&[("mlx5_0", "0000:03:00.0", 1)]));
}

#[test]
fn a_bad_range_is_told_and_ignored() {
    let pairs = [("NCCL_IB_ADDR_RANGE", "10.7.0.0/99"), ("NCCL_IB_HCA", "=mlx5_0:1"), ("NCCL_IB_GID_INDEX", "3")];
    let (config, complaints) = Config::from_pairs(pairs);
    assert_eq!(complaints.len(), 0);
    let (selection, complaints) = Selection::from_config(&config);
    assert_eq!((selection.gid.range, selection.gid.index), (None, Some(3)));
    assert!(complaints[0].contains("prefix length"), "{complaints:?}");
    assert!(selection.filter.choose("mlx5_0", 1).is_some() && selection.filter.choose("mlx5_0", 2).is_none());
}
