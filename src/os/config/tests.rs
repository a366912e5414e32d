//! The promises of the configuration: defaults, parsing, complaints, and the documentation page.

use super::*;
use proptest::prelude::*;

fn one(name: &str, value: &str) -> (Config, Vec<Complaint>) {
    Config::from_pairs([(name, value)])
}

#[test]
fn an_empty_environment_gives_the_documented_defaults() {
    let (config, complaints) = Config::from_pairs(Vec::<(String, String)>::new());
    assert!(complaints.is_empty());
    assert_eq!(config, Config::default());
    assert_eq!(config.rails, Rails::Single);
    assert_eq!(config.streams, None);
    assert!(config.recovery);
    assert_eq!(config.log, LogLevel::Warn);
    assert_eq!(config.reconnect_timeout, Duration::from_secs(10));
}

#[test]
fn each_variable_reaches_its_field() {
    let (config, complaints) = Config::from_pairs([
        ("TOWLINE_RAILS", "eth0, eth1,eth0"),
        ("TOWLINE_STREAMS", "4"),
        ("TOWLINE_WORKERS", "2"),
        ("TOWLINE_RECOVERY", "off"),
        ("TOWLINE_RECONNECT_TIMEOUT", "2.5"),
        ("TOWLINE_PEER_TIMEOUT", "3s"),
        ("TOWLINE_CONNECT_TIMEOUT", " 4 "),
        ("TOWLINE_TCP_CONGESTION", "cubic"),
        ("TOWLINE_SPEED", "200000"),
        ("TOWLINE_LOG", "DEBUG"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_SOCKET_FAMILY", "AF_INET6"),
        ("NCCL_COMM_ID", "10.0.0.1:1234"),
        ("TOWLINE_PROFILE", "trace,metrics"),
        ("TOWLINE_PROFILE_DIR", "/traces"),
        ("TOWLINE_PROFILE_EVENTS", "Coll"),
        ("TOWLINE_PROFILE_BUFFER", "64"),
        ("TOWLINE_PROFILE_LIMIT", "100"),
        ("TOWLINE_PROFILE_CONTROL", "off"),
        ("TOWLINE_METRICS_FILE", "/m/%p.prom"),
        ("TOWLINE_METRICS_INTERVAL", "0.5"),
        ("TOWLINE_METRICS_LISTEN", "9400"),
        ("TOWLINE_STATUS_LISTEN", "9500"),
        ("TOWLINE_PROFILER_CHAIN", "libother.so"),
        ("TOWLINE_STATUS", "no"),
        ("TOWLINE_STATE_DIR", "/states"),
        ("TOWLINE_STUCK_AFTER", "60"),
        ("TOWLINE_BACKEND", "RDMA"),
        ("NCCL_IB_HCA", "=mlx5_0:1"),
        ("NCCL_IB_GID_INDEX", "3"),
        ("NCCL_IB_PKEY", "0x7f"),
        ("PATH", "/bin"),
    ]);
    assert_eq!(complaints, []);
    let expected = Config {
        rails: Rails::List(vec!["eth0".into(), "eth1".into()]),
        streams: Some(4),
        workers: Some(2),
        recovery: false,
        reconnect_timeout: Duration::from_millis(2500),
        peer_timeout: Duration::from_secs(3),
        connect_timeout: Duration::from_secs(4),
        tcp_congestion: Some("cubic".into()),
        speed: Some(200_000),
        log: LogLevel::Debug,
        socket_ifname: Some("=eth0".into()),
        socket_family: Some(Family::V6),
        comm_id: Some("10.0.0.1:1234".into()),
        profile: Some("trace,metrics".into()),
        profile_dir: Some("/traces".into()),
        profile_events: Some("Coll".into()),
        profile_buffer: Some(64),
        profile_limit: Some(100),
        profile_control: Some("off".into()),
        metrics_file: Some("/m/%p.prom".into()),
        metrics_interval: Duration::from_millis(500),
        metrics_listen: Some("9400".into()),
        status_listen: Some("9500".into()),
        profiler_chain: Some("libother.so".into()),
        status: Some(false),
        state_dir: Some("/states".into()),
        stuck_after: Duration::from_secs(60),
        backend: Backend::Rdma,
        ib_hca: Some("=mlx5_0:1".into()),
        ib_gid_index: Number(3),
        ib_pkey: Number(0x7f),
        ..Config::default()
    };
    assert_eq!(config, expected);
}

#[test]
fn an_unknown_name_is_told_with_the_nearest_valid_one() {
    let (config, complaints) = one("TOWLINE_WROKERS", "3");
    assert_eq!(config, Config::default());
    assert_eq!(
        complaints[0].to_string(),
        "TOWLINE_WROKERS is not a variable of Towline and is ignored (did you mean TOWLINE_WORKERS?)"
    );
    assert!(one("NCCL_WROKERS", "3").1.is_empty(), "names of others are none of our business");
    assert!(one("TOWLINE_BLESS", "1").1.is_empty(), "the tests' own switch is known");
}

#[test]
fn a_bad_value_is_told_with_the_nearest_valid_one_and_the_default_is_used() {
    for (name, value, near) in [
        ("TOWLINE_LOG", "wran", Some("warn")),
        ("TOWLINE_BACKEND", "rmda", Some("rdma")),
        ("NCCL_IB_TIMEOUT", "-1", Some("0")),
        ("NCCL_IB_AR_THRESHOLD", "-1", Some("0")),
        ("NCCL_IB_RETRY_CNT", "8", Some("7")),
        ("NCCL_IB_TC", "-2", Some("-1")),
        ("NCCL_IB_SL", "high", None),
        ("TOWLINE_STREAMS", "0", Some("1")),
        ("TOWLINE_STREAMS", "99999999999999999999999", Some("1024")),
        ("TOWLINE_STREAMS", "many", None),
        ("TOWLINE_WORKERS", "uato", Some("auto")),
        ("TOWLINE_RECOVERY", "flase", Some("0")),
        ("TOWLINE_RECOVERY", "2", None),
        ("TOWLINE_PEER_TIMEOUT", "-1", Some("0.001")),
        ("TOWLINE_PEER_TIMEOUT", "inf", Some("86400")),
        ("TOWLINE_PEER_TIMEOUT", "soon", None),
        ("TOWLINE_RAILS", ",", None),
        ("TOWLINE_RAILS", "^docker,lo", Some("all")),
        ("TOWLINE_RAILS", "*", Some("all")),
        ("TOWLINE_RAILS", "=eno1,eno2", Some("eno1,eno2")),
        ("TOWLINE_RAILS", "==eno1", Some("eno1")),
        ("TOWLINE_RAILS", "eno1 eno2", Some("eno1,eno2")),
        ("TOWLINE_RAILS", "eno1;eno2", Some("eno1,eno2")),
        ("TOWLINE_RAILS", "10.9.1.1", None),
        ("NCCL_SOCKET_FAMILY", "ipv6", Some("AF_INET6")),
        ("NCCL_SOCKET_FAMILY", "4", Some("AF_INET")),
        ("NCCL_SOCKET_FAMILY", "AF_INET4", Some("AF_INET")),
    ] {
        let (config, complaints) = one(name, value);
        assert_eq!(config, Config::default(), "{name}={value}");
        assert_eq!(complaints.len(), 1, "{name}={value}");
        assert_eq!(complaints[0].name, name);
        assert_eq!(complaints[0].nearest.as_deref(), near, "{name}={value}: {}", complaints[0]);
    }
}

/// NCCL's documentation gives 0 and 32 as "no timeout", and a threshold above the size of NCCL's buffers as "never".
#[test]
fn numbers_that_mean_without_limit_are_taken() {
    for text in ["0", "32", "40", "4294967296"] {
        let (config, complaints) = one("NCCL_IB_TIMEOUT", text);
        assert_eq!((config.ib_timeout.0.to_string().as_str(), complaints), (text, Vec::new()));
    }
    let (config, complaints) = one("NCCL_IB_AR_THRESHOLD", "9223372036854775807");
    assert_eq!((config.ib_ar_threshold.0, complaints), (i64::MAX, Vec::new()));
}

#[test]
fn the_table_is_sound() {
    for (index, variable) in TABLE.iter().enumerate() {
        assert!((variable.check)(variable.default).is_ok(), "{}: the default parses", variable.name);
        assert!(!variable.help.is_empty() && variable.help.ends_with('.'), "{}: help", variable.name);
        assert!(!variable.help.contains('\n'), "{}: help is one paragraph", variable.name);
        assert!(!TABLE[..index].iter().any(|other| other.name == variable.name), "{} twice", variable.name);
    }
}

/// A variable that is documented and read nowhere would have no effect.
#[test]
fn every_field_is_used_outside_of_the_configuration() {
    fn sources(below: &std::path::Path, text: &mut String) {
        for entry in std::fs::read_dir(below).expect("a directory").flatten() {
            let path = entry.path();
            if path.is_dir() {
                sources(&path, text);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(&path).expect("a source");
                // Tests do not count as use.
                text.push_str(source.split("\n#[cfg(test)]\nmod tests").next().unwrap_or_default());
            }
        }
    }
    let mut text = String::new();
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).expect("the sources").flatten() {
        if entry.path().is_dir() {
            sources(&entry.path(), &mut text);
        }
    }
    assert_eq!(FIELDS.len(), TABLE.len());
    for (name, field) in FIELDS {
        let is_read = |at: usize, found: &str| {
            let next = text[at + found.len()..].chars().next();
            !next.is_some_and(|next| next.is_alphanumeric() || next == '_')
        };
        let wanted = format!("config.{field}");
        assert!(text.match_indices(&wanted).any(|(at, found)| is_read(at, found)), "{name} is read nowhere");
    }
}

