//! Configuration: every variable that Towline reads, declared once.
//!
//! The `variables!` block below is the only place where a variable is defined. The fields of [`Config`], the declared
//! [`TABLE`], `docs/configuration.md` ([`render_markdown`]) and the output of `towline doctor` ([`settings`]) are made
//! from it. To add a variable, add an entry there and update the page: `TOWLINE_BLESS=1 cargo test config_docs`.
//!
//! Guarantees: reading never fails. A bad value or an unknown `TOWLINE_*` name becomes a [`Complaint`] with the nearest
//! valid one, and the default is used. The environment is read in the plugin's `init`, never when the library is
//! mapped: NCCL puts `/etc/nccl.conf` and `~/.nccl.conf` into the environment in between.
//!
//! This module must not know what the values are used for.

mod complaint;
mod nearest;
mod render;
mod value;

pub(crate) use complaint::Complaint;
pub(crate) use nearest::{is_slip, nearest};
pub use render::render_markdown;
pub(crate) use render::{Source, settings};
pub use value::NetEvents;
pub(crate) use value::{Backend, Family, KeyFile, LogLevel, Number, Rails, Value, is_blank_or_quote};

use std::time::Duration;

/// An entry of the table.
#[derive(Debug)]
pub(crate) struct Variable {
    /// The name in the environment.
    pub name: &'static str,
    /// The form of a value, for users.
    pub kind: fn() -> String,
    /// The default, written as a user would write it. Empty means unset.
    pub default: &'static str,
    /// The unit of a number, or empty.
    pub unit: &'static str,
    /// The release that introduced it.
    pub since: &'static str,
    /// When it is read, and the part that uses it.
    pub read: &'static str,
    /// One paragraph: what it does and when to change it.
    pub help: &'static str,
    /// Checks a value without keeping it.
    check: fn(&str) -> Result<(), value::Bad>,
}

impl Variable {
    /// Whether this is one of Towline's own variables, and not one of NCCL's that Towline honours.
    pub(crate) fn is_own(&self) -> bool {
        self.name.starts_with(PREFIX)
    }
}

/// Every variable with this prefix is Towline's.
pub(crate) const PREFIX: &str = "TOWLINE_";

/// Names with the prefix that Towline's own tests and tools use, and so cause no complaint.
const NOT_FOR_THE_LIBRARY: &[&str] = &[
    "TOWLINE_BLESS",
    "TOWLINE_SIM_SEEDS",
    "TOWLINE_SIM_FIRST",
    "TOWLINE_FAULTS",
    "TOWLINE_FAULTS_SEED",
    "TOWLINE_SOAK",
    "TOWLINE_CYCLES",
    "TOWLINE_PRESSURE",
    "TOWLINE_PRESSURE_SEED",
];

macro_rules! variables {
    ($(
        $field:ident: $type:ty {
            name: $name:literal,
            default: $default:literal,
            unit: $unit:literal,
            since: $since:literal,
            read: $read:literal,
            help: $help:literal $(,)?
        }
    )*) => {
        /// Every variable that Towline reads, in the order of the documentation.
        pub(crate) static TABLE: &[Variable] = &[$(Variable {
            name: $name,
            kind: <$type as Value>::kind,
            default: $default,
            unit: $unit,
            since: $since,
            read: $read,
            help: $help,
            check: |text| <$type as Value>::parse(text).map(drop),
        }),*];

        /// The values in force: one field for each variable of [`TABLE`].
        #[derive(Debug, Clone, PartialEq)]
        pub struct Config {
            $(
                #[doc = concat!("`", $name, "`. ", $help)]
                pub(crate) $field: $type,
            )*
        }

        /// The variables' names and fields.
        #[cfg(test)]
        const FIELDS: &[(&str, &str)] = &[$(($name, stringify!($field))),*];

        impl Default for Config {
            fn default() -> Self {
                Self { $($field: <$type as Value>::parse($default).expect("the table's defaults parse"),)* }
            }
        }

        impl Config {
            /// Parses `text` for the variable `name`, or returns what is wrong with it. The name is in the table.
            fn set(&mut self, name: &str, text: &str) -> Result<(), value::Bad> {
                match name {
                    $($name => self.$field = <$type as Value>::given(text)?,)*
                    _ => unreachable!("the caller found the name in the table"),
                }
                Ok(())
            }
        }
    };
}

