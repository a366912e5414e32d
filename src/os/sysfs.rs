//! What the kernel reports about a network interface: place on the PCI bus, speed, driver, NUMA node, MTU, state, MAC.
//!
//! Everything comes from `/sys/class/net`. Nothing here fails: what the kernel does not report is `None`.
//!
//! Two values take more than one file:
//! - **PCI path.** The resolved `device` link, and from there upwards to the first directory that is a PCI function:
//!   virtio and USB devices sit below one. (NCCL's Socket stops at the link and so loses virtio NICs' place.) An
//!   interface without `device` (bond, VLAN, bridge, macvlan) takes the path of its first lower interface by name.
//! - **Speed.** A speed that the driver reports as a constant ([`link_kind`]), for itself or for an interface above it,
//!   counts as unknown. Otherwise the kernel's own value is used if it has one, which covers bonds (sum of the active
//!   ports), VLANs (the interface below) and, in recent kernels, bridges. Otherwise the lower interfaces are read: a
//!   bond that spreads traffic counts as their sum, anything else as the fastest. The kernel reports nothing for most
//!   virtual NICs.
//!
//! This module must not know what is assumed where the kernel reports nothing.

use super::link_kind;
use std::fs;
use std::path::{Path, PathBuf};

/// A stack deeper than VLAN on bond on VLAN on NIC is a loop or an error.
const MAX_STACK: u32 = 8;

/// Speeds above this are the kernel's encoding of unknown (−1 as an unsigned number): 10 Tbit/s in Mbit/s.
const MAX_MBPS: i64 = 10_000_000;

/// A sysfs: the real one or a test's.
#[derive(Debug, Clone)]
pub(crate) struct Sysfs {
    root: PathBuf,
    /// The driver by `ethtool`, which has no directory.
    ethtool_driver: fn(&str) -> Option<String>,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self { root: "/sys".into(), ethtool_driver: link_kind::driver }
    }
}

