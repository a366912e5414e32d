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
        pci_path: (!pci.is_empty()).then(|| PathBuf::from(format!("/sys/devices/pci0000:00/0000:00:01.0/{pci}"))),
    }
}

fn wish() -> Wish {
    Wish::from_config(&Config::default()).0
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
    assert_eq!(names(&arrange(all.clone(), &wish())), ["mlx5_0:1", "mlx5_2:1"]);
    let chosen = Wish { filter: HcaFilter::parse("^mlx5_0"), ..wish() };
    assert_eq!(names(&arrange(all, &chosen)), ["mlx5_2:1"]);
}

/// EFA names no link layer; a driver that names one may still have another transport.
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
    assert_eq!(names(&arrange(all, &wish())), ["mlx5_0:1"]);
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
    assert_eq!(names(&arrange(all(), &wish())), ["mlx5_2:1", "mlx5_0:1", "mlx5_1:1", "rxe0:1", "rxe1:1"]);
    let unsorted = Wish { pci_order: false, ..wish() };
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
    let shown = |wish: &Wish| {
        let name = |port: &Port| port.pci_path.as_ref().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        arrange(all(), wish).iter().map(|(port, _)| (name(port), port.card_port)).collect::<Vec<_>>()
    };
    let text = |list: &[(&str, i32)]| list.iter().map(|(name, port)| ((*name).to_owned(), *port)).collect::<Vec<_>>();
    let merged = [("0000:17:00.0", 1), ("0000:17:00.0", 2), ("0000:17:00.0", 3), ("0000:18:00.0", 1)];
    assert_eq!(shown(&wish()), text(&merged));
    let apart = [("0000:17:00.0", 1), ("0000:17:00.0", 2), ("0000:17:02.0", 1), ("0000:18:00.0", 1)];
    assert_eq!(shown(&Wish { merge_vfs: false, ..wish() }), text(&apart));
}

#[test]
fn software_devices_are_no_ports_of_each_other() {
    let ports = arrange(vec![found("rxe0", 1, ""), found("rxe1", 1, "")], &wish());
    assert_eq!(ports.iter().map(|(port, _)| port.card_port).collect::<Vec<_>>(), [1, 1]);
    assert!(ports.iter().all(|(port, _)| port.pci_path.is_none()));
}

#[test]
fn speed_is_rate_times_width_or_what_the_kernel_knows_better() {
    let speed_of = |lane: u8, width: u8, rate: Option<u32>| {
        let mut port = found("mlx5_0", 1, "");
        (port.port.active_speed, port.port.active_width, port.rate_mbps) = (lane, width, rate);
        speed(&port)
    };
    assert_eq!(speed_of(1, 1, None), 2500);
    assert_eq!(speed_of(16, 2, None), 56_000);
    assert_eq!(speed_of(32, 2, Some(100_000)), 100_000);
    assert_eq!(speed_of(64, 2, None), 200_000);
    assert_eq!(speed_of(128, 2, Some(800_000)), 800_000, "XDR, which the encoding of older libraries lacks");
    assert_eq!(speed_of(128, 16, None), 200_000);
}

#[test]
fn a_bad_range_is_told_and_ignored() {
    let pairs = [("NCCL_IB_ADDR_RANGE", "10.7.0.0/99"), ("NCCL_IB_HCA", "=mlx5_0:1"), ("NCCL_IB_GID_INDEX", "3")];
    let (config, complaints) = Config::from_pairs(pairs);
    assert_eq!(complaints.len(), 0);
    let (wish, complaints) = Wish::from_config(&config);
    assert_eq!((wish.gid.range, wish.gid.index), (None, Some(3)));
    assert!(complaints[0].contains("prefix length"), "{complaints:?}");
    assert!(wish.filter.choose("mlx5_0", 1).is_some() && wish.filter.choose("mlx5_0", 2).is_none());
}
