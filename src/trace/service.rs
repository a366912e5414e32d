//! Asked while the job runs: the control socket, the metrics' HTTP endpoint and the status over TCP, on a thread of their own.
//!
//! The control socket takes one word per connection, `status`, `summary`, `metrics` or `flush`, and answers with text:
//! `echo summary | nc -U towline-host-pid.sock`. The same thread renews the process's state file each second, so that a
//! file system that does not answer delays only what is read from the file. The control socket serves one client after the other,
//! with short time limits; clients over TCP have threads of their own ([`super::metrics::server`]).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::claim::{claim, first_free, is_older};
use super::live::{KEPT, KEPT_IN_FILE, place};
use super::metrics::{self, server};
use super::process::Request;
use super::remote;
use super::say::{Level, host, say};
use super::settings::Remote;
use crate::os::error::Error;
use crate::os::fd::Registered;
use crate::os::key_file::SharedKey;

/// How long a client may take to say what it wants.
const CLIENT: Duration = Duration::from_millis(500);

/// How long the writer may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// How often the state file is renewed.
const BEAT: Duration = Duration::from_secs(1);

/// Files have room for multiples of so many bytes.
const BLOCK: usize = 4096;

/// Longest name of a socket that the kernel takes (`sun_path`, with its terminating zero).
const LONGEST_NAME: usize = 107;

/// Longest request that is read.
const LONGEST: usize = 4096;

/// Processes that have the same host name and number.
const SOCKETS: u32 = 64;

/// The control socket that this process made: its path, and device and inode, since another process may put its own there.
static MADE: Mutex<Option<(PathBuf, (u64, u64))>> = Mutex::new(None);

/// The state file that this process keeps, once it is there, with the process's number, since a forked child has its
/// parent's here; locked while it is written.
static STATE: Mutex<Option<(u32, PathBuf)>> = Mutex::new(None);

/// The process ends: its state stays as it is.
static LEFT: AtomicBool = AtomicBool::new(false);