#[test]
fn doctor_sees_where_each_value_comes_from() {
    let found = settings(|name| match name {
        "TOWLINE_LOG" => Some("info".to_owned()),
        "TOWLINE_STREAMS" => Some("none".to_owned()),
        _ => None,
    });
    assert_eq!(found.len(), TABLE.len());
    let get = |name: &str| found.iter().find(|setting| setting.variable.name == name).expect("in the table");
    assert_eq!((get("TOWLINE_LOG").value.as_str(), get("TOWLINE_LOG").source), ("info", Source::Environment));
    assert_eq!((get("TOWLINE_STREAMS").value.as_str(), get("TOWLINE_STREAMS").source), ("auto", Source::Rejected));
    assert_eq!((get("TOWLINE_RECOVERY").value.as_str(), get("TOWLINE_RECOVERY").source), ("1", Source::Default));
}

/// Also the command that writes the page: `TOWLINE_BLESS=1 cargo test config_docs`.
#[test]
fn config_docs_are_what_the_table_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configuration.md");
    let rendered = render_markdown();
    if std::env::var_os("TOWLINE_BLESS").is_some() {
        std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/docs")).expect("docs can be made");
        std::fs::write(path, &rendered).expect("the page can be written");
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == rendered, "docs/configuration.md is stale: run `TOWLINE_BLESS=1 cargo test config_docs`");
}

