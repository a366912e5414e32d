//! Cutting rails between two network namespaces in the ways that networks have, and mending them.
//!
//! Needs `nft` (package nftables) and `tc` (package iproute2) besides what [`super::netns`] needs.

use super::netns::{Namespace, two_hosts};

/// How a rail is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The interface of the first host goes down.
    DownHere,
    /// The interface of the second host goes down.
    DownThere,
    /// Packets vanish in both directions.
    Silent,
    /// Packets to the first host vanish, the others arrive.
    HalfSilent,
    /// Each TCP packet is answered with a reset.
    Reset,
    /// The rate goes to one byte a second.
    Stuck,
    /// One packet of thirty vanishes, in both directions: a bad cable. No fault that a rail is given up for.
    Lossy,
}

impl Cut {
    /// All ways in which a rail carries nothing any more.
    pub const ALL: [Self; 6] =
        [Self::DownHere, Self::DownThere, Self::Silent, Self::HalfSilent, Self::Reset, Self::Stuck];
}

/// Answers a packet with a reset. The resets of the other host's rule are let through: this one's would swallow them,
/// and nobody would ever see one.
pub const REJECT: &str = "tcp flags & rst == 0 reject with tcp reset";

/// Two hosts with rails between them, each of a known rate if one is given.
pub struct Network {
    /// Both ends.
    pub hosts: (Namespace, Namespace),
    rails: usize,
    mbit: Option<u32>,
}

impl Network {
    /// With all rails in order. `mbit`: the rate of each rail and direction, in Mbit/s; 0 for what the machine gives.
    pub fn new(rails: usize, mbit: u32) -> Self {
        let network = Self { hosts: two_hosts(rails), rails, mbit: (mbit > 0).then_some(mbit) };
        for host in network.both() {
            let chains = "add table inet cut\nadd chain inet cut in { type filter hook input priority 0 ; }";
            nft(host, chains);
        }
        (0..rails).for_each(|rail| network.shape(rail));
        network
    }

    /// How many rails.
    pub fn rails(&self) -> usize {
        self.rails
    }

    fn both(&self) -> [&Namespace; 2] {
        [&self.hosts.0, &self.hosts.1]
    }

    fn shape(&self, rail: usize) {
        for host in self.both() {
            match self.mbit {
                // Half a buffer of 50 ms, as a switch might have.
                Some(mbit) => {
                    host.tc(&format!("qdisc replace dev rail{rail} root tbf rate {mbit}mbit burst 128k latency 50ms"))
                }
                None => host.tc(&format!("qdisc replace dev rail{rail} root pfifo_fast")),
            }
        }
    }

    /// Cuts a rail.
    pub fn cut(&self, rail: usize, how: Cut) {
        let drop = format!("add rule inet cut in iifname rail{rail} drop");
        match how {
            Cut::DownHere => self.hosts.0.ip(&format!("link set rail{rail} down")),
            Cut::DownThere => self.hosts.1.ip(&format!("link set rail{rail} down")),
            Cut::Silent => self.both().into_iter().for_each(|host| nft(host, &drop)),
            Cut::HalfSilent => nft(&self.hosts.0, &drop),
            Cut::Lossy => {
                let lose = format!("add rule inet cut in iifname rail{rail} numgen random mod 30 == 0 drop");
                self.both().into_iter().for_each(|host| nft(host, &lose));
            }
            Cut::Reset => {
                let reset = format!("add rule inet cut in iifname rail{rail} {REJECT}");
                self.both().into_iter().for_each(|host| nft(host, &reset));
            }
            Cut::Stuck => {
                for host in self.both() {
                    host.tc(&format!("qdisc replace dev rail{rail} root tbf rate 8bit burst 1600 limit 3000"));
                }
            }
        }
    }

