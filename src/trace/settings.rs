//! The settings of the built-in profiler, read from the environment when a communicator is created.
//!
//! NCCL 2.28 and later loads the profiler of any network plugin. Unless it is asked for more, it remembers the last
//! calls and the open operations (`TOWLINE_STATUS`), which must cost little and leave nothing behind.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::event::Kind;
use super::live::place;
use super::verdict::STUCK_NS;
use crate::os::config::Config;

/// Room for 16,384 records in each of the ring's sixteen shards: 50 ms of a thread that reports 300,000 a second.
const BUFFER_MIB: u32 = 32;

/// The same where only the status is kept: 8,192 records in each shard, and only shards that some thread uses get
/// memory.
const STATUS_BUFFER_MIB: u32 = 16;

/// Some twenty million events, about what Perfetto's page can load.
const LIMIT_MIB: u32 = 4096;

/// What the profiler writes, and where.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Settings {
    /// Write a trace file.
    pub trace: bool,
    /// Write a summary at the end.
    pub summary: bool,
    /// Remember the last calls and the open operations.
    pub status: bool,
    /// The file in which they are kept.
    pub state: Option<PathBuf>,
    /// A call that is open for this long is logged.
    pub stuck_after: Duration,
    /// Where files go.
    pub dir: PathBuf,
    /// The event mask for NCCL.
    pub mask: u32,
    /// Bytes for the ring between NCCL's threads and the writer.
    pub buffer: usize,
    /// A trace file ends at this size.
    pub limit: u64,
    /// The control socket; None when there shall be none.
    pub control: Option<PathBuf>,
    /// The Prometheus text file.
    pub metrics: Option<PathBuf>,
    /// How often the text file is renewed.
    pub interval: Duration,
    /// Where metrics are served by HTTP.
    pub listen: Option<SocketAddr>,
    /// Where the status is served to holders of the key.
    pub remote: Option<Remote>,
    /// Whether there are metrics for each peer.
    pub peers: bool,
    /// The second profiler.
    pub chain: Option<PathBuf>,
}

/// The status over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Remote {
    /// Where to listen.
    pub address: SocketAddr,
    /// The key file.
    pub key: PathBuf,
}

impl Settings {
    /// The settings of `config` for this host and process, and its values that made no sense. None when there is
    /// nothing to do. `local` finds, or makes, the user's directory for the states of this host.
    pub(crate) fn new(
        config: &Config,
        host: &str,
        pid: u32,
        local: impl Fn() -> Option<PathBuf>,
    ) -> (Option<Self>, Vec<String>) {
        let mut complaints = Vec::new();
        let chain = config.profiler_chain.as_ref().map(PathBuf::from);
        let (mut trace, mut summary, mut metrics) = (false, false, false);
        for word in words(config.profile.as_deref().unwrap_or("")) {
            match word.as_str() {
                "0" | "off" | "none" | "no" | "false" => (trace, summary, metrics) = (false, false, false),
                "1" | "on" | "all" | "yes" | "true" => (trace, summary, metrics) = (true, true, true),
                "trace" => trace = true,
                "summary" => summary = true,
                "metrics" => metrics = true,
                _ => complaints.push(format!(
                    "TOWLINE_PROFILE: \"{word}\" is none of trace, summary, metrics, all, off and is ignored"
                )),
            }
        }
        let ours = trace || summary || metrics;
        // A second profiler gets the events that it requests, and none that NCCL reports only for the status.
        let status = config.status.unwrap_or(chain.is_none() || config.state_dir.is_some());
        if !ours && !status && chain.is_none() {
            return (None, complaints);
        }
        let needs_local = status && (config.state_dir.is_none() || !ours && config.profile_control.is_none());
        let local = if needs_local { local() } else { None };
        let dir = PathBuf::from(config.profile_dir.as_deref().unwrap_or("."));
        let stem = format!("towline-{host}-{pid}");
        let place = |text: &Option<String>, extension: &str| match text.as_deref() {
            Some("off" | "none" | "0") => None,
            Some(path) => Some(PathBuf::from(path.replace("%h", host).replace("%p", &pid.to_string()))),
            None => Some(dir.join(format!("{stem}.{extension}"))),
        };
        let mask = match config.profile_events.as_deref() {
            Some(text) => mask_of(text, &mut complaints),
            None => default_mask(trace),
        };
        let mask = match (ours, status) {
            (true, _) => mask,
            (false, true) => status_mask(),
            (false, false) => 0,
        };
        let control = match (config.profile_control.as_deref(), &local) {
            (None, Some(local)) if !ours => Some(local.join(format!("{stem}.sock"))),
            (None, None) if !ours => None,
            _ => place(&config.profile_control, "sock"),
        };
        let buffer = config.profile_buffer.unwrap_or(if ours { BUFFER_MIB } else { STATUS_BUFFER_MIB });
        let state_dir = config.state_dir.as_ref().map(PathBuf::from).or(local).filter(|_| status);
        let settings = Self {
            trace,
            summary,
            status,
            state: state_dir.map(|dir| place::file(&dir, host, pid)),
            stuck_after: config.stuck_after.max(Duration::from_nanos(STUCK_NS)),
            mask,
            buffer: buffer.max(1) as usize * (1 << 20),
            limit: u64::from(config.profile_limit.unwrap_or(LIMIT_MIB).max(1)) * (1 << 20),
            control: control.filter(|_| ours || status),
            metrics: place(&config.metrics_file, "prom").filter(|_| metrics),
            interval: config.metrics_interval.max(Duration::from_millis(100)),
            listen: config.metrics_listen.as_deref().filter(|_| ours).and_then(|text| listen(text, &mut complaints)),
            remote: remote(config, &mut complaints).filter(|_| status),
            peers: config.metrics_peers,
            chain,
            dir,
        };
        (Some(settings), complaints)
    }

