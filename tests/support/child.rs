//! Tests that need a process of their own, or two.
//!
//! A test program starts itself again with the name of one test, so that environment variables, forks, signals and
//! counts of descriptors concern that test alone, under `cargo test` as well as under nextest.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Which part of a test the process plays.
const ROLE: &str = "TEST_ROLE";

/// The part that this process plays; none in the process that the test runner started.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A command that runs the test `name` of this program in `role`.
pub fn command(name: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    adorn(&mut command, name, role);
    command
}

/// Adds to a command (a wrapper such as `ip netns exec` before this program) what makes it run the test `name`.
pub fn adorn(command: &mut Command, name: &str, role: &str) {
    assert!(is_test(name), "no test is called {name}");
    command.args(["--exact", name, "--include-ignored", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    // The runner's own variables would change what the child prints.
    command.env_remove("RUST_TEST_THREADS").env_remove("NEXTEST");
}

/// Whether this program has a test of this name. A process that finds none passes.
fn is_test(name: &str) -> bool {
    static ALL: LazyLock<String> = LazyLock::new(|| {
        let program = std::env::current_exe().expect("a path");
        let listed = Command::new(program).arg("--list").output().expect("the test program starts again");
        String::from_utf8(listed.stdout).expect("text")
    });
    ALL.lines().any(|line| line.strip_suffix(": test") == Some(name))
}

/// Runs the test `name` in a process of its own with these variables, by calling `body` there.
pub fn alone(name: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if role().as_deref() == Some("alone") {
        return body();
    }
    let mut command = command(name, "alone");
    command.envs(variables.iter().copied());
    run(&mut command, name);
}

/// Runs a command that [`adorn`] prepared, and passes its failure on.
pub fn run(command: &mut Command, name: &str) {
    let output = command.stdin(Stdio::null()).output().expect("the test program starts again");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{name} failed in its own process ({}):\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("1 passed"), "no test is called {name}:\n{text}");
    // What it measured.
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
}

/// Forks; the child runs `body` and leaves with its answer.
pub fn fork(body: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child runs `body`, which only calls into the library and the kernel, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            let status = i32::from(!body());
            // SAFETY: leaves at once.
            unsafe { libc::_exit(status) }
        }
        child => {
            assert!(child > 0);
            child
        }
    }
}

/// How a forked child ended.
pub fn end_of(child: i32) -> (bool, i32) {
    let mut status = 0;
    // SAFETY: the status outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    (libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, status)
}

/// A child that is killed when the test ends otherwise.
pub struct Guarded(pub Child);

impl Guarded {
    /// Starts a command, its output going where the test's goes.
    pub fn start(mut command: Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("the test program starts again"))
    }

    /// Its process id.
    pub fn id(&self) -> i32 {
        i32::try_from(self.0.id()).expect("a process id")
    }

    /// Waits for it and says whether it passed.
    pub fn passed_within(&mut self, patience: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < patience {
            if let Some(status) = self.0.try_wait().expect("the child is ours") {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }

    /// Waits until it has passed; what it wrote to its standard error, which must be a pipe.
    pub fn said_within(mut self, patience: Duration) -> String {
        let passed = self.passed_within(patience);
        let mut said = String::new();
        let mut stderr = self.0.stderr.take().expect("it is piped");
        std::io::Read::read_to_string(&mut stderr, &mut said).expect("text");
        assert!(passed, "{said}");
        said
    }

    /// Kills it without any farewell.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A directory through which the processes of a test pass small messages.
pub struct Mailbox(tempfile::TempDir);

impl Mailbox {
    /// An empty one.
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory for temporary files"))
    }

    /// Its path, for [`send`] and [`receive`] in the child.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// The variable under which a child finds its mailbox.
pub const MAILBOX: &str = "TEST_MAILBOX";

/// The mailbox that the parent gave to this child.
pub fn mailbox() -> PathBuf {
    std::env::var_os(MAILBOX).expect("the parent gave a mailbox").into()
}

/// Leaves a message.
pub fn send(mailbox: &Path, name: &str, bytes: &[u8]) {
    let draft = mailbox.join(format!(".{name}"));
    std::fs::write(&draft, bytes).expect("the mailbox can be written");
    std::fs::rename(&draft, mailbox.join(name)).expect("the mailbox can be written");
}

/// Waits for a message.
pub fn receive(mailbox: &Path, name: &str) -> Vec<u8> {
    super::eventually(&format!("the message {name}"), super::PATIENCE, || std::fs::read(mailbox.join(name)).ok())
}