impl Sysfs {
    /// The sysfs mounted at `root`, without drivers by `ethtool`.
    #[cfg(test)]
    pub(crate) fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), ethtool_driver: |_| None }
    }

    /// The same with drivers.
    #[cfg(test)]
    pub(crate) fn with_drivers(self, ethtool_driver: fn(&str) -> Option<String>) -> Self {
        Self { ethtool_driver, ..self }
    }

    /// The directory of an interface. `name` is the kernel's name; an alias label's tail is dropped.
    fn interface(&self, name: &str) -> PathBuf {
        self.root.join("class/net").join(kernel_name(name))
    }

    fn read(&self, name: &str, file: &str) -> Option<String> {
        // Some files exist but refuse to be read (speed of a loopback: EINVAL), which is "unknown" as well.
        let text = fs::read_to_string(self.interface(name).join(file)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    fn number(&self, name: &str, file: &str) -> Option<i64> {
        self.read(name, file)?.parse().ok()
    }

    /// Whether the kernel has an interface of this name.
    #[cfg(test)]
    pub(crate) fn exists(&self, name: &str) -> bool {
        self.interface(name).exists()
    }

    /// Whether it is a bridge.
    pub(crate) fn is_bridge(&self, name: &str) -> bool {
        self.interface(name).join("bridge").exists()
    }

    /// The directory of the PCI function behind the interface.
    pub(crate) fn pci_path(&self, name: &str) -> Option<PathBuf> {
        self.stacked(name, 0, &|name| {
            let device = fs::canonicalize(self.interface(name).join("device")).ok()?;
            device.ancestors().find(|directory| is_pci(directory)).map(Path::to_owned)
        })
    }

    /// The value of the interface itself, or of the first interface below it that has one.
    fn stacked<T>(&self, name: &str, depth: u32, ask: &dyn Fn(&str) -> Option<T>) -> Option<T> {
        if depth == MAX_STACK {
            return None;
        }
        ask(name).or_else(|| self.lowers(name).iter().find_map(|lower| self.stacked(lower, depth + 1, ask)))
    }

    /// The interfaces below this one, sorted by name.
    fn lowers(&self, name: &str) -> Vec<String> {
        let entries = fs::read_dir(self.interface(name)).into_iter().flatten().flatten();
        let mut lowers: Vec<String> =
            entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("lower_").map(str::to_owned)).collect();
        lowers.sort();
        lowers
    }

    /// The speed in Mbit/s.
    pub(crate) fn speed_mbps(&self, name: &str) -> Option<u32> {
        self.speed_at(name, 0)
    }

    /// Whether the interface's speed is a constant of its driver, or of the drivers of all interfaces below it.
    fn claims_its_speed(&self, name: &str, depth: u32) -> bool {
        if (self.ethtool_driver)(kernel_name(name)).is_some_and(|driver| link_kind::claims_its_speed(&driver)) {
            return true;
        }
        let lowers = self.lowers(name);
        depth < MAX_STACK && !lowers.is_empty() && lowers.iter().all(|lower| self.claims_its_speed(lower, depth + 1))
    }

    /// Whether packets of the interface leave by another interface of this host, inside other packets.
    pub(crate) fn is_overlay(&self, name: &str) -> bool {
        let uevent = self.read(name, "uevent");
        let devtype = uevent.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("DEVTYPE=")));
        let driver = (self.ethtool_driver)(kernel_name(name));
        self.read(name, "tun_flags").is_some()
            || link_kind::is_overlay(driver.as_deref(), devtype, self.number(name, "type"))
    }

    /// Whether the interface `upper` is above `lower`, directly or not, and so shares its wire.
    pub(crate) fn stands_on(&self, upper: &str, lower: &str) -> bool {
        self.stacked(upper, 0, &|name| (name != upper && name == kernel_name(lower)).then_some(())).is_some()
    }

    fn speed_at(&self, name: &str, depth: u32) -> Option<u32> {
        if self.claims_its_speed(name, depth) {
            return None;
        }
        let own = self.number(name, "speed").filter(|speed| (1..=MAX_MBPS).contains(speed));
        if own.is_some() || depth == MAX_STACK {
            return own.and_then(|speed| u32::try_from(speed).ok());
        }
        let lowers = self.lowers(name);
        let speeds = lowers.iter().filter_map(|lower| self.speed_at(lower, depth + 1));
        let spreads = self.read(name, "bonding/mode").is_some_and(|mode| !mode.starts_with("active-backup"));
        if spreads { speeds.reduce(u32::saturating_add) } else { speeds.max() }
    }

    /// The name of the driver.
    pub(crate) fn driver(&self, name: &str) -> Option<String> {
        self.stacked(name, 0, &|name| {
            let driver = fs::canonicalize(self.interface(name).join("device/driver")).ok()?;
            Some(driver.file_name()?.to_string_lossy().into_owned())
        })
    }

    /// The NUMA node that the NIC is attached to; None when the machine has only one.
    pub(crate) fn numa_node(&self, name: &str) -> Option<u32> {
        let node = fs::read_to_string(self.pci_path(name)?.join("numa_node")).ok()?;
        node.trim().parse().ok()
    }

    /// The largest packet in bytes.
    pub(crate) fn mtu(&self, name: &str) -> Option<u32> {
        u32::try_from(self.number(name, "mtu")?).ok()
    }

    /// The operational state in the kernel's words: up, down, unknown, …
    #[cfg(test)]
    pub(crate) fn operstate(&self, name: &str) -> Option<String> {
        self.read(name, "operstate")
    }

    /// The hardware address as text; None when it is all zeroes, as a loopback's is.
    pub(crate) fn mac(&self, name: &str) -> Option<String> {
        self.read(name, "address").filter(|mac| mac.chars().any(|digit| digit != '0' && digit != ':'))
    }

    /// The port of the card, from 0. Cards with one function for several ports number them here.
    pub(crate) fn port(&self, name: &str) -> Option<u32> {
        u32::try_from(self.number(name, "dev_port")?).ok()
    }
}