variables! {
    rails: Rails {
        name: "TOWLINE_RAILS",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "Which network interfaces one NCCL device spreads over. Unset: each chosen interface is a device of \
               its own, as in NCCL's Socket. `all`: all chosen interfaces form one device, and every connection uses \
               all of them. A comma-separated list of interface names: those form the one device, whatever \
               `NCCL_SOCKET_IFNAME` says. One that is down then but has an address belongs to the device too, and is used \
               when it comes back. Set it the same way on all hosts.",
    }
    streams: Option<usize> {
        name: "TOWLINE_STREAMS",
        default: "auto",
        unit: "TCP streams per connection",
        since: "0.1.0",
        read: "init; connections",
        help: "The most TCP streams that one connection may open, 16 at the very most. `auto` chooses by the rails and by \
               the cores that there are for each process of the job on this host, whose number the launcher says \
               (torchrun, MPI, DeepSpeed, Horovod, Slurm): with three or fewer, NCCL's own thread moves everything over \
               one stream; with several rails, each rail has a further stream, which workers move.",
    }
    workers: Option<usize> {
        name: "TOWLINE_WORKERS",
        default: "auto",
        unit: "threads per process",
        since: "0.1.0",
        read: "first connection; engine",
        help: "The most worker threads that Towline starts in a process, whatever the number of connections. `auto` \
               chooses by the cores that there are for each process of the job on this host. They start when there is \
               work and sleep when there is none.",
    }
    recovery: bool {
        name: "TOWLINE_RECOVERY",
        default: "1",
        unit: "",
        since: "0.1.0",
        read: "init; connections",
        help: "Whether a broken stream or rail is repaired in the background. With 1, a send is done when the receiver \
               has acknowledged it or a copy is kept for resending. With 0, a send is done when the kernel took it, \
               and the first broken stream ends its connection.",
    }
    reconnect_timeout: Duration {
        name: "TOWLINE_RECONNECT_TIMEOUT",
        default: "10",
        unit: "seconds",
        since: "0.1.0",
        read: "init; connections",
        help: "How long a connection tries to get a stream back when its last one was reset or closed, or a queue pair \
               when all are lost, before its requests fail. When its last stream fell silent, TOWLINE_PEER_TIMEOUT \
               counts instead. A fraction is allowed.",
    }
    peer_timeout: Duration {
        name: "TOWLINE_PEER_TIMEOUT",
        default: "60",
        unit: "seconds",
        since: "0.1.0",
        read: "init; connections",
        help: "How long a peer's host may answer nothing at all before it counts as gone. A peer that is alive but \
               late, paused or not reading is not affected. A fraction is allowed.",
    }
    connect_timeout: Duration {
        name: "TOWLINE_CONNECT_TIMEOUT",
        default: "60",
        unit: "seconds",
        since: "0.1.0",
        read: "init; connections",
        help: "How long a handshake may take, and how long `connect` and `accept` of the oldest interface (NCCL 2.8 to \
               2.11, where both calls block) wait for the peer. Under FlagCX, after how long `accept` reports that \
               no peer has connected. A fraction is allowed.",
    }
    checksum: bool {
        name: "TOWLINE_CHECKSUM",
        default: "0",
        unit: "",
        since: "0.1.0",
        read: "init; connections",
        help: "With 1, every chunk carries a CRC-32C, which is checked before a byte of it enters NCCL's buffer; a chunk \
               that arrives damaged travels again. For networks and memory that change bytes unnoticed. On for a \
               connection when either side asks for it.",
    }
    key_file: Option<KeyFile> {
        name: "TOWLINE_KEY_FILE",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; connections",
        help: "A file with a key that all hosts of the job share, 32 to 4096 bytes (`openssl rand -base64 32`). When it is \
               set, all connections are encrypted and authenticated, and peers without the same key are refused. It \
               must belong to the user or to root, and be readable by owner and group at most. When the file cannot \
               be used, or the variable is set to nothing, there are no connections at all. See `docs/security.md`.",
    }
    tcp_congestion: Option<String> {
        name: "TOWLINE_TCP_CONGESTION",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; sockets",
        help: "The TCP congestion control of Towline's sockets, by the kernel's name (see \
               `/proc/sys/net/ipv4/tcp_available_congestion_control`). Unset: the system's default.",
    }
    backend: Backend {
        name: "TOWLINE_BACKEND",
        default: "auto",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "Which network carries the data. `auto`: RDMA when this host has a usable port (active, and chosen by \
               `NCCL_IB_HCA`), else TCP. `tcp`: sockets, and nobody looks for RDMA. `rdma`: RDMA, or `init` fails and says \
               why. All hosts of a job must come to the same choice; `NCCL_SOCKET_IFNAME` chooses the interfaces over \
               which RDMA connections come about.",
    }
    merge_any: bool {
        name: "TOWLINE_MERGE_ANY",
        default: "0",
        unit: "",
        since: "0.2.0",
        read: "makeVDevice; devices",
        help: "With 1, devices are merged whatever they are. NCCL cannot use a merged device without a place on the PCI \
               bus, so this is for tests and for hosts other than NCCL.",
    }
    speed: Option<u32> {
        name: "TOWLINE_SPEED",
        default: "auto",
        unit: "Mbit/s",
        since: "0.1.0",
        read: "init; devices",
        help: "The speed to report for an interface whose speed the system does not know, which is so for most virtual \
               NICs. `auto` reports 39000, for which NCCL opens four channels, or less than any speed that the system \
               knows; for 10000, which its own Socket reports, it opens two. A speed that the driver only claims, as veth \
               and tun do, is unknown. A value above that of the GPUs' own links can draw traffic inside a node onto \
               the network.",
    }
    tune: bool {
        name: "TOWLINE_TUNE",
        default: "1",
        unit: "",
        since: "0.1.0",
        read: "init; tuner",
        help: "Whether Towline chooses algorithm, protocol and number of channels of collectives between nodes (NCCL 2.20 \
               and later). NCCL's estimates are made for RDMA; over sockets its LL protocols get slow sooner, and \
               mid-sized operations do better on fewer channels. A tuner named by `NCCL_TUNER_PLUGIN` takes the place of \
               this one, and `none` leaves NCCL without any; `NCCL_ALGO`, `NCCL_PROTO`, `NCCL_MIN_NCHANNELS` and \
               `NCCL_MIN_CTAS` are respected. Set it the same way on all ranks.",
    }
    rma: bool {
        name: "TOWLINE_RMA",
        default: "0",
        unit: "",
        since: "0.2.0",
        read: "init; one-sided operations",
        help: "Whether Towline offers NCCL one-sided operations (puts, gets and signals; NCCL 2.30.7 and later) over TCP. \
               Set it the same way on all ranks.",
    }
    cuda_queues: Option<String> {
        name: "CUDA_DEVICE_MAX_CONNECTIONS",
        default: "",
        unit: "hardware queues of a GPU",
        since: "0.2.0",
        read: "init; one-sided operations",
        help: "CUDA's limit. With 1 or 2 Towline offers no one-sided operations: a stream that waits for a signal holds up the \
               queue through which the signal comes.",
    }
    nccl_algo: Option<String> {
        name: "NCCL_ALGO",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; tuner",
        help: "NCCL's list of allowed algorithms. When it is set, Towline chooses among these (NCCL 2.22 and later) or \
               does not choose (2.20 and 2.21).",
    }
    nccl_proto: Option<String> {
        name: "NCCL_PROTO",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; tuner",
        help: "NCCL's list of allowed protocols; as `NCCL_ALGO`.",
    }
    nccl_min_nchannels: Option<String> {
        name: "NCCL_MIN_NCHANNELS",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; tuner",
        help: "NCCL's least number of channels. When it is set, Towline leaves the number of channels to NCCL.",
    }
    nccl_min_ctas: Option<String> {
        name: "NCCL_MIN_CTAS",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; tuner",
        help: "NCCL's least number of thread blocks; as `NCCL_MIN_NCHANNELS`.",
    }
    log: LogLevel {
        name: "TOWLINE_LOG",
        default: "warn",
        unit: "",
        since: "0.1.0",
        read: "init; log",
        help: "How much goes to standard error when there is no NCCL to log through, as in the command line. Inside \
               NCCL, `NCCL_DEBUG` and `NCCL_DEBUG_SUBSYS` decide: INFO shows what was chosen and why, TRACE adds \
               debugging detail.",
    }
    net_events: NetEvents {
        name: "TOWLINE_NET_EVENTS",
        default: "auto",
        unit: "",
        since: "0.1.0",
        read: "init; transport",
        help: "What NCCL's profiler, whichever that is, is told of transfers. `nccl`: the parts of each transfer as \
               NCCL's own transports describe them, which NCCL's example profiler shows. `towline`: the same parts with \
               message, rail, stream, resends and waits, under an identifier of Towline's own, which only Towline's \
               profiler understands. `auto`: `towline` while Towline's own profiler asks for network events, else \
               `nccl`; but nothing with NCCL 2.26 and 2.27, where a profiler that does not ask for these events can \
               make NCCL crash. There, set `nccl` or `towline` when your profiler asks for them. `off`: nothing.",
    }
    profile: Option<String> {
        name: "TOWLINE_PROFILE",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "profiler init",
        help: "What the built-in profiler does: a comma-separated list of `trace` (a file for ui.perfetto.dev), \
               `summary` (tables at the end) and `metrics` (Prometheus), or `all`. Unset or `off`: no files. \
               NCCL 2.23 to 2.27 also need `NCCL_PROFILER_PLUGIN=libnccl-net.so`; later ones find the profiler \
               themselves. See `docs/profiling.md`.",
    }
    profile_dir: Option<String> {
        name: "TOWLINE_PROFILE_DIR",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "profiler init",
        help: "The directory for the profiler's files; it is made when it does not exist. Unset: the working directory. \
               Files are named after host and process, with a number where such a file is there already, so that all ranks \
               may share one.",
    }
    profile_events: Option<String> {
        name: "TOWLINE_PROFILE_EVENTS",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "profiler init",
        help: "Which of NCCL's events to ask for, by name or as NCCL's mask, as in `Coll,ProxyStep` or `0x12`. Unset: all \
               but ProxyCtrl for a trace, and what the figures are made from otherwise. An event brings its ancestors \
               along; but for figures alone, `NetPlugin` without `ProxyStep` records no steps.",
    }
    profile_buffer: Option<u32> {
        name: "TOWLINE_PROFILE_BUFFER",
        default: "auto",
        unit: "MiB per process",
        since: "0.1.0",
        read: "profiler init",
        help: "Memory for events on their way from NCCL's threads to the profiler's. Events that find no room are \
               dropped, counted and reported. `auto` is 32.",
    }
    profile_limit: Option<u32> {
        name: "TOWLINE_PROFILE_LIMIT",
        default: "auto",
        unit: "MiB per process",
        since: "0.1.0",
        read: "profiler init",
        help: "How large a trace may become. At half of it the file becomes `….earlier.pftrace`, in place of the one before, and \
               the trace goes on in a new one: the newest part is kept. `auto` is 4096.",
    }
    profile_control: Option<String> {
        name: "TOWLINE_PROFILE_CONTROL",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "profiler init",
        help: "The path of the control socket, on which a running job answers `status`, `summary`, `metrics` and `flush`; \
               `%h` and `%p` stand for host and process. Unset: `towline-%h-%p.sock` in the profiler's directory, or, without \
               `TOWLINE_PROFILE`, beside the state files of this host. `off`: none.",
    }
    metrics_file: Option<String> {
        name: "TOWLINE_METRICS_FILE",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "profiler init",
        help: "The file for `metrics`, in the format of Prometheus and replaced as a whole, for node_exporter's textfile \
               collector; `%h` and `%p` stand for host and process. Unset: `towline-%h-%p.prom` in the profiler's \
               directory. `off`: none.",
    }
    metrics_interval: Duration {
        name: "TOWLINE_METRICS_INTERVAL",
        default: "10",
        unit: "seconds",
        since: "0.1.0",
        read: "profiler init",
        help: "How often the metrics file is renewed. A fraction is allowed.",
    }
    metrics_listen: Option<String> {
        name: "TOWLINE_METRICS_LISTEN",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "profiler init",
        help: "Where metrics are served over HTTP, `address:port`. A port alone means 127.0.0.1. The processes of a host \
               listen on this port plus their number on the host (`LOCAL_RANK`, or what Open MPI, MPICH and Slurm set), \
               else on the first of 64 that is free. Unset: nowhere.",
    }
    status_listen: Option<String> {
        name: "TOWLINE_STATUS_LISTEN",
        default: "",
        unit: "",
        since: "0.2.0",
        read: "profiler init",
        help: "Where each process gives its status to holders of the key in TOWLINE_KEY_FILE (`towline why --host`), \
               `address:port`. A port alone means all addresses. The processes of a host have a port each, numbered \
               as for TOWLINE_METRICS_LISTEN. Unset, or without a key: nowhere.",
    }
    metrics_peers: bool {
        name: "TOWLINE_METRICS_PEERS",
        default: "0",
        unit: "",
        since: "0.2.0",
        read: "profiler init",
        help: "With 1, there are also metrics by peer rank, `towline_peer_step_…`: ten series for each peer and communicator.",
    }
    profiler_chain: Option<String> {
        name: "TOWLINE_PROFILER_CHAIN",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "profiler init",
        help: "A second NCCL profiler to load behind Towline's: a path or a name that the dynamic linker finds. It gets \
               the events that it asks for, with its own handles, whatever else is set.",
    }
    status: Option<bool> {
        name: "TOWLINE_STATUS",
        default: "",
        unit: "",
        since: "0.2.0",
        read: "profiler init",
        help: "Whether each process remembers its last 1000 calls and its open operations, for `towline why` and `towline \
               top`, wherever NCCL loads the profiler. Unset: it does, except beside a `TOWLINE_PROFILER_CHAIN` without \
               `TOWLINE_STATE_DIR`. With 0 and without `TOWLINE_PROFILE` the profiler does nothing, at no cost.",
    }
    state_dir: Option<String> {
        name: "TOWLINE_STATE_DIR",
        default: "",
        unit: "",
        since: "0.2.0",
        read: "profiler init; why; top",
        help: "Where each process keeps its state file, `HOST-PID.state`, renewed each second: a directory that all hosts of \
               the job share lets `towline why` see them all. It is made when it does not exist. Unset: `towline-UID` in \
               `/dev/shm`, or in `/tmp`, for the processes of this host.",
    }
    stuck_after: Duration {
        name: "TOWLINE_STUCK_AFTER",
        default: "30",
        unit: "seconds",
        since: "0.2.0",
        read: "profiler init",
        help: "A call that is open for so long is told of in NCCL's log, once, as a warning. At least 5, of a send or \
               receive at least 30.",
    }
    socket_ifname: Option<String> {
        name: "NCCL_SOCKET_IFNAME",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "NCCL's choice of interfaces: a comma-separated list of name prefixes. `=` in front asks for exact \
               names, `^` in front excludes. Unset: InfiniBand interfaces, else those in the subnet of `NCCL_COMM_ID`, \
               else all but docker, lo and virbr, else docker, else lo, else virbr.",
    }
    socket_family: Option<Family> {
        name: "NCCL_SOCKET_FAMILY",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "NCCL's choice of the address family. Unset: the first address of each interface, which is its IPv4 \
               address when it has one.",
    }
    ib_disable: bool {
        name: "NCCL_IB_DISABLE",
        default: "0",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "With 1, `TOWLINE_BACKEND=auto` does not look for RDMA devices, as in NCCL.",
    }
    ib_hca: Option<String> {
        name: "NCCL_IB_HCA",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "NCCL's choice of RDMA devices and ports: a comma-separated list of name prefixes, each with an optional \
               `:port`, `:rail` and `:plane`. `=` in front asks for exact names, `^` in front excludes. Unset: every \
               active port.",
    }
    ib_merge_vfs: bool {
        name: "NCCL_IB_MERGE_VFS",
        default: "1",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "Whether the virtual functions of a card are shown to NCCL as ports of one card.",
    }
    ib_merge_nics: bool {
        name: "NCCL_IB_MERGE_NICS",
        default: "1",
        unit: "",
        since: "0.1.0",
        read: "makeVDevice; devices",
        help: "Whether NCCL may merge RDMA ports into one device, whose connections use all of them. With 0 a device of \
               several ports is refused, and NCCL goes on with single ones.",
    }
    net_force_merge: Option<String> {
        name: "NCCL_NET_FORCE_MERGE",
        default: "",
        unit: "",
        since: "0.2.0",
        read: "makeVDevice; devices",
        help: "NCCL's list of devices to merge. When it is set, Towline merges interfaces that have a place on the PCI bus \
               as NCCL asks; otherwise interfaces stay separate devices.",
    }
    net_merge_level: Option<String> {
        name: "NCCL_NET_MERGE_LEVEL",
        default: "",
        unit: "",
        since: "0.2.0",
        read: "makeVDevice; devices",
        help: "NCCL's distance up to which it merges devices. When it is set, Towline merges interfaces that have a place \
               on the PCI bus as NCCL asks; otherwise interfaces stay separate devices.",
    }
    ib_device_pci_order: bool {
        name: "NCCL_IB_DEVICE_PCI_ORDER",
        default: "1",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "Whether RDMA ports are sorted by PCI address. With 0 they stay in libibverbs's order.",
    }
    ib_query_port_speed: bool {
        name: "NCCL_IB_QUERY_PORT_SPEED",
        default: "1",
        unit: "",
        since: "0.2.0",
        read: "init; devices",
        help: "Whether a port's speed is asked of its driver (`ibv_query_port_speed`), which knows bonded ports.",
    }
    ib_gid_index: Number<-1, 255> {
        name: "NCCL_IB_GID_INDEX",
        default: "-1",
        unit: "index",
        since: "0.1.0",
        read: "init; devices",
        help: "RoCE: the entry of the port's GID table to use. −1 lets family, range and version choose.",
    }
    ib_roce_version: Number<1, 2> {
        name: "NCCL_IB_ROCE_VERSION_NUM",
        default: "2",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "RoCE: the version of the chosen GID, where there is one.",
    }
    ib_addr_family: Option<Family> {
        name: "NCCL_IB_ADDR_FAMILY",
        default: "AF_INET",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "RoCE: the address family of the chosen GID.",
    }
    ib_addr_range: Option<String> {
        name: "NCCL_IB_ADDR_RANGE",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "RoCE: the chosen GID must lie in this range, as in `10.7.0.0/16`. Unset: any address.",
    }
    ib_routable_index: Number<0, 255> {
        name: "NCCL_IB_ROUTABLE_FLID_GID_INDEX",
        default: "1",
        unit: "index",
        since: "0.1.0",
        read: "init; devices",
        help: "InfiniBand: the entry of the GID table that is used when it holds a routable forwarding identifier.",
    }
    ib_pkey: Number<0, 65535> {
        name: "NCCL_IB_PKEY",
        default: "0",
        unit: "index",
        since: "0.1.0",
        read: "connections",
        help: "The place of the partition key in the port's table.",
    }
    ib_sl: Number<-1, 15> {
        name: "NCCL_IB_SL",
        default: "-1",
        unit: "",
        since: "0.1.0",
        read: "connections",
        help: "The service level. −1: the communicator's traffic class decides, else 0.",
    }
    ib_tc: Number<-1, 255> {
        name: "NCCL_IB_TC",
        default: "-1",
        unit: "",
        since: "0.1.0",
        read: "connections",
        help: "The traffic class; on RoCE the whole ToS byte of the packets. −1: the communicator's, else 0.",
    }
    ib_fifo_tc: Number<-1, 255> {
        name: "NCCL_IB_FIFO_TC",
        default: "-1",
        unit: "",
        since: "0.1.0",
        read: "connections",
        help: "The traffic class of the clear-to-send messages, which are small and should not wait behind data. \
               −1: that of the data.",
    }
    ib_timeout: Number<0, { i64::MAX }> {
        name: "NCCL_IB_TIMEOUT",
        default: "20",
        unit: "power of two",
        since: "0.1.0",
        read: "connections",
        help: "How long a queue pair waits for an acknowledgement: 4.096 µs times two to this power. 20 is 4.3 s. 0, and 32 \
               or more: for ever, so that a packet that is lost may never be sent again.",
    }
    ib_retry_cnt: Number<0, 7> {
        name: "NCCL_IB_RETRY_CNT",
        default: "7",
        unit: "attempts",
        since: "0.1.0",
        read: "connections",
        help: "How often a queue pair sends again before it gives up.",
    }
    ib_mqp_retry_all: bool {
        name: "NCCL_IB_MQP_RETRY_ALL",
        default: "0",
        unit: "",
        since: "0.2.0",
        read: "connections",
        help: "With 1 every failure to connect a queue pair is tried again. With 0 only that the peer's address was not \
               found in time.",
    }
    ib_mqp_retry_cnt: Number<0, { i64::MAX }> {
        name: "NCCL_IB_MQP_RETRY_CNT",
        default: "34",
        unit: "attempts",
        since: "0.2.0",
        read: "connections",
        help: "How often connecting a queue pair is tried again, within `TOWLINE_CONNECT_TIMEOUT`.",
    }
    ib_mqp_retry_sleep: Number<0, { i64::MAX }> {
        name: "NCCL_IB_MQP_RETRY_SLEEP_MSEC",
        default: "100",
        unit: "milliseconds",
        since: "0.2.0",
        read: "connections",
        help: "How long to wait before connecting a queue pair is tried again: so long after the first failure, twice as \
               long after the second, and so on.",
    }
    ib_qps_per_connection: Number<1, 128> {
        name: "NCCL_IB_QPS_PER_CONNECTION",
        default: "1",
        unit: "queue pairs",
        since: "0.1.0",
        read: "connections",
        help: "Queue pairs of a connection on each of its ports. More of them spread a connection over the paths of a \
               fabric that routes by flow.",
    }
    ib_split_data_on_qps: bool {
        name: "NCCL_IB_SPLIT_DATA_ON_QPS",
        default: "0",
        unit: "",
        since: "0.1.0",
        read: "connections",
        help: "With 1 every message is split over all queue pairs. With 0 messages take turns, each on one queue pair \
               of every port.",
    }
    ib_adaptive_routing: Number<-2, 1> {
        name: "NCCL_IB_ADAPTIVE_ROUTING",
        default: "-2",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "Whether the fabric may reorder packets of a queue pair, so that the end of a large message needs a \
               message of its own. −2: yes on InfiniBand, no on RoCE.",
    }
    ib_ar_threshold: Number<0, { i64::MAX }> {
        name: "NCCL_IB_AR_THRESHOLD",
        default: "8192",
        unit: "bytes",
        since: "0.1.0",
        read: "connections",
        help: "With adaptive routing, the size above which a separate message marks the end of a message.",
    }
    ib_pci_relaxed_ordering: Number<0, 2> {
        name: "NCCL_IB_PCI_RELAXED_ORDERING",
        default: "2",
        unit: "",
        since: "0.1.0",
        read: "init; memory",
        help: "Whether RDMA devices may reorder writes over PCIe. 1 and 2: where libibverbs knows how; 0: no.",
    }
    ib_ece_enable: bool {
        name: "NCCL_IB_ECE_ENABLE",
        default: "1",
        unit: "",
        since: "0.1.0",
        read: "connections",
        help: "Whether the two drivers may agree on features beyond the standard (enhanced connection establishment).",
    }
    ib_async_events: bool {
        name: "NCCL_IB_RETURN_ASYNC_EVENTS",
        default: "1",
        unit: "",
        since: "0.1.0",
        read: "connections",
        help: "Whether a fatal event of a device or a queue fails its connections. With 0 it is only logged.",
    }
    comm_id: Option<String> {
        name: "NCCL_COMM_ID",
        default: "",
        unit: "",
        since: "0.1.0",
        read: "init; devices",
        help: "The address of NCCL's own rendezvous, `host:port` or `[ipv6]:port`. Towline only takes a hint from it, \
               as NCCL does: without `NCCL_SOCKET_IFNAME`, the interface in the same subnet is preferred.",
    }
}

