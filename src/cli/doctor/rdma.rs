//! RDMA devices, and whether the library that drives them loads.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::os::config::Config;

use super::{Cause, Finding};

#[derive(Serialize, Default)]
pub(super) struct Facts {
    pub(super) library_loads: bool,
    /// The loader's error, when it does not.
    pub(super) library_error: Option<String>,
    pub(super) ports: Vec<Port>,
    /// Whether the kernel's device files are there (containers often lack them).
    pub(super) has_device_files: bool,
    /// Whether this build of Towline has its RDMA backend.
    pub(super) is_built_in: bool,
    /// The setting that makes this host use TCP, whatever ports it has.
    pub(super) ruled_out: Option<&'static str>,
    /// The ports that `NCCL_IB_*` choose, in NCCL's order.
    pub(super) chosen: Vec<Chosen>,
    /// The other ports: down, or left out.
    pub(super) others: Vec<Other>,
    /// What is wrong with that choice.
    pub(super) complaints: Vec<String>,
    /// The kernel module that lets devices reach GPU memory by its address.
    pub(super) peer_memory: Option<String>,
}

/// A port that would be used.
#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Chosen {
    pub(super) name: String,
    pub(super) speed_mbps: u32,
    /// The GID that is used for it, and why.
    pub(super) gid_index: u32,
    pub(super) gid: String,
    pub(super) gid_why: String,
    /// Every GID that is in use: index, GID, type.
    pub(super) gids: Vec<(u32, String, String)>,
    pub(super) takes_dmabuf: bool,
}

/// A port that is not chosen, with every GID that is in use.
#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Other {
    pub(super) name: String,
    pub(super) gids: Vec<(u32, String, String)>,
}

#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Port {
    pub(super) device: String,
    pub(super) port: String,
    pub(super) state: String,
    pub(super) link_layer: String,
    pub(super) rate: String,
}

pub(super) fn gather(config: &Config, findings: &mut Vec<Finding>) -> Facts {
    // SAFETY: the initialisers of libibverbs only set up its own state; NCCL loads it in the same way.
    let loaded = unsafe { libloading::Library::new("libibverbs.so.1") };
    let mut facts = Facts {
        library_loads: loaded.is_ok(),
        library_error: loaded.err().map(|error| error.to_string()),
        ports: ports(Path::new("/sys/class/infiniband")),
        has_device_files: Path::new("/dev/infiniband").is_dir(),
        is_built_in: cfg!(feature = "rdma"),
        ..Facts::default()
    };
    if facts.library_loads && !facts.ports.is_empty() {
        choose(config, &mut facts);
    }
    judge(&facts, findings);
    facts
}

/// What the backend would use, found as it finds it.
#[cfg(feature = "rdma")]
fn choose(config: &Config, facts: &mut Facts) {
    use crate::rdma::dl::Verbs;
    use crate::rdma::sysfs::RdmaSysfs;
    use crate::rdma::verbs::{Context, open_devices};
    use crate::rdma::{backend, devices, gid};
    facts.ruled_out = backend::ruled_out(config);
    let found = match devices::discover(config) {
        Ok(found) => found,
        Err(error) => return facts.complaints.push(error.to_string()),
    };
    let sysfs = RdmaSysfs::default();
    facts.peer_memory = found.peer_memory.map(str::to_owned);
    facts.complaints.extend(found.foreign.into_iter().chain(found.warnings));
    let gids = |context: &Context, number: u8, entries: u32| {
        let table = devices::gid_table(context, number, entries, &sysfs);
        let used = table.into_iter().filter(|entry| entry.gid != [0; 16]);
        let row = |entry: gid::GidEntry| {
            let version = entry.version.map_or_else(|| "-".to_owned(), |version| version.to_string());
            (entry.index, gid::display(&entry.gid), version)
        };
        used.map(row).collect::<Vec<_>>()
    };
    let chosen = found.ports.iter().map(|open| Chosen {
        name: open.port.name(),
        speed_mbps: open.port.speed_mbps,
        gid_index: open.gid_index,
        gid: gid::display(&open.gid),
        gid_why: open.gid_why.to_string(),
        gids: gids(&open.context, open.port.number, open.facts.gid_count),
        takes_dmabuf: open.takes_dmabuf,
    });
    facts.chosen = chosen.collect();
    for context in Verbs::load().and_then(open_devices).unwrap_or_default() {
        let ports = context.facts().map_or(0, |facts| facts.ports);
        for number in 1..=ports {
            let is_it = |open: &devices::OpenPort| open.port.device == context.name() && open.port.number == number;
            let Ok(facts_of_port) = context.port(number) else { continue };
            if !found.ports.iter().any(is_it) {
                let name = format!("{}:{number}", context.name());
                facts.others.push(Other { name, gids: gids(&context, number, facts_of_port.gid_count) });
            }
        }
    }
}

