//! How a connection's streams share its long messages where the network is the limit.

use std::collections::HashMap;
use std::process::Command;
use std::time::Duration;

use crate::faults::{Ends, receive_stream, send_stream};
use crate::support::faults::Network;
use crate::support::netns::{Namespace, available};
use crate::support::{child, eventually, watchdog};

/// The bytes that each TCP socket of a host has sent, by its addresses.
fn sent(host: &Namespace) -> HashMap<String, u64> {
    let shown = Command::new("ip").args(["netns", "exec", host.name(), "ss", "-tinHO"]).output().expect("ss runs");
    let text = String::from_utf8_lossy(&shown.stdout);
    let of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let bytes = words.iter().find_map(|word| word.strip_prefix("bytes_sent:")?.parse().ok())?;
        Some((format!("{} {}", words.get(3)?, words.get(4)?), bytes))
    };
    text.lines().filter_map(of).collect()
}

#[test]
fn on_a_full_network_one_further_stream_carries_the_long_messages() {
    const NAME: &str = "spread::on_a_full_network_one_further_stream_carries_the_long_messages";
    let _watchdog = watchdog(90);
    match child::role().as_deref() {
        Some("sender") => return send_stream(),
        Some("receiver") => return receive_stream(),
        _ => {}
    }
    if !available() {
        return;
    }
    let network = Network::new(1, 400);
    let ends = Ends::start(NAME, &network.hosts, &[("TOWLINE_STREAMS", "5")]);
    eventually("one of four further streams sends nearly all", Duration::from_secs(30), || {
        let before = sent(&network.hosts.0);
        std::thread::sleep(Duration::from_millis(300));
        let now = sent(&network.hosts.0);
        let bytes: Vec<u64> = now.iter().map(|(socket, now)| now - before.get(socket).copied().unwrap_or(0)).collect();
        let (most, all) = (bytes.iter().max()?, bytes.iter().sum::<u64>());
        (now.len() >= 5 && all > 4 << 20 && *most > all / 100 * 95).then_some(())
    });
    child::send(ends.mail.path(), "stop", b"");
    ends.pass();
}
