//! `towline doctor` gives the right cure: each case makes the host sick, lets the doctor name the cause, does what it
//! says and looks again.
//!
//! A case for every cause is asked for by [`every_cause_has_a_case`].

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::netns::{self, Namespace, two_hosts};
use serde_json::Value;
use tempfile::TempDir;

/// A host, or a part of one, and the environment of a process on it.
struct Host {
    dir: TempDir,
    variables: Vec<(String, String)>,
    arguments: Vec<String>,
    namespace: Option<String>,
    is_nobody: bool,
    /// Lines of a shell before the doctor is called.
    before: String,
}

impl Host {
    /// One with the plugin in the directory `towline`, under both of its names.
    fn new() -> Self {
        // Other users can reach it, unlike a checkout in root's home.
        let dir = tempfile::tempdir().expect("a directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("permissions");
        let host = Self {
            dir,
            variables: Vec::new(),
            arguments: Vec::new(),
            namespace: None,
            is_nobody: false,
            before: String::new(),
        };
        fs::create_dir(host.path("towline")).expect("a directory");
        let plugin = Path::new(env!("CARGO_BIN_EXE_towline")).with_file_name("libnccl-net.so");
        let plugin = plugin.canonicalize().expect("the plugin");
        // A second name of the same file is as good as a copy.
        fs::hard_link(&plugin, host.plugin())
            .or_else(|_| fs::copy(&plugin, host.plugin()).map(|_| ()))
            .expect("a copy");
        symlink("libnccl-net.so", host.path("towline/libnccl-net-towline.so")).expect("a link");
        host.argument("--plugin").argument_path("towline/libnccl-net.so")
    }

    /// One in a namespace whose interface `rail0` has an address and a carrier.
    fn inside(namespace: &Namespace) -> Self {
        let mut host = Self::new().variable_path("LD_LIBRARY_PATH", &["towline"]);
        host.namespace = Some(namespace.name().to_owned());
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("text").to_owned()
    }

    fn plugin(&self) -> PathBuf {
        self.path("towline/libnccl-net.so")
    }

    fn variable(mut self, name: &str, value: impl Into<String>) -> Self {
        self.variables.push((name.to_owned(), value.into()));
        self
    }

    fn variable_path(self, name: &str, files: &[&str]) -> Self {
        let value = files.iter().map(|file| self.text(file)).collect::<Vec<_>>().join(":");
        self.variable(name, value)
    }

    fn argument(mut self, text: &str) -> Self {
        self.arguments.push(text.to_owned());
        self
    }

    fn argument_path(self, file: &str) -> Self {
        let text = self.text(file);
        self.argument(&text)
    }

    fn before(mut self, lines: &str) -> Self {
        self.before = lines.to_owned();
        self
    }

    /// Makes a directory with what `fill` puts into its `libnccl-net.so`.
    fn with(self, name: &str, fill: impl FnOnce(&Path)) -> Self {
        fs::create_dir_all(self.path(name)).expect("a directory");
        fill(&self.path(name).join("libnccl-net.so"));
        self
    }

    /// A configuration file of NCCL.
    fn with_conf(self, text: &str) -> Self {
        fs::write(self.path("nccl.conf"), text).expect("a file");
        self.variable_path("NCCL_CONF_FILE", &["nccl.conf"])
    }

    /// Runs these lines of a shell and then the doctor; what it finds.
    fn findings(&self, lines: &str) -> Vec<Value> {
        // In this shell, so that what it exports holds, and without its output among ours.
        let script = format!("{}\n{{ :\n{lines}\n}} >&2\nexec \"$0\" doctor --json \"$@\"", self.before);
        let mut command = match &self.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, "sh"]);
                command
            }
            None => Command::new("sh"),
        };
        let mut program = PathBuf::from(env!("CARGO_BIN_EXE_towline"));
        if self.is_nobody {
            // Its directory may be closed to others, as root's home is.
            program = self.path("towline-for-others");
            // Not by this process: a process that another test starts meanwhile would inherit the open file, and the
            // kernel does not run a file that any process has open for writing.
            let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_towline")).arg(&program).status();
            assert!(copied.expect("cp runs").success(), "a copy");
        }
        command.args(["-c", &script]).arg(program).args(&self.arguments).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if ["NCCL_", "TOWLINE_", "LD_"].iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command.env("NCCL_CONF_FILE", "/nonexistent").envs(self.variables.iter().cloned());
        if self.is_nobody {
            command.uid(65534).gid(65534);
        }
        let output = command.output().expect("sh runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let json: Value = serde_json::from_str(&text)
            .unwrap_or_else(|_| panic!("{lines}: {text}\n{}", String::from_utf8_lossy(&output.stderr)));
        json["findings"].as_array().expect("a list").clone()
    }

    /// The cure for `cause`, which must be found.
    fn cure(&self, cause: &str) -> String {
        let findings = self.findings("");
        let found = findings.iter().find(|finding| finding["cause"] == cause);
        let found = found.unwrap_or_else(|| panic!("{cause} is not among {findings:#?}"));
        found["mend"].as_str().expect("text").to_owned()
    }

    /// The cause is gone after these lines, and there is no problem left.
    fn is_cured_by(&self, cause: &str, lines: &str) {
        let found = Command::new("sysctl").arg("--version").stdout(Stdio::null()).status();
        assert!(!lines.contains("sysctl ") || found.is_ok(), "this test needs sysctl (package procps)");
        let findings = self.findings(lines);
        let is_left = |finding: &&Value| finding["cause"] == cause || finding["severity"] == "problem";
        let left: Vec<_> = findings.iter().filter(is_left).collect();
        assert!(left.is_empty(), "{cause}: after `{lines}` there is still {left:#?}");
    }

    /// The same for what takes a link up: its carrier comes a moment later.
    fn is_cured_soon(&self, cause: &str) {
        let cure = self.cure(cause);
        // The kernel looks at links that change often only once a second.
        let wait = "for _ in $(seq 50); do ip -o link | grep -q NO-CARRIER || break; sleep 0.1; done";
        self.is_cured_by(cause, &format!("{cure}\n{wait}"));
    }

    /// The doctor's own words, given to a shell, help.
    fn is_cured(&self, cause: &str) {
        let cure = self.cure(cause);
        self.is_cured_by(cause, &cure);
    }
}