/// Removes the control socket at the end of the process: no thread answers there any more. The state file gets its last words,
/// or goes too when there are none.
pub(super) fn leave(last_words: Option<String>) {
    LEFT.store(true, Ordering::Release);
    // A file system that does not answer must not keep the process.
    let mut tries = 0..50;
    let mut state = loop {
        match STATE.try_lock() {
            Ok(state) => break Some(state),
            Err(TryLockError::Poisoned(state)) => break Some(state.into_inner()),
            Err(TryLockError::WouldBlock) if tries.next().is_some() => std::thread::sleep(Duration::from_millis(20)),
            Err(TryLockError::WouldBlock) => break None,
        }
    };
    if let Some((owner, path)) = state.as_mut().and_then(|state| state.take())
        && owner == std::process::id()
    {
        let _ = match last_words {
            Some(text) => metrics::replace(&path, &text),
            None => std::fs::remove_file(path),
        };
    }
    let made = MADE.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some((path, file)) = made
        && identity(&path).is_some_and(|found| found == file)
    {
        let _ = std::fs::remove_file(path);
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// The sockets that are served.
pub(super) struct Service {
    control: Option<Registered<UnixListener>>,
    http: Option<Registered<TcpListener>>,
    remote: Option<(Registered<TcpListener>, SharedKey)>,
    state: Option<PathBuf>,
    requests: Sender<Request>,
}

impl Service {
    /// Opens what is asked for. What cannot be opened is said in the second part, the rest works.
    pub(super) fn open(
        control: Option<PathBuf>,
        (listen, remote, local_rank): (Option<SocketAddr>, Option<&Remote>, Option<u16>),
        state: Option<PathBuf>,
        requests: Sender<Request>,
    ) -> (Option<Self>, Vec<String>) {
        let mut complaints = Vec::new();
        let control = control.and_then(|path| match Registered::open(|| bind(&path)) {
            Ok(listener) => Some(listener),
            Err(error) => {
                complaints.push(format!("no control socket at {}: {error}", path.display()));
                None
            }
        });
        let http = listen.and_then(|address| match server::bind(address, local_rank) {
            Ok(listener) => {
                if let Ok(address) = listener.local_addr() {
                    say(Level::Info, &format!("Towline's metrics are at http://{address}/metrics"));
                }
                Some(listener)
            }
            Err(error) => {
                complaints.push(format!("no metrics at http://{address}/metrics: {error}"));
                None
            }
        });
        let remote = remote.and_then(|remote| match listen_with_key(remote, local_rank) {
            Ok((listener, key)) => {
                if let Ok(address) = listener.local_addr() {
                    say(Level::Info, &format!("holders of the key get the status at {address} (towline why --host)"));
                }
                Some((listener, key))
            }
            Err(error) => {
                complaints.push(format!("no status at {}: {error}", remote.address));
                None
            }
        });
        let any = control.is_some() || http.is_some() || remote.is_some() || state.is_some();
        (any.then_some(Self { control, http, remote, state, requests }), complaints)
    }

    /// Serves for as long as the process lives.
    pub(super) fn run(mut self) {
        let unix = self.control.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let tcp = self.http.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let remote = self.remote.take().map(|(listener, key)| (listener, handle_with_key(key, self.requests.clone())));
        let keyed = remote.as_ref().map_or(-1, |(listener, _)| listener.as_raw_fd());
        let (http_clients, keyed_clients) = (server::Clients::of_http(), server::Clients::new(b""));
        if let Some(dir) = self.state.as_deref().and_then(Path::parent) {
            place::sweep(dir, &format!("{}-", host()), place::ENDING);
        }
        let requests = self.requests.clone();
        let answer: server::Answer = Arc::new(move |path| match path {
            "/metrics" | "/" => Some(answer(&requests, "metrics")),
            "/summary" => Some(answer(&requests, "summary")),
            _ => None,
        });
        let http: server::Handle = Arc::new(move |client| drop(server::talk(client, &answer)));
        let mut due = Instant::now();
        loop {
            let patience = if self.state.is_some() {
                let left = due.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    due = Instant::now() + BEAT;
                    self.renew();
                    continue;
                }
                // A started millisecond is waited for.
                left.as_millis() as i32 + 1
            } else {
                -1
            };
            let wait = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut polled = [wait(unix), wait(tcp), wait(keyed)];
            // SAFETY: the array is valid for its length; negative descriptors are skipped by poll.
            let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, patience) };
            if ready < 0 {
                std::thread::sleep(CLIENT);
                continue;
            }
            if let Some(listener) = self.control.as_ref().filter(|_| polled[0].revents != 0)
                && let Ok((mut stream, _)) = listener.accept()
            {
                let _ = stream.set_read_timeout(Some(CLIENT));
                let _ = stream.set_write_timeout(Some(CLIENT));
                let word = read_until(&mut stream, |text| text.contains('\n'));
                let text = self::answer(&self.requests, word.trim());
                let _ = stream.write_all(text.as_bytes());
            }
            if let Some(listener) = self.http.as_ref().filter(|_| polled[1].revents != 0) {
                server::serve(listener, &http_clients, &http);
            }
            if let Some((listener, handle)) = remote.as_ref().filter(|_| polled[2].revents != 0) {
                server::serve(listener, &keyed_clients, handle);
            }
        }
    }

    /// Renews the state file, or removes it while there is nothing to say.
    fn renew(&self) {
        let Some(path) = &self.state else { return };
        // Held by another when the process ends, and for ever in a child that was forked while its parent wrote.
        let Ok(mut kept) = STATE.try_lock() else { return };
        if LEFT.load(Ordering::Acquire) {
            return;
        }
        match ask(&self.requests, |reply| Request::Status(KEPT_IN_FILE, reply)) {
            // The profiler is busy: without a new state the old one shows no heartbeat.
            None => {}
            Some(None) => drop(kept.take().map(|(_, path)| std::fs::remove_file(path))),
            Some(Some(text)) => {
                let ours =
                    kept.as_ref().filter(|(owner, _)| *owner == std::process::id()).map(|(_, path)| path.clone());
                let path = ours.unwrap_or_else(|| claim(path, |path| is_older(path, 10 * BEAT)).0);
                let text = with_room(text);
                let written = metrics::replace(&path, &text).or_else(|_| metrics::overwrite(&path, &text));
                let is_written = written.is_ok();
                if is_written {
                    *kept = Some((std::process::id(), path));
                }
            }
        }
    }
}

