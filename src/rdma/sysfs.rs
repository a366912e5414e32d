//! What the kernel reports about RDMA devices in `/sys/class/infiniband`, and about modules that reach GPU memory.
//!
//! Nothing here fails: data that the kernel does not report is `None` or false.

use std::fs;
use std::path::{Path, PathBuf};

use super::gid::RoceVersion;

/// A sysfs: the real one or a test's.
#[derive(Debug, Clone)]
pub(crate) struct RdmaSysfs {
    root: PathBuf,
}

impl Default for RdmaSysfs {
    fn default() -> Self {
        Self::at("/sys")
    }
}

/// Modules that let an RDMA device reach NVIDIA GPU memory by its address, below `/sys`.
const PEER_MEMORY: &[&str] = &[
    "kernel/mm/memory_peers/nv_mem/version",
    "kernel/mm/memory_peers/nv_mem_nc/version",
    "module/nvidia_peermem/version",
];

impl RdmaSysfs {
    /// The sysfs mounted at `root`.
    pub(crate) fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn device(&self, name: &str) -> PathBuf {
        self.root.join("class/infiniband").join(name)
    }

    fn port(&self, device: &str, port: u8) -> PathBuf {
        self.device(device).join("ports").join(port.to_string())
    }

    /// The directory of the PCI function behind the device; none for software devices.
    pub(crate) fn pci_path(&self, device: &str) -> Option<PathBuf> {
        fs::canonicalize(self.device(device).join("device")).ok()
    }

    /// The rate of a port in Mbit/s, from a text like "100 Gb/sec (4X EDR)".
    pub(crate) fn rate_mbps(&self, device: &str, port: u8) -> Option<u32> {
        parse_rate(&fs::read_to_string(self.port(device, port).join("rate")).ok()?)
    }

    /// The RoCE version of an entry of the GID table. None when the kernel does not report it, as in a container
    /// without that file.
    pub(crate) fn gid_version(&self, device: &str, port: u8, index: u32) -> Option<RoceVersion> {
        let file = self.port(device, port).join("gid_attrs/types").join(index.to_string());
        parse_version(&fs::read_to_string(file).ok()?)
    }

    /// The network interface of an entry of the GID table.
    #[cfg(test)]
    pub(crate) fn gid_interface(&self, device: &str, port: u8, index: u32) -> Option<String> {
        let file = self.port(device, port).join("gid_attrs/ndevs").join(index.to_string());
        fs::read_to_string(file).ok().map(|name| name.trim().to_owned())
    }

    /// The kernel module that lets RDMA devices reach GPU memory by its address, if one is loaded.
    pub(crate) fn peer_memory(&self) -> Option<&'static str> {
        let loaded = PEER_MEMORY.iter().find(|file| self.root.join(file).exists())?;
        Path::new(loaded).parent()?.file_name()?.to_str()
    }
}

fn parse_rate(text: &str) -> Option<u32> {
    let (number, rest) = text.split_once(' ')?;
    let gigabits: f64 = number.parse().ok()?;
    let is_rate = rest.starts_with("Gb/sec") && (0.0..1e6).contains(&gigabits);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range was checked")]
    is_rate.then_some((gigabits * 1000.0) as u32)
}

fn parse_version(text: &str) -> Option<RoceVersion> {
    let text = text.trim();
    match text {
        // The kernel has one name for InfiniBand and for RoCE v1, whose packets look alike above the link.
        "IB/RoCE v1" | "RoCE v1" => Some(RoceVersion::V1),
        "RoCE v2" => Some(RoceVersion::V2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn facts_of_a_device_are_read_where_the_kernel_puts_them() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path();
        let port = root.join("class/infiniband/mlx5_0/ports/1");
        fs::create_dir_all(port.join("gid_attrs/types")).expect("directories");
        fs::create_dir_all(port.join("gid_attrs/ndevs")).expect("directories");
        fs::write(port.join("rate"), "400 Gb/sec (4X NDR)\n").expect("a file");
        fs::write(port.join("gid_attrs/types/0"), "IB/RoCE v1\n").expect("a file");
        fs::write(port.join("gid_attrs/types/3"), "RoCE v2\n").expect("a file");
        fs::write(port.join("gid_attrs/ndevs/3"), "eth2\n").expect("a file");
        fs::create_dir_all(root.join("devices/pci0000:00/0000:17:00.1")).expect("a device");
        symlink(root.join("devices/pci0000:00/0000:17:00.1"), root.join("class/infiniband/mlx5_0/device"))
            .expect("a link");
        let sysfs = RdmaSysfs::at(root);
        assert_eq!(sysfs.rate_mbps("mlx5_0", 1), Some(400_000));
        assert_eq!(sysfs.rate_mbps("mlx5_0", 2), None);
        assert_eq!(sysfs.gid_version("mlx5_0", 1, 0), Some(RoceVersion::V1));
        assert_eq!(sysfs.gid_version("mlx5_0", 1, 3), Some(RoceVersion::V2));
        assert_eq!(sysfs.gid_version("mlx5_0", 1, 4), None);
        assert_eq!(sysfs.gid_interface("mlx5_0", 1, 3).as_deref(), Some("eth2"));
        assert!(sysfs.pci_path("mlx5_0").expect("a path").ends_with("0000:17:00.1"));
        assert_eq!(sysfs.pci_path("rxe0"), None);
        assert_eq!(sysfs.peer_memory(), None);
        fs::create_dir_all(root.join("module/nvidia_peermem")).expect("a module");
        fs::write(root.join("module/nvidia_peermem/version"), "1\n").expect("a file");
        assert_eq!(sysfs.peer_memory(), Some("nvidia_peermem"));
    }

    #[test]
    fn rates_are_read_with_their_fractions() {
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)\n"), Some(2500));
        assert_eq!(parse_rate("800 Gb/sec (4X XDR)\n"), Some(800_000));
        assert_eq!(parse_rate("fast"), None);
        assert_eq!(parse_rate("-1 Gb/sec"), None);
    }
}
