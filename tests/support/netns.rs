//! Network namespaces with links between them: two hosts on one machine.
//!
//! They need root and `ip` (package iproute2). Where these are missing the test fails and says so, unless
//! `TOWLINE_SKIP_NETNS=1` asks to go without.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Whether to run tests that need namespaces.
///
/// # Panics
/// When something is missing and `TOWLINE_SKIP_NETNS` is not 1.
pub fn available() -> bool {
    if std::env::var("TOWLINE_SKIP_NETNS").is_ok_and(|value| value == "1") {
        eprintln!("skipped, as TOWLINE_SKIP_NETNS=1 asks");
        return false;
    }
    // SAFETY: asks for a number.
    let root = unsafe { libc::geteuid() } == 0;
    assert!(root, "this test needs root, to make network namespaces; TOWLINE_SKIP_NETNS=1 leaves it out");
    let found = Command::new("ip").arg("-V").output().is_ok_and(|output| output.status.success());
    assert!(found, "this test needs the ip command (package iproute2); TOWLINE_SKIP_NETNS=1 leaves it out");
    static TRIED: OnceLock<Result<(), String>> = OnceLock::new();
    if let Err(missing) = TRIED.get_or_init(try_one) {
        panic!("{missing}; TOWLINE_SKIP_NETNS=1 leaves it out");
    }
    true
}

/// Makes a namespace and runs a program inside. Else what is missing, in one sentence.
fn try_one() -> Result<(), String> {
    let name = format!("towline-try-{}", std::process::id());
    let run = |words: &[&str]| {
        let output = Command::new("ip").arg("netns").args(words).output().map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        if output.status.success() {
            Ok(())
        } else {
            Err(format!("`ip netns {}` fails here ({said})", words.join(" ")))
        }
    };
    run(&["add", &name]).map_err(|fails| {
        format!("this test makes network namespaces, and {fails}: it needs CAP_SYS_ADMIN and a writable /run")
    })?;
    let inside = run(&["exec", &name, "true"]).map_err(|fails| {
        format!(
            "this test runs programs in network namespaces, and {fails}: it needs a writable mount of /sys, and a / that is \
             a mount point (before entering a chroot, bind its directory to itself)"
        )
    });
    let _ = run(&["del", &name]);
    inside
}