/// Blanks at the end, so that the file has room for a longer state when the disk is full.
fn with_room(mut text: String) -> String {
    let length = (text.len() + text.len() / 4).next_multiple_of(BLOCK);
    text.extend(std::iter::repeat_n(' ', length - text.len()));
    text
}

/// The writer's answer, if it comes in time.
fn ask<T>(requests: &Sender<Request>, request: impl FnOnce(Sender<T>) -> Request) -> Option<T> {
    let (reply, wait) = mpsc::channel();
    requests.send(request(reply)).ok()?;
    wait.recv_timeout(ANSWER).ok()
}

fn answer(requests: &Sender<Request>, word: &str) -> String {
    let answer = match word {
        "status" => {
            let answer = ask(requests, |reply| Request::Status(KEPT, reply));
            return answer.flatten().unwrap_or_else(|| "{}\n".into());
        }
        "summary" => ask(requests, Request::Summary),
        "metrics" => ask(requests, Request::Metrics),
        "flush" => ask(requests, Request::Flush),
        _ => return "say status, summary, metrics or flush\n".into(),
    };
    answer.unwrap_or_else(|| "the profiler is busy\n".into())
}

fn listen_with_key(
    remote: &Remote,
    local_rank: Option<u16>,
) -> crate::os::error::Result<(Registered<TcpListener>, SharedKey)> {
    let key = remote::load_key(&remote.key)?;
    let bound = server::bind(remote.address, local_rank).or_else(|error| {
        // A kernel without IPv6.
        let any = remote.address.ip().is_unspecified() && remote.address.is_ipv6();
        if any { server::bind(([0, 0, 0, 0], remote.address.port()).into(), local_rank) } else { Err(error) }
    });
    Ok((bound.map_err(|error| Error::system("listening", &error))?, key))
}

/// Gives the status to a client that has the key.
fn handle_with_key(key: SharedKey, requests: Sender<Request>) -> server::Handle {
    // Threads share it.
    let requests = Mutex::new(requests);
    Arc::new(move |client| {
        let requests = requests.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let _ = remote::serve(client, &key, || answer(&requests, "status"));
    })
}

/// Where this process's control socket is, if it has one.
pub(super) fn control() -> Option<PathBuf> {
    MADE.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(path, _)| path.clone())
}

/// Binds the control socket for this user alone, in place of one that a dead process left, and beside one that a living process of
/// the same name has.
fn bind(path: &Path) -> std::io::Result<UnixListener> {
    let (listener, ..) = first_free(path, SOCKETS, std::io::ErrorKind::AddrInUse, bind_at)?;
    Ok(listener)
}

fn bind_at(path: &Path) -> std::io::Result<UnixListener> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir)?;
    }
    // The kernel takes 107 bytes of a name; a longer one is reached through its directory's descriptor.
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let opened = (path.as_os_str().len() > LONGEST_NAME).then(|| std::fs::File::open(dir)).transpose()?;
    let name = match (&opened, path.file_name()) {
        (Some(dir), Some(file)) => PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(file),
        _ => path.to_owned(),
    };
    if std::os::unix::net::UnixStream::connect(&name).is_err() {
        let _ = std::fs::remove_file(path);
    }
    let listener = UnixListener::bind(&name)?;
    *MADE.lock().unwrap_or_else(PoisonError::into_inner) = identity(path).map(|file| (path.to_owned(), file));
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn read_until(stream: &mut impl Read, done: impl Fn(&str) -> bool) -> String {
    let mut text = String::new();
    let mut bytes = [0; 512];
    while text.len() < LONGEST && !done(&text) {
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(count) => text.push_str(&String::from_utf8_lossy(&bytes[..count])),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_control_socket_may_lie_in_a_long_directory() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("d".repeat(120));
        let path = long.join("towline-host-7.sock");
        // A dead process's socket is replaced, at the short name and at the long one.
        for _ in 0..2 {
            let listener = bind(&path).unwrap();
            let long = long.clone();
            let client = std::thread::spawn(move || {
                let dir = std::fs::File::open(long).unwrap();
                UnixStream::connect(format!("/proc/self/fd/{}/towline-host-7.sock", dir.as_raw_fd())).unwrap()
            });
            drop(listener.accept().unwrap());
            drop(client.join().unwrap());
        }
    }
}