/// Compiles a library.
fn library(file: &Path, source: &str, arguments: &[&str]) {
    let text = file.with_extension("c");
    fs::write(&text, source).expect("a file");
    let mut compiler = Command::new("cc");
    let status = compiler.args(["-shared", "-fPIC", "-o"]).arg(file).arg(text).args(arguments).status();
    assert!(status.expect("cc starts").success());
}

/// A plugin of another network, as HPC-X brings one.
fn other_plugin(file: &Path) {
    library(
        file,
        "const char* name = \"Other\"; struct { const char* name; void* rest[64]; } ncclNetPlugin_v8 = {\"Other\"};",
        &[],
    );
}

/// The plugin with some of its bytes exchanged for others.
fn patched(file: &Path, patch: impl FnOnce(&mut Vec<u8>)) {
    let plugin = Path::new(env!("CARGO_BIN_EXE_towline")).with_file_name("libnccl-net.so");
    let mut bytes = fs::read(plugin).expect("the plugin");
    patch(&mut bytes);
    fs::write(file, bytes).expect("a file");
}

#[test]
fn a_healthy_host_has_no_problem() {
    let host = Host::new().variable_path("LD_LIBRARY_PATH", &["towline"]);
    host.is_cured_by("not-on-loader-path", "");
    for value in ["towline", "towline,ofi", "ofi,towline", "libnccl-net.so", "libnccl-net-towline.so"] {
        let host = Host::new().variable_path("LD_LIBRARY_PATH", &["towline"]).variable("NCCL_NET_PLUGIN", value);
        host.is_cured_by("choice-leads-nowhere", "");
    }
}

