//! RDMA devices, and whether the library that drives them loads.

use std::fs;
use std::path::Path;

use serde::Serialize;

use super::Finding;

#[derive(Serialize, Default)]
pub(super) struct Facts {
    pub(super) library_loads: bool,
    /// What the loader said, when it does not.
    pub(super) library_error: Option<String>,
    pub(super) ports: Vec<Port>,
    /// Whether the kernel's device files are there (containers often lack them).
    pub(super) has_device_files: bool,
    /// Whether this build of Towline has its RDMA backend.
    pub(super) is_built_in: bool,
}

#[derive(Serialize, Debug, PartialEq)]
pub(super) struct Port {
    pub(super) device: String,
    pub(super) port: String,
    pub(super) state: String,
    pub(super) link_layer: String,
    pub(super) rate: String,
}

pub(super) fn look(findings: &mut Vec<Finding>) -> Facts {
    // SAFETY: the initialisers of libibverbs only set up its own state; NCCL loads it in the same way.
    let loaded = unsafe { libloading::Library::new("libibverbs.so.1") };
    let facts = Facts {
        library_loads: loaded.is_ok(),
        library_error: loaded.err().map(|error| error.to_string()),
        ports: ports(Path::new("/sys/class/infiniband")),
        has_device_files: Path::new("/dev/infiniband").is_dir(),
        is_built_in: cfg!(feature = "rdma"),
    };
    judge(&facts, findings);
    facts
}

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
            "there are RDMA devices, but libibverbs does not load",
            "apt-get install -y libibverbs1 ibverbs-providers",
        ));
    }
    if !facts.has_device_files {
        findings.push(Finding::problem(
            "there are RDMA devices, but no /dev/infiniband: this container may not use them",
            "docker run --device=/dev/infiniband --ulimit memlock=-1 …",
        ));
    }
    if !facts.is_built_in {
        findings.push(Finding::advice("this build has no RDMA backend", "cargo build --release --features rdma"));
    }
    for port in facts.ports.iter().filter(|port| port.state != "ACTIVE") {
        let what = format!("port {} of {} is {}", port.port, port.device, port.state);
        findings.push(Finding::advice(what, "check the cable and the switch; for Ethernet: ip link set INTERFACE up"));
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
        judge(&Facts { ports: vec![port], is_built_in: true, ..Facts::default() }, &mut findings);
        assert_eq!(findings.len(), 3, "{findings:?}");
        findings.clear();
        judge(&Facts::default(), &mut findings);
        assert_eq!(findings, [], "a host without devices misses nothing");
    }
}