    /// Whether the user wants more of the profiler than the status.
    pub(crate) fn is_asked_for(&self) -> bool {
        self.trace || self.summary || self.metrics.is_some() || self.listen.is_some()
    }

    /// Whether proxy steps are useless: network events are wanted and steps are not, and no trace shows one under the
    /// other.
    pub(crate) fn skips_steps(&self) -> bool {
        let asked = |kind: Kind| self.mask & kind.bit() != 0;
        !self.trace && asked(Kind::NetPlugin) && !asked(Kind::ProxyStep)
    }
}

fn words(text: &str) -> Vec<String> {
    text.split([',', ' ', '|']).filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
}

/// For a trace everything but ProxyCtrl, which is the most frequent event and shows little; for figures alone, the
/// events that they are made from.
fn default_mask(trace: bool) -> u32 {
    let all = Kind::ALL.into_iter().fold(0, |mask, kind| mask | kind.bit());
    let trace_only = Kind::GroupApi.bit() | Kind::Group.bit() | Kind::KernelLaunch.bit();
    all & !Kind::ProxyCtrl.bit() & if trace { !0 } else { !trace_only }
}

/// The events that report calls, their operations and what these wait for.
fn status_mask() -> u32 {
    [Kind::Coll, Kind::P2p, Kind::ProxyOp, Kind::ProxyStep, Kind::CeColl].iter().fold(0, |mask, kind| mask | kind.bit())
}

fn mask_of(text: &str, complaints: &mut Vec<String>) -> u32 {
    let all = Kind::ALL.into_iter().fold(0, |mask, kind| mask | kind.bit());
    words(text).iter().fold(0, |mask, word| {
        let number = match word.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok(),
            None => word.parse().ok(),
        };
        let more = number.or_else(|| Kind::from_label(word).map(Kind::bit)).or((word == "all").then_some(all));
        if more.is_none() {
            complaints.push(format!("TOWLINE_PROFILE_EVENTS: there is no event \"{word}\""));
        }
        mask | more.unwrap_or(0)
    }) & all
}

/// An address to listen on; a port alone means this one.
fn address(text: &str, alone: impl Into<IpAddr>) -> Option<SocketAddr> {
    text.parse().map(|port| SocketAddr::new(alone.into(), port)).or_else(|_| text.parse()).ok()
}

/// `TOWLINE_METRICS_LISTEN`: a port alone means loopback.
fn listen(text: &str, complaints: &mut Vec<String>) -> Option<SocketAddr> {
    let address = address(text, Ipv4Addr::LOCALHOST);
    if address.is_none() {
        complaints.push(format!("TOWLINE_METRICS_LISTEN: \"{text}\" is neither a port nor address:port"));
    }
    address
}