/// A library that does not load: each reason is named, with the cure for that reason.
#[test]
fn a_library_that_does_not_load() {
    let host = Host::new();
    let missing = Host { arguments: vec!["--plugin".into(), host.text("gone.so")], ..Host::new() };
    assert!(missing.cure("plugin-missing").contains("--plugin"));

    // Copied without following the link, as `cp -P` and `COPY` of a container's recipe do.
    let dangling = |file: &Path| symlink("deps/libtowline.so", file).expect("a link");
    Host::new().with("copy", dangling).variable_path("LD_LIBRARY_PATH", &["copy"]).is_cured("plugin-link-dangles");

    let arm = |file: &Path| patched(file, |bytes| bytes[18] = 0xb7);
    let host = Host::new().with("copy", arm);
    let host = Host { arguments: vec!["--plugin".into(), host.text("copy/libnccl-net.so")], ..host };
    assert!(host.cure("plugin-architecture").contains("for this architecture"));

    let newer = |file: &Path| {
        patched(file, |bytes| {
            for at in 0..bytes.len() - 10 {
                if bytes[at..].starts_with(b"GLIBC_2.3") {
                    bytes[at + 8..at + 10].copy_from_slice(b"99");
                }
            }
        });
    };
    Host::new().with("copy", newer).variable_path("LD_LIBRARY_PATH", &["copy"]).is_cured("plugin-wants-newer-libc");

    let text = |file: &Path| fs::write(file, "version https://git-lfs.github.com/spec/v1\n").expect("a file");
    Host::new().with("copy", text).variable_path("LD_LIBRARY_PATH", &["copy"]).is_cured("plugin-does-not-load");

    let host = Host::new().with("libs", |file| {
        let dir = file.parent().expect("a directory");
        library(&dir.join("libwanted.so.1"), "int wanted;", &["-Wl,-soname,libwanted.so.1"]);
        let wanted = dir.join("libwanted.so.1");
        let source = "extern int wanted; int* use = &wanted; int ncclNetPlugin_v8[64];";
        library(file, source, &[wanted.to_str().expect("text")]);
    });
    let libs = host.text("libs");
    let host = Host { arguments: vec!["--plugin".into(), format!("{libs}/libnccl-net.so")], ..host };
    assert!(host.cure("plugin-wants-library").contains("has libwanted.so.1"));
    let findings = host.findings(&format!("export LD_LIBRARY_PATH={libs}"));
    assert!(findings.iter().all(|finding| finding["cause"] != "plugin-wants-library"), "{findings:#?}");

    let host = Host::new().with("none", |file| library(file, "int nothing;", &[]));
    let host = Host { arguments: vec!["--plugin".into(), host.text("none/libnccl-net.so")], ..host };
    assert!(host.cure("plugin-has-no-table").contains("--plugin"));
}

/// A mount without programs, and a directory of another user: both need root to be made.
#[test]
fn a_library_that_may_not_be_loaded() {
    if !netns::available() {
        return;
    }
    let host = Host::new().with("noexec", |_| {});
    let dir = host.text("noexec");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "noexec", "tmpfs", &dir]).status();
    assert!(mounted.expect("mount runs").success());
    let copied = fs::copy(host.plugin(), host.path("noexec/libnccl-net.so"));
    let host = Host { arguments: vec!["--plugin".into(), format!("{dir}/libnccl-net.so")], ..host };
    let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        copied.expect("a copy");
        host.is_cured("plugin-no-exec");
    }));
    assert!(Command::new("umount").arg(&dir).status().expect("umount runs").success());
    tried.unwrap_or_else(|panic| std::panic::resume_unwind(panic));

    let host = Host::new().with("closed", |file| patched(file, |_| {}));
    fs::set_permissions(host.path("closed"), fs::Permissions::from_mode(0o700)).expect("permissions");
    let arguments = vec!["--plugin".into(), host.text("closed/libnccl-net.so")];
    let host = Host { arguments, is_nobody: true, ..host };
    let cure = host.cure("plugin-not-readable");
    // The owner does it, not the user.
    assert!(Command::new("sh").args(["-c", &cure]).status().expect("sh runs").success());
    host.is_cured_by("plugin-not-readable", "");
}