/// The kernel's name of an interface: an alias label without its tail.
fn kernel_name(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

fn is_pci(directory: &Path) -> bool {
    let subsystem = fs::canonicalize(directory.join("subsystem")).ok();
    subsystem.and_then(|path| Some(path.file_name()? == "pci")).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// A sysfs in a directory.
    struct Fake {
        dir: TempDir,
        sysfs: Sysfs,
    }

    impl Fake {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let sysfs = Sysfs::at(dir.path());
            for bus in ["pci", "virtio"] {
                fs::create_dir_all(dir.path().join("bus").join(bus)).expect("a bus");
            }
            Self { dir, sysfs }
        }

        fn path(&self, path: &str) -> PathBuf {
            self.dir.path().join(path)
        }

        fn device(&self, path: &str, bus: &str) {
            fs::create_dir_all(self.path(path)).expect("a device");
            symlink(self.path("bus").join(bus), self.path(path).join("subsystem")).expect("a link");
        }

        fn nic(&self, name: &str, device: Option<&str>, files: &[(&str, &str)]) {
            let at = self.path("class/net").join(name);
            fs::create_dir_all(at.join("bonding")).expect("an interface");
            if let Some(device) = device {
                symlink(self.path(device), at.join("device")).expect("a link");
            }
            for (file, text) in files {
                if *file == "lower" {
                    symlink(self.path("class/net").join(text), at.join(format!("lower_{text}"))).expect("a link");
                } else {
                    fs::write(at.join(file), text).expect("a file");
                }
            }
        }
    }

    /// veth reports 10 Gb/s and tun 10 Mb/s whatever the path carries, and so do the interfaces above them.
    #[test]
    fn a_speed_that_the_driver_only_claims_is_unknown() {
        let fake = Fake::new();
        fake.nic("veth0", None, &[("speed", "10000")]);
        fake.nic("macvlan0", None, &[("speed", "10000"), ("lower", "veth0")]);
        fake.nic("eth0", None, &[("speed", "25000")]);
        fake.nic("macvlan1", None, &[("speed", "25000"), ("lower", "eth0")]);
        // In a pod the card below is in another namespace.
        fake.nic("macvlan2", None, &[("speed", "25000")]);
        fake.nic("br0", None, &[("speed", "25000"), ("lower", "eth0"), ("lower", "veth0")]);
        let driver = |name: &str| name.starts_with("veth").then(|| "veth".to_owned());
        let sysfs = fake.sysfs.clone().with_drivers(driver);
        let speeds = ["veth0", "macvlan0", "eth0", "macvlan1", "macvlan2", "br0"].map(|name| sysfs.speed_mbps(name));
        assert_eq!(speeds, [None, None, Some(25_000), Some(25_000), Some(25_000), Some(25_000)]);
    }

    #[test]
    fn overlays_and_what_shares_a_wire_are_told_from_cards() {
        let fake = Fake::new();
        fake.nic("eth0", None, &[("type", "1")]);
        fake.nic(
            "flannel.1",
            None,
            &[("type", "1"), ("uevent", "DEVTYPE=vxlan\nINTERFACE=flannel.1"), ("lower", "eth0")],
        );
        fake.nic("wg0", None, &[("type", "65534")]);
        fake.nic("eth0.7", None, &[("type", "1"), ("uevent", "DEVTYPE=vlan"), ("lower", "eth0")]);
        let sysfs = &fake.sysfs;
        assert_eq!(
            ["eth0", "flannel.1", "wg0", "eth0.7"].map(|name| sysfs.is_overlay(name)),
            [false, true, true, false]
        );
        assert!(sysfs.stands_on("eth0.7", "eth0") && sysfs.stands_on("flannel.1", "eth0"));
        assert!(!sysfs.stands_on("eth0", "eth0") && !sysfs.stands_on("wg0", "eth0"));
    }

    #[test]
    fn the_pci_path_is_the_function_behind_the_interface() {
        let fake = Fake::new();
        fake.device("devices/pci0000:00/0000:00:03.0", "pci");
        fake.device("devices/pci0000:00/0000:00:03.0/virtio2", "virtio");
        fake.device("devices/pci0000:00/0000:00:04.1", "pci");
        fake.nic("eth0", Some("devices/pci0000:00/0000:00:03.0/virtio2"), &[]);
        fake.nic("eth1", Some("devices/pci0000:00/0000:00:04.1"), &[]);
        fake.nic("bond0", None, &[("lower", "eth1")]);
        fake.nic("bond0.7", None, &[("lower", "bond0")]);
        fake.nic("lo", None, &[]);
        let end = |name: &str| fake.sysfs.pci_path(name).map(|path| path.file_name().expect("a name").to_owned());
        assert_eq!(end("eth0").expect("a path"), "0000:00:03.0");
        assert_eq!(end("eth1").expect("a path"), "0000:00:04.1");
        assert_eq!(end("eth1:7").expect("a path"), "0000:00:04.1", "an alias is on its interface's card");
        assert_eq!(end("bond0.7").expect("a path"), "0000:00:04.1");
        assert_eq!(end("lo"), None);
        assert_eq!(end("gone0"), None);
    }

    #[test]
    fn speed_is_the_kernels_word_or_comes_from_below_or_is_unknown() {
        let fake = Fake::new();
        fake.nic("eth0", None, &[("speed", "25000\n")]);
        fake.nic("eth1", None, &[("speed", "100000\n")]);
        fake.nic("virt0", None, &[("speed", "-1\n")]);
        fake.nic("virt1", None, &[("speed", "4294967295\n")]);
        fake.nic("virt2", None, &[]);
        fake.nic("bond0", None, &[("lower", "eth0"), ("lower", "eth1"), ("bonding/mode", "802.3ad 4\n")]);
        fake.nic("bond1", None, &[("lower", "eth0"), ("lower", "eth1"), ("bonding/mode", "active-backup 1\n")]);
        fake.nic("bond2", None, &[("speed", "50000\n"), ("lower", "eth1"), ("bonding/mode", "802.3ad 4\n")]);
        fake.nic("vlan7", None, &[("speed", "-1\n"), ("lower", "bond0")]);
        fake.nic("loop0", None, &[("lower", "loop0")]);
        let expected = [
            ("eth0", Some(25_000)),
            ("virt0", None),
            ("virt1", None),
            ("virt2", None),
            ("bond0", Some(125_000)),
            ("bond1", Some(100_000)),
            ("bond2", Some(50_000)),
            ("vlan7", Some(125_000)),
            ("loop0", None),
        ];
        for (name, speed) in expected {
            assert_eq!(fake.sysfs.speed_mbps(name), speed, "{name}");
        }
    }

    #[test]
    fn the_other_facts_are_read_as_they_stand() {
        let fake = Fake::new();
        fake.device("devices/pci0000:00/0000:00:04.0", "pci");
        fs::write(fake.path("devices/pci0000:00/0000:00:04.0/numa_node"), "1\n").expect("a file");
        fs::create_dir_all(fake.path("bus/pci/drivers/mlx5_core")).expect("a driver");
        symlink(fake.path("bus/pci/drivers/mlx5_core"), fake.path("devices/pci0000:00/0000:00:04.0/driver"))
            .expect("a link");
        let files = [("mtu", "9000\n"), ("operstate", "up\n"), ("address", "02:00:00:00:00:01\n"), ("dev_port", "1\n")];
        fake.nic("eth0", Some("devices/pci0000:00/0000:00:04.0"), &files);
        fake.nic("lo", None, &[("address", "00:00:00:00:00:00\n")]);
        let sysfs = &fake.sysfs;
        assert_eq!(sysfs.driver("eth0").as_deref(), Some("mlx5_core"));
        assert_eq!(sysfs.numa_node("eth0"), Some(1));
        assert_eq!(sysfs.mtu("eth0"), Some(9000));
        assert_eq!(sysfs.operstate("eth0").as_deref(), Some("up"));
        assert_eq!(sysfs.mac("eth0").as_deref(), Some("02:00:00:00:00:01"));
        assert_eq!(sysfs.port("eth0"), Some(1));
        assert!(sysfs.exists("eth0") && !sysfs.exists("eth7"));
        fs::create_dir_all(fake.path("class/net/br0/bridge")).expect("a bridge");
        assert!(sysfs.is_bridge("br0") && !sysfs.is_bridge("eth0"));
        assert_eq!((sysfs.mac("lo"), sysfs.mtu("lo"), sysfs.numa_node("lo")), (None, None, None));
    }
}