/// Without the backend nothing is used.
#[cfg(not(feature = "rdma"))]
fn choose(_config: &Config, _facts: &mut Facts) {}

/// Every port of every device below `class`, sorted.
fn ports(class: &Path) -> Vec<Port> {
    let names = |dir: &Path| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    let port = |device: &str, port: String| {
        let dir = class.join(device).join("ports").join(&port);
        let read = |file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default().trim().to_owned();
        // The kernel writes "4: ACTIVE".
        let state = read("state");
        let state = state.split_once(": ").map_or(state.clone(), |(_, word)| word.to_owned());
        Port { device: device.to_owned(), port, state, link_layer: read("link_layer"), rate: read("rate") }
    };
    let devices = names(class);
    let all = devices.iter().flat_map(|device| {
        names(&class.join(device).join("ports")).into_iter().map(|number| port(device, number)).collect::<Vec<_>>()
    });
    all.collect()
}

fn judge(facts: &Facts, findings: &mut Vec<Finding>) {
    if facts.ports.is_empty() {
        return;
    }
    if !facts.library_loads {
        findings.push(Finding::problem(
            Cause::RdmaLibraryMissing,
            "there are RDMA devices, but libibverbs does not load",
            "apt-get install -y libibverbs1 ibverbs-providers",
        ));
    }
    if !facts.has_device_files {
        findings.push(Finding::problem(
            Cause::RdmaDeviceFilesMissing,
            "there are RDMA devices, but no /dev/infiniband: this container may not use them",
            "docker run --device=/dev/infiniband --ulimit memlock=-1 …",
        ));
    }
    if !facts.is_built_in {
        let fix = "cargo build --release --features rdma";
        findings.push(Finding::advice(Cause::RdmaNotBuilt, "this build has no RDMA backend", fix));
    }
    for complaint in &facts.complaints {
        let fix = "rdma link; correct or unset NCCL_IB_HCA and NCCL_IB_ADDR_RANGE";
        findings.push(Finding::advice(Cause::RdmaChoice, complaint.clone(), fix));
    }
    for port in facts.ports.iter().filter(|port| port.state != "ACTIVE") {
        let what = format!("port {} of {} is {}", port.port, port.device, port.state);
        let fix = "check the cable and the switch; for Ethernet: ip link set INTERFACE up";
        findings.push(Finding::advice(Cause::RdmaPortDown, what, fix));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_from_sysfs() {
        let class = tempfile::tempdir().unwrap();
        let dir = class.path().join("mlx5_0/ports/1");
        fs::create_dir_all(&dir).unwrap();
        for (file, text) in [("state", "4: ACTIVE\n"), ("link_layer", "Ethernet\n"), ("rate", "100 Gb/sec (4X EDR)\n")]
        {
            fs::write(dir.join(file), text).unwrap();
        }
        let ports = ports(class.path());
        assert_eq!(ports.len(), 1);
        assert_eq!((ports[0].device.as_str(), ports[0].state.as_str()), ("mlx5_0", "ACTIVE"));
        assert_eq!((ports[0].link_layer.as_str(), ports[0].rate.as_str()), ("Ethernet", "100 Gb/sec (4X EDR)"));
    }

    #[test]
    fn devices_that_cannot_be_driven_are_problems() {
        let text = String::new;
        let port =
            Port { device: "mlx5_0".into(), port: "1".into(), state: "DOWN".into(), link_layer: text(), rate: text() };
        let mut findings = Vec::new();
        let facts = Facts { ports: vec![port], complaints: vec!["no such HCA".into()], ..Facts::default() };
        judge(&facts, &mut findings);
        let causes: Vec<Cause> = findings.iter().map(|finding| finding.cause).collect();
        let all = [
            Cause::RdmaLibraryMissing,
            Cause::RdmaDeviceFilesMissing,
            Cause::RdmaNotBuilt,
            Cause::RdmaChoice,
            Cause::RdmaPortDown,
        ];
        assert_eq!(causes, all, "{findings:?}");
        findings.clear();
        judge(&Facts::default(), &mut findings);
        assert_eq!(findings, [], "a host without devices misses nothing");
    }
}
