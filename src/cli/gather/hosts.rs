//! The states of processes on other hosts, asked for over TCP with the job's key (`TOWLINE_STATUS_LISTEN`).

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::os::key_file::SharedKey;
use crate::trace::clock;
use crate::trace::live::{LONGEST, State};
use crate::trace::remote;

use super::{Found, Process};

/// How long a process may take to be reached.
const REACH: Duration = Duration::from_secs(3);

/// How long it may then take to answer: longer than its profiler may.
const ANSWER: Duration = Duration::from_secs(6);

/// Ports of a host that are asked: as many processes may have one.
const PORTS: u16 = 64;

/// After so many ports in a row without an answer a host has no more processes. More than one, since some may have ended.
const GAP: u16 = 8;

/// Hosts that are asked at once.
const AT_ONCE: usize = 32;

/// Asks all processes of these hosts, each `HOST` or `HOST:PORT`.
///
/// # Errors
/// When there is no key, or no port is known.
pub(super) fn ask(hosts: &[String]) -> Result<Found> {
    let config = Config::from_env().0;
    let Some(file) = &config.key_file else {
        return Err(Error::usage("processes of other hosts give their status to holders of the job's key only")
            .with_hint("set TOWLINE_KEY_FILE to the job's key file, or share a directory (TOWLINE_STATE_DIR)"));
    };
    let key = remote::load_key(Path::new(&file.0))?;
    let key = &key;
    let usual = config.status_listen.as_deref().and_then(port_of);
    let places: Vec<(&str, u16)> = hosts.iter().map(|text| parse(text, usual)).collect::<Result<_>>()?;
    let mut found = Found::default();
    for group in places.chunks(AT_ONCE) {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let asked: Vec<_> =
                group.iter().map(|&(host, port)| scope.spawn(move || host_at(host, port, key))).collect();
            asked.into_iter().map(|thread| thread.join().expect("asking does not panic")).collect()
        });
        for (processes, note) in answers {
            found.processes.extend(processes);
            found.notes.extend(note);
        }
    }
    // A host may be given by several of its names. Processes in containers may have the same number.
    let mut seen = BTreeSet::new();
    found.processes.retain(|Process { state, .. }| {
        let ranks: Vec<_> = state.communicators.iter().map(|comm| (comm.info().id, comm.rank)).collect();
        seen.insert((state.boot, state.host.clone(), state.pid, ranks))
    });
    all_answered_at(&mut found.processes, clock::now());
    found.notes.extend(super::dropped(&found.processes));
    Ok(found)
}

/// All have answered, also those that did so while another was waited for: what each said counts as said now, or a call that had
/// just begun would look as old as the wait was long.
fn all_answered_at(processes: &mut [Process], now: u64) {
    for process in processes {
        process.shift += now.saturating_sub(process.heard) as i64;
        process.heard = now;
    }
}

/// The port in `port` or `address:port`.
fn port_of(text: &str) -> Option<u16> {
    text.parse().ok().or_else(|| text.parse().ok().map(|address: SocketAddr| address.port()))
}

/// `HOST`, `HOST:PORT`, `[IPv6]` or `[IPv6]:PORT`.
fn parse(text: &str, usual: Option<u16>) -> Result<(&str, u16)> {
    let bad = || Error::usage(format!("--host {text}: this is neither HOST nor HOST:PORT"));
    let (host, port) = match text.strip_prefix('[').map(|rest| rest.split_once(']').ok_or_else(bad)).transpose()? {
        Some((host, "")) => (host, None),
        Some((host, rest)) => (host, Some(rest.strip_prefix(':').ok_or_else(bad)?)),
        None => match text.split_once(':') {
            // An IPv6 address.
            Some((_, rest)) if rest.contains(':') => (text, None),
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = port.map(|port| port.parse().map_err(|_| bad())).transpose()?.or(usual).ok_or_else(|| {
        Error::usage(format!("--host {text}: at which port do the processes listen?"))
            .with_hint("write HOST:PORT, or set TOWLINE_STATUS_LISTEN as for the job")
    })?;
    if host.is_empty() || port == 0 { Err(bad()) } else { Ok((host, port)) }
}

/// The processes of a host, and what the user should know when there are none.
fn host_at(host: &str, first: u16, key: &SharedKey) -> (Vec<Process>, Option<String>) {
    let mut found = Vec::new();
    let mut reason = None;
    let mut without = 0;
    for port in first..=first.saturating_add(PORTS - 1) {
        match process_at(host, port, key) {
            Ok(process) => {
                found.push(process);
                without = 0;
            }
            Err(Failure { error, is_of_host }) => {
                reason.get_or_insert(format!("{host}:{port}: {error}"));
                without += 1;
                if is_of_host || without == GAP {
                    break;
                }
            }
        }
    }
    let note = reason.filter(|_| found.is_empty()).map(|reason| format!("no process gave its status at {reason}"));
    (found, note)
}

/// Why there is no answer from a port.
struct Failure {
    error: io::Error,
    /// Another port of the host would not be reached, either.
    is_of_host: bool,
}

fn process_at(host: &str, port: u16, key: &SharedKey) -> std::result::Result<Process, Failure> {
    let of_host = |error| Failure { error, is_of_host: true };
    let of_process = |error| Failure { error, is_of_host: false };
    let mut last = of_host(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    for address in (host, port).to_socket_addrs().map_err(of_host)? {
        match TcpStream::connect_timeout(&address, REACH) {
            Ok(stream) => return ask_process(&stream, key).map_err(of_process),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => last = of_process(error),
            Err(error) => last = of_host(error),
        }
    }
    Err(last)
}

fn ask_process(stream: &TcpStream, key: &SharedKey) -> io::Result<Process> {
    let bytes = remote::ask(stream, key, ANSWER, LONGEST)?;
    let state = State::read(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let heard = clock::now();
    Ok(Process { shift: heard as i64 - state.now as i64, heard, state })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_first_is_no_older_than_what_was_said_last() {
        let second = 1_000_000_000;
        let said_at =
            |heard| Process { shift: heard as i64 - 500, heard, state: State { now: 500, ..State::default() } };
        let mut processes = [said_at(1_000 * second), said_at(1_006 * second)];
        all_answered_at(&mut processes, 1_006 * second);
        for process in &processes {
            assert!(process.is_alive(1_006 * second));
            assert_eq!(process.time(500), 1_006 * second, "a call that began when it answered");
        }
    }

    #[test]
    fn hosts_are_read_with_and_without_a_port() {
        let usual = Some(9500);
        for (text, expected) in [
            ("node1", ("node1", 9500)),
            ("node1:7000", ("node1", 7000)),
            ("10.0.0.1:7000", ("10.0.0.1", 7000)),
            ("fe80::1", ("fe80::1", 9500)),
            ("[fd00::1]", ("fd00::1", 9500)),
            ("[fd00::1]:7000", ("fd00::1", 7000)),
        ] {
            assert_eq!(parse(text, usual).unwrap(), expected, "{text}");
        }
        for text in ["", ":7000", "node1:", "node1:x", "node1:0", "node1:70000", "[fd00::1", "[fd00::1]7000"] {
            parse(text, usual).unwrap_err();
        }
        assert!(parse("node1", None).unwrap_err().to_string().contains("at which port"));
        assert_eq!(port_of("9500"), Some(9500));
        assert_eq!(port_of("10.0.0.1:9500"), Some(9500));
        assert_eq!(port_of("[::]:9500"), Some(9500));
    }
}
