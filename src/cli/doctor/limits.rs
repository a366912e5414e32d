//! Limits of the process and of the kernel's TCP that bound Towline's speed and its number of connections.

use std::fs;

use crate::os::config::Config;
use crate::os::cores::Cores;
use serde::Serialize;

use super::{Cause, Finding};

/// A hundred communicators have a thousand connections, with a few descriptors each.
const DESCRIPTORS_WANTED: u64 = 4096;
/// A window of 4 MiB carries 10 Gbit/s over 3 ms; the usual default limits are 4 to 6 MiB.
const TCP_BUFFER_WANTED: u64 = 4 << 20;

#[derive(Serialize, Debug, Default)]
pub(super) struct Facts {
    pub(super) descriptors: Limit,
    pub(super) locked_memory_bytes: Limit,
    /// Bytes; `None` where the kernel does not report it (containers).
    pub(super) receive_buffer_max: Option<u64>,
    pub(super) send_buffer_max: Option<u64>,
    /// Bytes: least, initial, most.
    pub(super) tcp_receive_buffer: Option<[u64; 3]>,
    pub(super) tcp_send_buffer: Option<[u64; 3]>,
    pub(super) congestion_control: Option<String>,
    pub(super) congestion_controls: Vec<String>,
    pub(super) cores: usize,
    /// The cores that a process started in this environment counts as its own.
    pub(super) own_cores: usize,
}

/// `None` is unlimited.
#[derive(Serialize, Debug, Default, Clone, Copy)]
pub(super) struct Limit {
    pub(super) soft: Option<u64>,
    pub(super) hard: Option<u64>,
}

pub(super) fn gather(config: &Config, findings: &mut Vec<Finding>) -> Facts {
    let cores = Cores::of_this_process();
    let facts = Facts {
        descriptors: limit(libc::RLIMIT_NOFILE),
        locked_memory_bytes: limit(libc::RLIMIT_MEMLOCK),
        receive_buffer_max: sysctl("net/core/rmem_max").and_then(|text| text.parse().ok()),
        send_buffer_max: sysctl("net/core/wmem_max").and_then(|text| text.parse().ok()),
        tcp_receive_buffer: sysctl("net/ipv4/tcp_rmem").and_then(|text| three(&text)),
        tcp_send_buffer: sysctl("net/ipv4/tcp_wmem").and_then(|text| three(&text)),
        congestion_control: sysctl("net/ipv4/tcp_congestion_control"),
        congestion_controls: sysctl("net/ipv4/tcp_available_congestion_control")
            .map(|text| text.split_whitespace().map(str::to_owned).collect())
            .unwrap_or_default(),
        cores: cores.usable,
        own_cores: cores.own(),
    };
    let has_rdma = fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some());
    judge(&facts, config.tcp_congestion.as_deref(), has_rdma, findings);
    facts
}

#[allow(clippy::unnecessary_cast, reason = "the kinds of limits have different types in different C libraries")]
fn limit(kind: libc::__rlimit_resource_t) -> Limit {
    let mut raw = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call fills the struct, which outlives it.
    unsafe { libc::getrlimit(kind, &raw mut raw) };
    let finite = |value: libc::rlim_t| (value != libc::RLIM_INFINITY).then_some(value as u64);
    Limit { soft: finite(raw.rlim_cur), hard: finite(raw.rlim_max) }
}

fn sysctl(name: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/sys/{name}")).ok().map(|text| text.trim().to_owned())
}

fn three(text: &str) -> Option<[u64; 3]> {
    let numbers: Vec<u64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    numbers.try_into().ok()
}