impl Config {
    /// The configuration from the process's environment, and the complaints about it.
    pub(crate) fn from_env() -> (Self, Vec<Complaint>) {
        Self::from_pairs(std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            Some((name, value.to_string_lossy().into_owned()))
        }))
    }

    /// The configuration from these names and values, and the complaints about them. Names that are neither in the
    /// table nor prefixed `TOWLINE_` are ignored. The last value of a name counts.
    pub fn from_pairs<N, V>(pairs: impl IntoIterator<Item = (N, V)>) -> (Self, Vec<Complaint>)
    where
        N: AsRef<str>,
        V: AsRef<str>,
    {
        let mut config = Self::default();
        let mut complaints = Vec::new();
        for (name, text) in pairs {
            let (name, text) = (name.as_ref(), text.as_ref());
            match TABLE.iter().find(|variable| variable.name == name) {
                Some(variable) => {
                    if let Err(bad) = config.set(name, text) {
                        complaints.push(Complaint::bad_value(variable, text, bad));
                    }
                }
                None if name.starts_with(PREFIX) && !NOT_FOR_THE_LIBRARY.contains(&name) => {
                    complaints.push(Complaint::unknown_name(name));
                }
                None => {}
            }
        }
        complaints.sort_by(|a, b| a.name.cmp(&b.name));
        (config, complaints)
    }
}

#[cfg(test)]
mod tests;