proptest! {
    #[test]
    fn no_value_whatever_stops_the_reading(index in 0..TABLE.len(), text in any::<String>()) {
        let (config, complaints) = one(TABLE[index].name, &text);
        // Either the value was accepted, or there is a complaint and the default stays.
        prop_assert!(complaints.is_empty() || config == Config::default());
    }

    #[test]
    fn a_suggested_value_is_itself_valid(index in 0..TABLE.len(), text in "[a-z0-9.-]{0,8}") {
        for complaint in one(TABLE[index].name, &text).1 {
            if let Some(nearest) = complaint.nearest {
                prop_assert!((TABLE[index].check)(&nearest).is_ok(), "{nearest}");
            }
        }
    }
}

/// Docker's --env-file and YAML keep quotes; users put blanks behind commas.
#[test]
fn quotes_and_blanks_around_the_names_of_rails_are_no_part_of_them() {
    for text in ["\"eno1,eno2\"", " eno1, eno2 ", "'eno1', 'eno2'", "eno1,eno1,eno2,"] {
        let (config, complaints) = one("TOWLINE_RAILS", text);
        assert_eq!((config.rails, complaints.len()), (Rails::List(vec!["eno1".into(), "eno2".into()]), 0), "{text}");
    }
    assert_eq!(one("TOWLINE_RAILS", "\"all\"").0.rails, Rails::All);
}