/// Runs `ip` with these words.
pub fn ip(words: &str) {
    let output = Command::new("ip").args(words.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A network namespace, deleted with everything in it.
pub struct Namespace(String);

impl Namespace {
    /// One with its loopback up.
    pub fn new() -> Self {
        let namespace = Self::with_lo_down();
        namespace.ip("link set lo up");
        namespace
    }

    /// One as the kernel makes it.
    pub fn with_lo_down() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let namespace = Self(format!("towline-net-{}-{number}", std::process::id()));
        ip(&format!("netns add {}", namespace.0));
        namespace
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Runs `ip` inside.
    pub fn ip(&self, words: &str) {
        ip(&format!("-n {} {words}", self.0));
    }

    /// Runs a program with its arguments inside, and returns what it prints.
    pub fn run(&self, words: &[&str]) -> String {
        let output = Command::new("ip").args(["netns", "exec", &self.0]).args(words).output().expect("ip runs");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    /// Takes a rail up, with the addresses of the host of that number.
    pub fn bring_up(&self, rail: usize, number: usize) {
        self.ip(&format!("link set rail{rail} up"));
        self.ip(&format!("address replace 10.77.{rail}.{number}/24 dev rail{rail}"));
        // The kernel forgets IPv6 addresses of a link that goes down.
        self.ip(&format!("address replace fd77:{rail}::{number}/64 dev rail{rail} nodad"));
    }

    /// Runs many commands of `ip` inside, a line each.
    pub fn ip_batch(&self, lines: &str) {
        let mut ip = Command::new("ip");
        ip.args(["-n", &self.0, "-batch", "-"]).stdin(Stdio::piped());
        let mut running = ip.spawn().expect("ip runs");
        running.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("ip reads");
        assert!(running.wait().expect("ip ends").success(), "ip -batch");
    }

    /// Whether the kernel had news for a netlink socket inside, and no room.
    pub fn has_lost_news(&self) -> bool {
        let text = self.run(&["cat", "/proc/net/netlink"]);
        let at = text.lines().next().expect("a headline").split_whitespace().position(|word| word == "Drops");
        let drops = |line: &str| line.split_whitespace().nth(at.expect("a column")).and_then(|word| word.parse().ok());
        text.lines().skip(1).any(|line| drops(line).is_some_and(|drops: u64| drops > 0))
    }

    /// Sets one of the kernel's settings inside.
    pub fn set(&self, setting: &str, value: &str) {
        self.run(&["sh", "-c", &format!("echo {value} > /proc/sys/{setting}")]);
    }

    /// Waits until a link is up: the kernel reports its carrier a moment after it was made.
    pub fn wait_for(&self, link: &str) {
        super::eventually(&format!("{link} is up"), super::PATIENCE, || {
            let shown =
                Command::new("ip").args(["-n", &self.0, "-brief", "link", "show", link]).output().expect("ip runs");
            String::from_utf8_lossy(&shown.stdout).contains(" UP ").then_some(())
        });
    }

    /// Waits until a link is not up: the other end of one that was taken down loses its carrier a moment later.
    pub fn wait_for_no(&self, link: &str) {
        super::eventually(&format!("{link} is not up"), super::PATIENCE, || {
            let shown =
                Command::new("ip").args(["-n", &self.0, "-brief", "link", "show", link]).output().expect("ip runs");
            (!String::from_utf8_lossy(&shown.stdout).contains(" UP ")).then_some(())
        });
    }

    /// Lets no more than `mbits` Mbit/s leave over a link, with 10 ms of queue.
    pub fn shape(&self, link: &str, mbits: u64) {
        self.tc(&format!("qdisc add dev {link} root tbf rate {mbits}mbit burst 128kb latency 10ms"));
    }

    /// Runs `tc` (package iproute2) inside.
    pub fn tc(&self, words: &str) {
        let output = Command::new("tc").args(["-n", &self.0]).args(words.split_whitespace()).output().expect("tc runs");
        assert!(output.status.success(), "tc {words}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Bytes that have left over a rail.
    pub fn sent_over(&self, rail: usize) -> u64 {
        let sent = self.run(&["cat", &format!("/sys/class/net/rail{rail}/statistics/tx_bytes")]);
        sent.trim().parse().expect("a number of bytes")
    }

    /// A command that runs the test `test` of this program inside, in `role`.
    pub fn command(&self, test: &str, role: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0]).arg(std::env::current_exe().expect("a path"));
        super::child::adorn(&mut command, test, role);
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

/// Two namespaces with `links` veth pairs between them: `rail0`, `rail1`, … on both sides, with the addresses
/// 10.77.*rail*.1 and 10.77.*rail*.2, and fd77:*rail*::1 and ::2.
pub fn two_hosts(links: usize) -> (Namespace, Namespace) {
    let (left, right) = (Namespace::new(), Namespace::new());
    for rail in 0..links {
        left.ip(&format!("link add rail{rail} type veth peer name rail{rail} netns {}", right.name()));
        for (host, number) in [(&left, 1), (&right, 2)] {
            host.ip(&format!("link set rail{rail} addrgenmode eui64"));
            host.bring_up(rail, number);
        }
    }
    for rail in 0..links {
        left.wait_for(&format!("rail{rail}"));
        right.wait_for(&format!("rail{rail}"));
    }
    (left, right)
}

/// Runs `towline all-reduce`, a rank on each host, over all rails, again and again until `enough` says so. It looks at
/// every element. How many runs, all of them right.
pub fn all_reduce_until(
    hosts: &[&Namespace],
    words: &str,
    variables: &[(&str, &str)],
    mut enough: impl FnMut() -> bool,
) -> usize {
    let mut runs = 0;
    while !enough() {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.args("all-reduce -b 8 -f 8 -w 1".split(' ')).args(words.split(' '));
        for host in hosts {
            command.args(["--wrap", &format!("ip netns exec {}", host.name())]);
        }
        command.env("TOWLINE_RAILS", "all").env("NCCL_SOCKET_IFNAME", "rail").envs(variables.iter().copied());
        let output = command.stdin(Stdio::null()).output().expect("towline runs");
        let [text, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(output.status.success(), "{variables:?}: {text}\n{errors}");
        runs += 1;
    }
    runs
}