/// `TOWLINE_STATUS_LISTEN`: a port alone means all addresses, since only holders of the key are answered.
fn remote(config: &Config, complaints: &mut Vec<String>) -> Option<Remote> {
    let text = config.status_listen.as_deref()?;
    let Some(address) = address(text, Ipv6Addr::UNSPECIFIED) else {
        complaints.push(format!("TOWLINE_STATUS_LISTEN: \"{text}\" is neither a port nor address:port"));
        return None;
    };
    let Some(key) = &config.key_file else {
        complaints.push(
            "TOWLINE_STATUS_LISTEN is ignored without TOWLINE_KEY_FILE: only holders of the job's key get the status"
                .into(),
        );
        return None;
    };
    Some(Remote { address, key: PathBuf::from(&key.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> (Option<Settings>, Vec<String>) {
        let (config, _) = Config::from_pairs(pairs.iter().copied());
        Settings::new(&config, "host", 7, || Some("/local".into()))
    }

    const SILENT: (&str, &str) = ("TOWLINE_STATUS", "0");
    const STATUS: (&str, &str) = ("TOWLINE_STATUS", "1");

    #[test]
    fn the_status_is_given_over_tcp_to_holders_of_a_key_only() {
        const KEY: (&str, &str) = ("TOWLINE_KEY_FILE", "/key");
        let with = |text, more: &[(&str, &str)]| of(&[&[STATUS, ("TOWLINE_STATUS_LISTEN", text)], more].concat());
        let address = |text| with(text, &[KEY]).0.unwrap().remote.map(|remote| remote.address.to_string());
        assert_eq!(address("9500").as_deref(), Some("[::]:9500"));
        assert_eq!(address("10.0.0.1:9500").as_deref(), Some("10.0.0.1:9500"));
        assert_eq!((address("here"), with("here", &[KEY]).1.len()), (None, 1));
        let (without, said) = with("9500", &[]);
        assert_eq!((without.unwrap().remote, said.len()), (None, 1), "{said:?}");
    }

    #[test]
    fn without_status_nothing_is_done_unless_asked() {
        assert_eq!(of(&[SILENT]).0, None);
        assert_eq!(of(&[SILENT, ("TOWLINE_STATE_DIR", "/shared")]).0, None);
        assert_eq!(of(&[SILENT, ("TOWLINE_PROFILE", "")]).0, None);
        assert_eq!(of(&[SILENT, ("TOWLINE_PROFILE", "0")]).0, None);
        assert_eq!(of(&[SILENT, ("TOWLINE_PROFILE_DIR", "/tmp"), ("TOWLINE_PROFILE_EVENTS", "all")]).0, None);
    }

    #[test]
    fn for_the_status_alone_no_file_but_the_state_is_written() {
        let settings = of(&[STATUS]).0.unwrap();
        assert_eq!((settings.trace, settings.summary, settings.metrics), (false, false, None));
        assert_eq!(of(&[]), of(&[STATUS]), "the status is on by default");
        assert_eq!(settings.mask & (Kind::NetPlugin.bit() | Kind::KernelCh.bit()), 0, "what costs NCCL's threads most");
        assert_eq!(settings.control, Some(PathBuf::from("/local/towline-host-7.sock")));
        assert_eq!(settings.state, Some(PathBuf::from("/local/host-7.state")));
        let off = of(&[STATUS, ("TOWLINE_PROFILE_CONTROL", "off")]).0.unwrap();
        assert_eq!(off.control, None);
        let shared = of(&[("TOWLINE_STATE_DIR", "/shared"), ("TOWLINE_PROFILE", "trace")]).0.unwrap();
        assert_eq!(shared.state, Some(PathBuf::from("/shared/host-7.state")));
        let silent = of(&[SILENT, ("TOWLINE_PROFILE", "trace"), ("TOWLINE_STATE_DIR", "/shared")]).0.unwrap();
        assert_eq!((silent.status, silent.state), (false, None));
    }

    #[test]
    fn a_chained_profiler_alone_asks_nccl_for_nothing_of_ours() {
        let settings = of(&[("TOWLINE_PROFILER_CHAIN", "libother.so")]).0.unwrap();
        assert_eq!((settings.mask, settings.control, settings.listen), (0, None, None));
    }

    #[test]
    fn events_are_named_or_given_as_nccls_numbers() {
        let mask = |text| of(&[("TOWLINE_PROFILE", "trace"), ("TOWLINE_PROFILE_EVENTS", text)]).0.unwrap().mask;
        assert_eq!(mask("coll,ProxyStep"), 2 | 16);
        assert_eq!(mask("0x82"), 0x82);
        assert_eq!(mask("all"), 0xffff);
        assert_eq!(of(&[("TOWLINE_PROFILE", "trace"), ("TOWLINE_PROFILE_EVENTS", "col")]).1.len(), 1);
        assert_eq!(of(&[("TOWLINE_PROFILE", "trace")]).0.unwrap().mask & Kind::ProxyCtrl.bit(), 0);
    }

    #[test]
    fn a_port_alone_is_served_on_loopback_only() {
        let listen = |text| of(&[("TOWLINE_PROFILE", "metrics"), ("TOWLINE_METRICS_LISTEN", text)]).0.unwrap().listen;
        assert_eq!(listen("9400"), Some("127.0.0.1:9400".parse().unwrap()));
        assert_eq!(listen("0.0.0.0:9400"), Some("0.0.0.0:9400".parse().unwrap()));
        assert_eq!(listen("nonsense"), None);
    }

    #[test]
    fn paths_may_name_host_and_process() {
        let settings = of(&[("TOWLINE_PROFILE", "metrics"), ("TOWLINE_METRICS_FILE", "/m/%h-%p.prom")]).0.unwrap();
        assert_eq!(settings.metrics, Some(PathBuf::from("/m/host-7.prom")));
        assert_eq!(settings.control, Some(PathBuf::from("./towline-host-7.sock")));
    }
}
