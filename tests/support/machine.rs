//! The emulated machine of the RDMA tests, whose links and devices a test may change as it likes.

use std::process::Command;

/// Runs a shell's command in it; gives what it printed.
pub fn machine(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().expect("a shell");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Which end of a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcpEnd {
    /// The one that has connected.
    Connecting,
    /// The one that has accepted.
    Listening,
}

/// Has every TCP connection of the machine that exists now fall silent, as a firewall does that forgets them. New ones
/// are let through. Until [`remember_connections`].
pub fn forget_connections() {
    machine(
        "tc qdisc add dev lo root handle 1: prio bands 3 priomap 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0; \
         tc qdisc add dev lo parent 1:3 handle 30: netem loss 100%; \
         listening=$(ss -Htnl | awk '{ print $(NF - 1) }' | sed 's/.*://'); \
         for port in $(ss -Htn state established | awk '{ print $(NF - 1) }' | sed 's/.*://'); do \
             case \" $listening \" in *\"$port\"*) continue;; esac; \
             for end in sport dport; do \
                 tc filter add dev lo parent 1: protocol ip u32 match ip $end $port 0xffff flowid 1:3; \
             done; \
         done",
    );
}

/// Lets all through again.
pub fn remember_connections() {
    machine("tc qdisc del dev lo root");
}

/// Ends this end of every TCP connection of the machine, as an administrator may; the other one is sent a reset.
pub fn reset(end: TcpEnd) {
    // The last two columns are the local and the other address, in all states.
    let sockets = |state: &str| machine(&format!("ss -Htn state {state} | awk '{{ print $(NF - 1), $NF }}'"));
    let local = |socket: &str| socket.split(' ').next().and_then(|local| local.rsplit(':').next()).map(str::to_owned);
    let (listening, connected) = (sockets("listening"), sockets("established"));
    let listening: Vec<_> = listening.lines().map(local).collect();
    let is_wanted = |socket: &&str| listening.contains(&local(socket)) == (end == TcpEnd::Listening);
    let wanted: Vec<_> = connected.lines().filter(is_wanted).collect();
    for socket in &wanted {
        machine(&format!("ss -HKtn state established sport = :{}", local(socket).expect("a port")));
    }
    let after = sockets("established");
    let is_left = wanted.iter().any(|socket| after.lines().any(|other| other == *socket));
    assert!(!wanted.is_empty() && !is_left, "{connected:?}, and then {after:?}");
}