/// NCCL_NET_PLUGIN with another name, a path, a list, a missing file: an `export` that is already in force is no cure.
#[test]
fn a_choice_of_plugin_that_leads_elsewhere() {
    let found = || Host::new().variable_path("LD_LIBRARY_PATH", &["towline"]);
    for value in ["ofi", "Towline", "libnccl-net-towline", "/gone/libnccl-net.so", "ofi,aws"] {
        found().variable("NCCL_NET_PLUGIN", value).is_cured("choice-leads-nowhere");
        // The same where the plugin is not on the loader's path either.
        Host::new().variable("NCCL_NET_PLUGIN", value).is_cured("choice-leads-nowhere");
    }
    // What a file sets cannot be unset in a shell.
    found().with_conf("NCCL_NET_PLUGIN=ofi\n").is_cured("choice-leads-nowhere");
    for off in ["none", "NONE", ""] {
        found().variable("NCCL_NET_PLUGIN", off).is_cured("plugins-off");
    }
    found().with_conf("NCCL_NET_PLUGIN=none\n").is_cured("plugins-off");

    let host = found().with("hpcx", other_plugin);
    let other = host.text("hpcx/libnccl-net.so");
    host.variable("NCCL_NET_PLUGIN", &other).is_cured("choice-opens-other");
    let host = Host::new().with("hpcx", other_plugin).variable_path("LD_LIBRARY_PATH", &["hpcx", "towline"]);
    assert_eq!(host.cure("other-plugin-first"), "export NCCL_NET_PLUGIN=towline");
    host.is_cured("other-plugin-first");
    let host = Host::new().with("hpcx", other_plugin).variable_path("LD_LIBRARY_PATH", &["hpcx"]);
    host.is_cured("other-plugin-first");
    // NCCL_NET takes it from a list, whatever stands first.
    let host = Host::new().with("hpcx", other_plugin).variable_path("LD_LIBRARY_PATH", &["hpcx", "towline"]);
    let host = host.variable("NCCL_NET", "Towline").variable("NCCL_NET_PLUGIN", "libnccl-net.so,towline");
    host.is_cured_by("choice-opens-other", "");

    Host::new().is_cured("not-on-loader-path");
    let older = |file: &Path| patched(file, |bytes| bytes.push(0));
    Host::new().with("old", older).variable_path("LD_LIBRARY_PATH", &["old"]).is_cured("other-copy-first");

    for (value, release) in [("towline,ofi", "2.26.2"), ("libnccl-net-towline.so", "2.18.3")] {
        let host = found();
        let text = format!("const char text[] = \"NCCL version {release}+cuda12.4\"; const char* use = text;");
        library(&host.path("towline/libnccl.so.2"), &text, &[]);
        host.variable("NCCL_NET_PLUGIN", value).is_cured("choice-needs-newer-nccl");
    }
}

#[test]
fn a_choice_of_network_that_leads_elsewhere() {
    let found = || Host::new().variable_path("LD_LIBRARY_PATH", &["towline"]);
    for net in ["IB", "Socket", "Towline ", "\"Towline\""] {
        found().variable("NCCL_NET", net).is_cured("net-is-other");
    }
    found().with_conf("NCCL_NET=IB\n").is_cured("net-is-other");
    found().variable("NCCL_NET", "towline").is_cured("net-case");
}

/// NCCL trims nothing, and the dynamic loader has read its variables before NCCL reads its files.
#[test]
fn a_configuration_that_is_not_read_as_meant() {
    let found = || Host::new().variable_path("LD_LIBRARY_PATH", &["towline"]);
    found().with_conf("# a comment = kept\nNCCL_NET = Towline\nTOWLINE_RAILS = all\n").is_cured("conf-blanks");
    found().with_conf("NCCL_DEBUG=WARN\r\n").is_cured("conf-blanks");
    let host = Host::new();
    let conf = format!("LD_LIBRARY_PATH={}\n", host.text("towline"));
    let host = host.with_conf(&conf);
    // It does not count: NCCL finds nothing.
    assert!(host.findings("").iter().any(|finding| finding["cause"] == "not-on-loader-path"));
    host.is_cured("conf-loader-variable");
    found().variable("NCCL_SOCKET_FAMILY", "AF_INET ").is_cured("value-blanks");
    found().variable("TOWLINE_STREAM", "2").is_cured("setting-unknown");
    found().with_conf("TOWLINE_STREAM=2\n").is_cured("setting-unknown");
    found().variable("TOWLINE_RECOVERY", "maybe").is_cured("setting-invalid");
    let host = found().variable("TOWLINE_KEY_FILE", "/gone");
    assert!(host.cure("key-unusable").contains("TOWLINE_KEY_FILE"));
    host.is_cured_by("key-unusable", "unset TOWLINE_KEY_FILE");
}

