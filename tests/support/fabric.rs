//! Several hosts, each rail a switch of its own that joins them all: what more than two hosts have and two do not.

use super::faults::{Dice, REJECT, nft, remove_rules};
use super::netns::{Namespace, ip};

/// How a rail fails for a host, or for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The host's interface goes down.
    Interface,
    /// The switch's port towards it goes down: the host's interface loses its carrier.
    Port,
    /// What the host sends and gets over the rail vanishes.
    Silence,
    /// It answers everything that comes over the rail with resets.
    Resets,
    /// The switch forwards nothing; all carriers stay.
    Switch,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Interface, Self::Port, Self::Silence, Self::Resets, Self::Switch];
}

/// Hosts on switches.
pub struct Fabric {
    /// The hosts. Each has `rail0`, `rail1`, …, with the addresses 10.77.*rail*.*number* and fd77:*rail*::*number*,
    /// from 1.
    pub hosts: Vec<Namespace>,
    switches: Namespace,
    rails: usize,
}

impl Fabric {
    /// All in order.
    pub fn new(hosts: usize, rails: usize) -> Self {
        let switches = Namespace::new();
        for rail in 0..rails {
            switches.ip(&format!("link add switch{rail} type bridge"));
            switches.ip(&format!("link set switch{rail} up"));
        }
        let fabric = Self { hosts: (0..hosts).map(|_| Namespace::new()).collect(), switches, rails };
        for (number, host) in fabric.hosts.iter().enumerate() {
            nft(host, "add table inet cut");
            for hook in ["input", "output"] {
                nft(host, &format!("add chain inet cut {hook} {{ type filter hook {hook} priority 0 ; }}"));
            }
            for rail in 0..rails {
                let port = port(number, rail);
                ip(&format!(
                    "-n {} link add {port} type veth peer name rail{rail} netns {}",
                    fabric.switches.name(),
                    host.name()
                ));
                fabric.switches.ip(&format!("link set {port} master switch{rail} up"));
                host.ip(&format!("link set rail{rail} addrgenmode eui64"));
                host.bring_up(rail, number + 1);
            }
        }
        for (rail, host) in (0..rails).flat_map(|rail| fabric.hosts.iter().map(move |host| (rail, host))) {
            host.wait_for(&format!("rail{rail}"));
        }
        fabric
    }

    /// How many rails.
    pub fn rails(&self) -> usize {
        self.rails
    }

    /// A rail fails, for this host if it is not for all.
    pub fn fail(&self, number: usize, rail: usize, how: Fault) {
        let host = &self.hosts[number];
        match how {
            Fault::Interface => host.ip(&format!("link set rail{rail} down")),
            Fault::Port => self.switches.ip(&format!("link set {} down", port(number, rail))),
            Fault::Silence => {
                nft(host, &format!("add rule inet cut input iifname rail{rail} drop"));
                nft(host, &format!("add rule inet cut output oifname rail{rail} drop"));
            }
            Fault::Resets => {
                nft(host, &format!("add rule inet cut input iifname rail{rail} {REJECT}"));
            }
            Fault::Switch => self.switches.ip(&format!("link set switch{rail} down")),
        }
    }

    /// It is mended.
    pub fn mend(&self, number: usize, rail: usize, how: Fault) {
        match how {
            Fault::Interface => self.hosts[number].bring_up(rail, number + 1),
            Fault::Port => self.switches.ip(&format!("link set {} up", port(number, rail))),
            Fault::Silence | Fault::Resets => {
                for chain in ["input", "output"] {
                    remove_rules(&self.hosts[number], chain, &format!("\"rail{rail}\""));
                }
            }
            Fault::Switch => self.switches.ip(&format!("link set switch{rail} up")),
        }
    }

    /// Has one rail fail after the other, for one host, for several or for all, until `limit` faults were made. The
    /// other rails are in order meanwhile: two hosts without a rail in common have no way to each other.
    pub fn fail_at_random(&self, seed: u64, limit: usize) -> [usize; Fault::ALL.len()] {
        let mut dice = Dice::new(seed);
        let mut made = [0; Fault::ALL.len()];
        let pause = |most: u64, dice: &mut Dice| std::thread::sleep(std::time::Duration::from_millis(dice.roll(most)));
        while made.iter().sum::<usize>() < limit {
            pause(1200, &mut dice);
            let rail = dice.roll(self.rails as u64) as usize;
            let first = dice.roll(self.hosts.len() as u64) as usize;
            let failing = (0..self.hosts.len()).filter(|number| *number == first || dice.roll(3) == 0);
            let mut faults = Vec::new();
            for number in failing.collect::<Vec<_>>() {
                let kind = dice.roll(Fault::ALL.len() as u64) as usize;
                self.fail(number, rail, Fault::ALL[kind]);
                faults.push((number, Fault::ALL[kind]));
                made[kind] += 1;
                pause(400, &mut dice);
            }
            pause(3000, &mut dice);
            faults.into_iter().for_each(|(number, how)| self.mend(number, rail, how));
        }
        made
    }
}

/// The switch's port to a host.
fn port(number: usize, rail: usize) -> String {
    format!("host{number}rail{rail}")
}
