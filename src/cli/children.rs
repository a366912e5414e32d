//! The program's child processes: itself again, with a hidden subcommand and a socket to talk through.
//!
//! Guarantees: a child dies with its parent, however the parent ends. A parent that drops a [`Child`] leaves no process
//! behind. Text that a child's plugin prints to standard output goes to standard error, so that tables stay clean.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::os::error::{Error, Result};

use super::channel::Channel;

/// A running child. Dropping it kills and reaps it.
pub(crate) struct Child(std::process::Child);

impl Child {
    /// Starts this program with `subcommand`. The child finds the other end of the channel in place of its standard
    /// input, see [`channel_to_parent`].
    /// A `wrapper` is a command that runs the one behind it in its own place, as `taskset` or `ip netns exec` do.
    pub(crate) fn start(subcommand: &str, name: &str, wrapper: Option<&str>) -> Result<(Self, Channel)> {
        let behind = wrapper.filter(|wrapper| !wrapper.trim().is_empty());
        let what = behind.map_or(name.to_owned(), |wrapper| format!("{name} behind `{wrapper}`"));
        let starting = |error: io::Error| Error::system(format!("starting {what}"), &error);
        let (ours, theirs) = UnixStream::pair().map_err(starting)?;
        let stderr = io::stderr().as_fd().try_clone_to_owned().map_err(starting)?;
        let program = std::env::current_exe().map_err(starting)?;
        let mut words = wrapper.unwrap_or_default().split_whitespace();
        let mut command = match words.next() {
            Some(wrapper) => Command::new(wrapper),
            None => Command::new(&program),
        };
        if behind.is_some() {
            command.args(words).arg(&program);
        }
        let child = command
            .arg(subcommand)
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::from(stderr))
            .spawn()
            .map_err(starting)?;
        Ok((Self(child), Channel::unix(ours, name)))
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// How it ended, if it has.
    pub(crate) fn ending(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    /// How it ended, if it does within `patience`.
    pub(crate) fn ending_within(&mut self, patience: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            let ending = self.ending();
            if ending.is_some() || start.elapsed() >= patience {
                return ending;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> Option<ExitStatus> {
        self.0.wait().ok()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A description of how a process ended.
pub(crate) fn describe(ending: ExitStatus) -> String {
    match (ending.code(), ending.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(libc::SIGKILL)) => "was killed (SIGKILL)".to_owned(),
        (None, Some(libc::SIGSEGV)) => "crashed (SIGSEGV)".to_owned(),
        (None, Some(libc::SIGABRT)) => "aborted (SIGABRT)".to_owned(),
        (None, Some(libc::SIGPIPE)) => "was ended by SIGPIPE, which the plugin did not prevent".to_owned(),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// The first call of a child. It makes the child die with its parent. It also makes SIGPIPE kill the child, as it kills
/// the programs that use NCCL (Rust programs ignore SIGPIPE, which would hide a plugin that raises it). Returns the
/// channel to the parent.
pub(crate) fn channel_to_parent() -> Result<Channel> {
    // SAFETY: neither call touches memory, and no handler is replaced but the default.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
    let stdin =
        io::stdin().as_fd().try_clone_to_owned().map_err(|error| Error::system("taking the channel", &error))?;
    let channel = Channel::unix(UnixStream::from(stdin), "the parent process");
    // The parent may have ended before the call above.
    if channel.is_closed() {
        return Err(Error::usage("this subcommand is started by towline itself"));
    }
    Ok(channel)
}