    /// Mends what [`Network::cut`] did to a rail.
    pub fn mend(&self, rail: usize, how: Cut) {
        match how {
            Cut::DownHere | Cut::DownThere => {
                self.hosts.0.bring_up(rail, 1);
                self.hosts.1.bring_up(rail, 2);
            }
            Cut::Silent | Cut::HalfSilent | Cut::Reset | Cut::Lossy => {
                // Other rails may be cut at the same time: only this one's rules go.
                for host in self.both() {
                    remove_rules(host, "in", &format!("\"rail{rail}\""));
                }
            }
            Cut::Stuck => self.shape(rail),
        }
    }

    /// Drops, without a word, every packet of the connections that exist now, as a firewall that has forgotten them, or
    /// answers them with a reset. New ones are let through.
    pub fn forget_connections(&self, with_reset: bool) {
        let verdict = if with_reset { REJECT } else { "drop" };
        for host in self.both() {
            for (here, there) in ports(host) {
                nft(host, &format!("add rule inet cut in tcp sport {there} tcp dport {here} {verdict}"));
            }
        }
    }

    /// Drops, without a word, what would begin a connection. Those that exist go on.
    pub fn drop_new_connections(&self) {
        for host in self.both() {
            nft(host, "add rule inet cut in tcp flags & (syn | ack) == syn drop");
        }
    }

    /// Has a host answer every packet of the connections that exist now with a reset, and not the other host: those
    /// here hear nothing of it.
    pub fn reject_at(&self, host: &Namespace) {
        for (here, there) in ports(host) {
            nft(host, &format!("add rule inet cut in tcp sport {there} tcp dport {here} {REJECT}"));
        }
    }

    /// Answers each TCP packet on a rail with a reset, on both hosts, for so many milliseconds and not longer: the
    /// kernel ends it, however busy the machine is.
    pub fn reset_for(&self, rail: usize, ms: u32) {
        for host in self.both() {
            nft(host, &format!("add element inet cut moments {{ rail{rail} timeout {ms}ms }}"));
        }
    }

    /// Makes ready for [`Network::reset_for`].
    pub fn allow_moments(&self) {
        for host in self.both() {
            nft(host, "add set inet cut moments { type ifname ; flags timeout ; }");
            nft(host, &format!("add rule inet cut in iifname @moments {REJECT}"));
        }
    }

    /// Resets all connections of a host at both ends.
    pub fn reset_connections(host: &Namespace) {
        let before = ports(host);
        host.run(&["ss", "-HKtn"]);
        let after = ports(host);
        let reset = !before.iter().any(|pair| after.contains(pair));
        assert!(reset, "this kernel does not let ss end connections (CONFIG_INET_DIAG_DESTROY)");
    }

    /// How many TCP connections the first host has.
    pub fn connections(&self) -> usize {
        ports(&self.hosts.0).len()
    }
}

/// The ports of a host's connections, here and there.
fn ports(host: &Namespace) -> Vec<(String, String)> {
    let port = |word: &str| word.rsplit(':').next().expect("a port").to_owned();
    let of_line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (port(words[3]), port(words[4]))
    };
    host.run(&["ss", "-Htn"]).lines().map(of_line).collect()
}

/// Has nftables do that in a host.
pub fn nft(host: &Namespace, rules: &str) {
    host.run(&["nft", rules]);
}

/// Removes a chain's rules in which that stands.
pub fn remove_rules(host: &Namespace, chain: &str, with: &str) {
    let list = host.run(&["nft", "-a", "list", "chain", "inet", "cut", chain]);
    for line in list.lines().filter(|line| line.contains(with)) {
        if let Some((_, handle)) = line.rsplit_once("# handle ") {
            nft(host, &format!("delete rule inet cut {chain} handle {handle}"));
        }
    }
}

/// The seed that is given, or today's. It is said first, so that a failure names it.
pub fn seed() -> u64 {
    let today =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs() / 86_400;
    let seed = super::number("TOWLINE_FAULTS_SEED").unwrap_or(today);
    eprintln!("TOWLINE_FAULTS_SEED={seed}");
    seed
}

/// Numbers that look random and follow from a seed.
pub struct Dice(u64);

impl Dice {
    /// Those of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// One of 0 to `below` − 1.
    pub fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) % below
    }
}
