//! What the built-in profiler was asked to do, read from the environment when a communicator is created.
//!
//! Nothing here has an effect while neither `TOWLINE_PROFILE` nor `TOWLINE_PROFILER_CHAIN` is set: NCCL 2.28 and
//! later loads the profiler of any network plugin, so it must cost nothing to who did not ask.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::event::Kind;
use crate::os::config::Config;

/// Room for 16,384 records in each of the ring's sixteen shards: 50 ms of a thread that tells 300,000 a second.
const BUFFER_MIB: u32 = 32;

/// Some twenty million events, about what Perfetto's page can load.
const LIMIT_MIB: u32 = 4096;

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Write a trace file.
    pub trace: bool,
    /// Write a summary at the end.
    pub summary: bool,
    /// Where files go.
    pub dir: PathBuf,
    /// The event mask that we ask NCCL for.
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
    /// The second profiler.
    pub chain: Option<PathBuf>,
}

impl Settings {
    /// What `config` asks for on this host and in this process, and what in it made no sense.
    /// None when it asks for nothing.
    pub fn new(config: &Config, host: &str, pid: u32) -> (Option<Self>, Vec<String>) {
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
        if !ours && chain.is_none() {
            return (None, complaints);
        }
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
        let settings = Self {
            trace,
            summary,
            mask: if ours { mask } else { 0 },
            buffer: config.profile_buffer.unwrap_or(BUFFER_MIB).max(1) as usize * (1 << 20),
            limit: u64::from(config.profile_limit.unwrap_or(LIMIT_MIB).max(1)) * (1 << 20),
            control: place(&config.profile_control, "sock").filter(|_| ours),
            metrics: place(&config.metrics_file, "prom").filter(|_| metrics),
            interval: config.metrics_interval.max(Duration::from_millis(100)),
            listen: config.metrics_listen.as_deref().filter(|_| ours).and_then(|text| listen(text, &mut complaints)),
            chain,
            dir,
        };
        (Some(settings), complaints)
    }

    /// Whether proxy steps are of no use: network events are asked for and they are not, and no trace shows one under the other.
    pub fn skips_steps(&self) -> bool {
        let asked = |kind: Kind| self.mask & kind.bit() != 0;
        !self.trace && asked(Kind::NetPlugin) && !asked(Kind::ProxyStep)
    }
}

fn words(text: &str) -> Vec<String> {
    text.split([',', ' ', '|']).filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
}

/// Everything but ProxyCtrl for a trace (that one says little and is the most frequent); for figures alone, what they
/// are made from.
fn default_mask(trace: bool) -> u32 {
    let all = Kind::ALL.into_iter().fold(0, |mask, kind| mask | kind.bit());
    let trace_only = Kind::GroupApi.bit() | Kind::Group.bit() | Kind::KernelLaunch.bit();
    all & !Kind::ProxyCtrl.bit() & if trace { !0 } else { !trace_only }
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

/// An address to listen on; a port alone means loopback.
fn listen(text: &str, complaints: &mut Vec<String>) -> Option<SocketAddr> {
    let address = match text.parse::<u16>() {
        Ok(port) => Some(SocketAddr::from(([127, 0, 0, 1], port))),
        Err(_) => text.parse().ok(),
    };
    if address.is_none() {
        complaints.push(format!("TOWLINE_METRICS_LISTEN: \"{text}\" is neither a port nor address:port"));
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> (Option<Settings>, Vec<String>) {
        let (config, _) = Config::from_pairs(pairs.iter().copied());
        Settings::new(&config, "host", 7)
    }

    #[test]
    fn nothing_is_done_unless_asked() {
        assert_eq!(of(&[]).0, None);
        assert_eq!(of(&[("TOWLINE_PROFILE", "")]).0, None);
        assert_eq!(of(&[("TOWLINE_PROFILE", "0")]).0, None);
        assert_eq!(of(&[("TOWLINE_PROFILE_DIR", "/tmp"), ("TOWLINE_PROFILE_EVENTS", "all")]).0, None);
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
        assert_eq!(mask("all"), 0x7fff);
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
