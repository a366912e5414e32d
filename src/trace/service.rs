//! Answers questions while the job runs, on one thread: the control socket, the metrics' HTTP endpoint and the status
//! over TCP.
//!
//! The control socket takes one word per connection, `status`, `summary`, `metrics` or `flush`, and answers with text:
//! `echo summary | nc -U towline-host-pid.sock`. Each client has a thread of its own and a limited time
//! ([`super::metrics::server`]).

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::claim::first_free;
use super::live::{KEPT, place};
use super::metrics::server;
use super::process::Request;
use super::remote;
use super::say::{Level, say};
use super::settings::Remote;
use crate::os::error::Error;
use crate::os::fd::Registered;
use crate::os::key_file::SharedKey;

/// How long a client of the control socket may take to send its word.
const CLIENT: Duration = Duration::from_secs(1);

/// How long the writer may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Processes that have the same host name and number.
const SOCKETS: u32 = 64;

/// The control socket that this process made: its path, and device and inode, since another process may put its own
/// there.
static MADE: Mutex<Option<(PathBuf, (u64, u64))>> = Mutex::new(None);

/// Removes the control socket at the end of the process, when no thread answers it any more.
pub(super) fn leave() {
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
    requests: Sender<Request>,
}

impl Service {
    /// Opens the configured sockets. The second part names those that cannot be opened; the others work.
    pub(super) fn open(
        control: Option<PathBuf>,
        (listen, remote, local_rank): (Option<SocketAddr>, Option<&Remote>, Option<u16>),
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
        let any = control.is_some() || http.is_some() || remote.is_some();
        (any.then_some(Self { control, http, remote, requests }), complaints)
    }

    /// Serves for as long as the process lives.
    pub(super) fn run(mut self) {
        let unix = self.control.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let tcp = self.http.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let remote = self.remote.take().map(|(listener, key)| (listener, handle_with_key(key, self.requests.clone())));
        let keyed = remote.as_ref().map_or(-1, |(listener, _)| listener.as_raw_fd());
        let (http_clients, keyed_clients) = (server::Clients::of_http(), server::Clients::new(b""));
        let control_clients = server::Clients::new(b"too many clients\n");
        let requests = self.requests.clone();
        let answer: server::Answer = Arc::new(move |path| match path {
            "/metrics" | "/" => Some(answer(&requests, "metrics")),
            "/summary" => Some(answer(&requests, "summary")),
            _ => None,
        });
        let http: server::Handle<TcpStream> = Arc::new(move |client| drop(server::talk(client, &answer)));
        let requests = self.requests.clone();
        let control: server::Handle<UnixStream> =
            Arc::new(move |client| drop(talk(client, |word| self::answer(&requests, word))));
        loop {
            let wait = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut polled = [wait(unix), wait(tcp), wait(keyed)];
            // SAFETY: the array is valid for its length; negative descriptors are skipped by poll.
            let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, -1) };
            if ready < 0 {
                std::thread::sleep(CLIENT);
                continue;
            }
            if let Some(listener) = self.control.as_ref().filter(|_| polled[0].revents != 0) {
                server::serve(|| listener.accept().map(|(client, _)| client), &control_clients, &control);
            }
            if let Some(listener) = self.http.as_ref().filter(|_| polled[1].revents != 0) {
                server::serve(|| listener.accept().map(|(client, _)| client), &http_clients, &http);
            }
            if let Some((listener, handle)) = remote.as_ref().filter(|_| polled[2].revents != 0) {
                server::serve(|| listener.accept().map(|(client, _)| client), &keyed_clients, handle);
            }
        }
    }
}

/// The writer's answer, if it comes in time.
pub(super) fn ask<T>(requests: &Sender<Request>, request: impl FnOnce(Sender<T>) -> Request) -> Option<T> {
    let (reply, wait) = mpsc::channel();
    requests.send(request(reply)).ok()?;
    wait.recv_timeout(ANSWER).ok()
}

/// Answers one word of a client of the control socket.
fn talk(client: &UnixStream, answer: impl FnOnce(&str) -> String) -> std::io::Result<()> {
    let mut client = server::Limited::new(client, CLIENT);
    let word = server::read_until(&mut client, b"\n")?;
    client.extend();
    client.write_all(answer(word.trim()).as_bytes())
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
        _ => return "send status, summary, metrics or flush\n".into(),
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
fn handle_with_key(key: SharedKey, requests: Sender<Request>) -> server::Handle<TcpStream> {
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

/// Binds the control socket for this user alone, in place of one that a dead process left, and beside one that a living
/// process of the same name has.
fn bind(path: &Path) -> std::io::Result<UnixListener> {
    let (listener, ..) = first_free(path, SOCKETS, std::io::ErrorKind::AddrInUse, bind_at)?;
    Ok(listener)
}

fn bind_at(path: &Path) -> std::io::Result<UnixListener> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir)?;
    }
    let (_dir, name) = place::short_name(path)?;
    if UnixStream::connect(&name).is_err() {
        let _ = std::fs::remove_file(path);
    }
    let listener = UnixListener::bind(&name)?;
    *MADE.lock().unwrap_or_else(PoisonError::into_inner) = identity(path).map(|file| (path.to_owned(), file));
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Instant;

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

    #[test]
    fn a_client_that_trickles_keeps_no_other_one_waiting_and_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("towline-host-8.sock");
        let control = Some(Registered::open(|| bind(&path)).unwrap());
        let (requests, inbox) = mpsc::channel();
        let service = Service { control, http: None, remote: None, requests };
        std::thread::spawn(move || service.run());
        std::thread::spawn(move || {
            for request in inbox {
                if let Request::Summary(reply) = request {
                    let _ = reply.send("tables\n".into());
                }
            }
        });
        let mut slow = UnixStream::connect(&path).unwrap();
        let trickling = std::thread::spawn(move || {
            let began = Instant::now();
            while slow.write_all(b"s").is_ok() {
                std::thread::sleep(CLIENT / 5);
            }
            began.elapsed()
        });
        std::thread::sleep(CLIENT / 5);
        let began = Instant::now();
        let mut text = String::new();
        let mut quick = UnixStream::connect(&path).unwrap();
        quick.write_all(b"summary\n").unwrap();
        quick.read_to_string(&mut text).unwrap();
        assert_eq!(text, "tables\n");
        assert!(began.elapsed() < CLIENT / 2, "{:?}", began.elapsed());
        let trickled = trickling.join().unwrap();
        assert!(trickled < 10 * CLIENT, "{trickled:?}");
    }
}