fn judge(facts: &Facts, congestion: Option<&str>, has_rdma: bool, findings: &mut Vec<Finding>) {
    let Limit { soft, hard } = facts.descriptors;
    if let Some(soft) = soft.filter(|&soft| soft < DESCRIPTORS_WANTED) {
        let what = format!("a process may have only {soft} open files: many connections will fail");
        let fix = match hard {
            Some(hard) if hard < DESCRIPTORS_WANTED => {
                "echo '* - nofile 1048576' >> /etc/security/limits.conf, then log in again".to_owned()
            }
            hard => format!("ulimit -n {}", hard.unwrap_or(1 << 20).min(1 << 20)),
        };
        findings.push(Finding::advice(Cause::FewDescriptors, what, fix));
    }
    if let Some(soft) = facts.locked_memory_bytes.soft.filter(|_| has_rdma) {
        let what = format!("a process may lock only {soft} bytes of memory: RDMA cannot register buffers");
        let fix = "ulimit -l unlimited  # for a container: docker run --ulimit memlock=-1";
        findings.push(Finding::problem(Cause::LittleLockedMemory, what, fix));
    }
    let buffers = [("tcp_rmem", facts.tcp_receive_buffer), ("tcp_wmem", facts.tcp_send_buffer)];
    for (name, buffer) in buffers.into_iter().filter_map(|(name, buffer)| Some((name, buffer?))) {
        let [least, initial, most] = buffer;
        if most < TCP_BUFFER_WANTED {
            let what = format!("TCP buffers may grow to {most} bytes only ({name}): long or fast paths stay unused");
            let wanted = 16 << 20;
            let fix = format!("sysctl -w net.ipv4.{name}=\"{least} {initial} {wanted}\"");
            findings.push(Finding::advice(Cause::SmallTcpBuffer, what, fix));
        }
    }
    if let Some(name) = congestion.filter(|name| !facts.congestion_controls.iter().any(|known| known == name)) {
        let what = format!("the kernel does not offer TOWLINE_TCP_CONGESTION={name} now");
        findings.push(Finding::problem(Cause::CongestionControlMissing, what, format!("modprobe tcp_{name}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(facts: &Facts, congestion: Option<&str>, has_rdma: bool) -> Vec<String> {
        let mut findings = Vec::new();
        judge(facts, congestion, has_rdma, &mut findings);
        findings.into_iter().map(|finding| finding.fix).collect()
    }

    /// No test can make an RDMA device, or a kernel that lacks a module.
    #[test]
    fn causes_that_need_another_kernel_have_their_names() {
        let locked = Limit { soft: Some(65536), hard: None };
        let mut findings = Vec::new();
        judge(&Facts { locked_memory_bytes: locked, ..Facts::default() }, Some("bbr"), true, &mut findings);
        let causes: Vec<Cause> = findings.iter().map(|finding| finding.cause).collect();
        assert_eq!(causes, [Cause::LittleLockedMemory, Cause::CongestionControlMissing]);
    }

    #[test]
    fn each_tight_limit_has_its_cure() {
        let roomy = || Facts { congestion_controls: vec!["cubic".into()], ..Facts::default() };
        assert_eq!(judged(&roomy(), Some("cubic"), true), [""; 0]);
        let few = Limit { soft: Some(1024), hard: Some(524_288) };
        assert_eq!(judged(&Facts { descriptors: few, ..roomy() }, None, false), ["ulimit -n 524288"]);
        let few = Limit { soft: Some(1024), hard: Some(1024) };
        assert!(judged(&Facts { descriptors: few, ..roomy() }, None, false)[0].contains("limits.conf"));
        let locked = Facts { locked_memory_bytes: Limit { soft: Some(65536), hard: None }, ..roomy() };
        assert_eq!(judged(&locked, None, false), [""; 0]);
        assert!(judged(&locked, None, true)[0].starts_with("ulimit -l unlimited"));
        let small = Facts { tcp_send_buffer: Some([4096, 16384, 1 << 20]), ..roomy() };
        assert_eq!(judged(&small, None, false), ["sysctl -w net.ipv4.tcp_wmem=\"4096 16384 16777216\""]);
        assert_eq!(judged(&roomy(), Some("bbr"), false), ["modprobe tcp_bbr"]);
    }

    #[test]
    fn three_numbers_are_three_numbers() {
        assert_eq!(three("4096\t131072\t6291456"), Some([4096, 131_072, 6_291_456]));
        assert_eq!(three("4096 x 1"), None);
        assert_eq!(three("1 2"), None);
    }
}