#[test]
fn an_interface_that_cannot_be_used() {
    if !netns::available() {
        return;
    }
    let (left, right) = two_hosts(2);
    let asks = |names: &str| Host::inside(&left).variable("NCCL_SOCKET_IFNAME", names);
    for names in ["rail7", "Rail0", "==rail0", "rail0;rail1", "10.77.0.1"] {
        asks(names).is_cured("interface-missing");
    }
    asks("\"rail0\"").is_cured("interface-missing");
    asks("eth").is_cured("interface-missing");
    for names in ["rail0 ", " rail0", "rail0, rail1"] {
        asks(names).is_cured("value-blanks");
    }
    Host::inside(&left).with_conf("NCCL_SOCKET_IFNAME=eth7\n").is_cured("interface-missing");
    asks("^docker0").is_cured("loopback-chosen");
    asks("lo").is_cured("loopback-only");
    let host = asks("rail0").variable("TOWLINE_RAILS", "rail0,rail9");
    assert!(host.cure("rail-missing").contains("take it out of TOWLINE_RAILS"));
    host.is_cured_by("rail-missing", "export TOWLINE_RAILS=rail0");

    left.ip("link set rail1 down");
    asks("rail1").is_cured_soon("interface-down");
    left.wait_for("rail1");
    left.ip("link set rail1 down");
    asks("rail").variable("TOWLINE_RAILS", "rail0,rail1").is_cured_soon("rail-down");
    left.wait_for("rail1");

    right.ip("link set rail1 down");
    left.wait_for_no("rail1");
    assert!(asks("rail1").cure("interface-no-carrier").contains("the cable of rail1"));
    right.ip("link set rail1 up");
    left.wait_for("rail1");
    asks("rail1").is_cured_by("interface-no-carrier", "");

    left.ip("address flush dev rail1");
    let cure = asks("rail1").cure("interface-no-address");
    asks("rail1").is_cured_by("interface-no-address", &cure.replace("ADDRESS/PREFIX", "10.77.1.1/24"));
    left.ip("-6 address flush dev rail0");
    asks("rail0").variable("NCCL_SOCKET_FAMILY", "AF_INET6").is_cured("interface-wrong-family");

    for rail in 0..2 {
        left.ip(&format!("-4 address flush dev rail{rail}"));
        left.ip(&format!("address add 10.78.{rail}.1/16 dev rail{rail}"));
    }
    asks("rail").is_cured("interface-strays");

    left.ip("link set lo down");
    left.ip("link set rail0 down");
    left.ip("link set rail1 down");
    Host::inside(&left).is_cured_soon("no-interface");
}

#[test]
fn limits_that_are_tight() {
    if !netns::available() {
        return;
    }
    let (left, _right) = two_hosts(1);
    Host::inside(&left).before("ulimit -S -n 1024").is_cured("few-descriptors");
    let host = Host::inside(&left);
    if host.findings("").iter().any(|finding| finding["cause"] == "speed-unknown") {
        host.is_cured_by("speed-unknown", &host.cure("speed-unknown").replace("MBITS, if you know it", "10000"));
    }
    left.set("net/ipv4/tcp_wmem", "'4096 16384 65536'");
    Host::inside(&left).is_cured("small-tcp-buffer");
}

/// Whether every cause of `src/cli/doctor/finding.rs` is in a case above, or, where no test can make the host sick (a
/// card, a kernel module), in a unit test beside its check.
#[test]
fn every_cause_has_a_case() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = root.join("src/cli/doctor");
    let finding = fs::read_to_string(sources.join("finding.rs")).expect("a file");
    let causes = finding.split_once("enum Cause {").expect("the list").1.split_once('}').expect("its end").0;
    let causes: Vec<&str> =
        causes.lines().map(|line| line.trim().trim_end_matches(',')).filter(|it| !it.is_empty()).collect();
    assert!(causes.len() > 30, "{causes:?}");
    let cases = fs::read_to_string(root.join("tests/cli/doctor.rs")).expect("a file");
    let unit: String = fs::read_dir(sources)
        .expect("a directory")
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok())
        .filter_map(|text| text.split_once("mod tests {").map(|(_, tests)| tests.to_owned()))
        .collect();
    let without: Vec<_> = causes
        .into_iter()
        .filter(|cause| !cases.contains(&format!("\"{}\"", kebab(cause))) && !unit.contains(&format!("Cause::{cause}")))
        .collect();
    assert!(without.is_empty(), "no test shows these causes: {without:?}");
}

/// The name in JSON.
fn kebab(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push('-');
        }
        out.extend(c.to_lowercase());
    }
    out
}
