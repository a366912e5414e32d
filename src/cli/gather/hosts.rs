//! The states of processes on other hosts, queried over TCP with the job's key (`TOWLINE_STATUS_LISTEN`).

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::os::config::Config;
use crate::os::error::{Error, Result};
use crate::os::key_file::SharedKey;
use crate::trace::clock;
use crate::trace::live::gather::{Process, at_once};
use crate::trace::live::{LONGEST, State};
use crate::trace::remote;

use super::Found;

/// How long a process may take to be reached.
const REACH: Duration = Duration::from_secs(3);

/// How long it may then take to answer: longer than its profiler may.
const ANSWER: Duration = Duration::from_secs(6);

/// Ports of a host that are queried: as many processes may have one.
const PORTS: u16 = 64;

/// A host has no more processes after this many ports in a row without an answer: more than one, since some may have
/// ended.
const GAP: u16 = 8;

/// How long all hosts together may take: one that cannot be reached, and then a stopped process, in each of two rounds.
const ALL: Duration = Duration::from_secs(18);

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
    let usual = config.status_listen.as_deref().and_then(port_of);
    let mut hosts: Vec<Host> = hosts.iter().map(|text| parse(text, usual).map(Host::new)).collect::<Result<_>>()?;
    ask_all(&mut hosts, key, Instant::now() + ALL);
    let mut found = Found { unanswered: unanswered(&hosts), ..Found::default() };
    for host in hosts {
        found.notes.extend(host.notes());
        found.processes.extend(host.found);
    }
    // A host may be given by several of its names. Of an older release, processes in containers may have the same
    // number.
    let mut seen = BTreeSet::new();
    found.processes.retain(|Process { state, .. }| {
        let comms = if state.stamp == 0 { &state.communicators[..] } else { &[] };
        let ranks: Vec<_> = comms.iter().map(|comm| (comm.info().id, comm.rank)).collect();
        seen.insert((state.process(), ranks))
    });
    all_answered_at(&mut found.processes, clock::now());
    found.notes.extend(super::dropped(&found.processes));
    Ok(found)
}

/// Asks the first port of each host, which shows whether the host can be reached, then several ports at once of each
/// reachable host.
fn ask_all(hosts: &mut [Host], key: SharedKey, deadline: Instant) {
    let key = Arc::new(key);
    let mut count = 1;
    while hosts.iter().any(|host| !host.done) {
        let ports = |(number, host): (usize, &Host)| {
            let asked = host.ports(count).map(|port| (number, host.name.clone(), port));
            asked.collect::<Vec<_>>()
        };
        let open = hosts.iter().enumerate().filter(|(_, host)| !host.done);
        let asked: Vec<(usize, String, u16)> = open.flat_map(ports).collect();
        let key = Arc::clone(&key);
        let answers = at_once::ask(asked.clone(), deadline, move |(_, name, port)| process_at(name, *port, &key));
        let mut answers = asked.into_iter().zip(answers).peekable();
        for (number, host) in hosts.iter_mut().enumerate().filter(|(_, host)| !host.done) {
            let own = std::iter::from_fn(|| answers.next_if(|((of, ..), _)| *of == number));
            host.take(own.map(|((.., port), answer)| (port, answer.unwrap_or(Err(Failure::NoTime)))).collect());
        }
        count = GAP;
    }
}

/// How many processes there are, or were, that do not answer: those whose ports are silent, and those whose ports are
/// closed below one of the same host that answers. None as long as the processes of some host are not known: they may
/// be healthy.
fn unanswered(hosts: &[Host]) -> usize {
    let is_sure = |(_, failure): &(u16, Failure)| matches!(failure, Failure::Silent | Failure::Refused);
    let is_known = |host: &Host| host.failures.iter().all(is_sure) && host.has_processes();
    if hosts.iter().all(is_known) { hosts.iter().map(|host| host.missing().count()).sum() } else { 0 }
}

/// Some processes answered while others were still awaited. Each answer counts as given now: otherwise a call that had
/// just begun would look as old as the wait.
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

/// A host whose processes are queried, port by port.
struct Host {
    name: String,
    first: u16,
    /// The number of ports that have been queried.
    asked: u16,
    found: Vec<Process>,
    failures: Vec<(u16, Failure)>,
    /// The highest port that answered.
    answered: Option<u16>,
    /// It has no further process.
    done: bool,
}

impl Host {
    fn new((name, first): (&str, u16)) -> Self {
        let (found, failures) = (Vec::new(), Vec::new());
        Self { name: name.into(), first, asked: 0, found, failures, answered: None, done: false }
    }

    /// The next `count` ports.
    fn ports(&self, count: u16) -> impl Iterator<Item = u16> + use<> {
        let (first, from) = (self.first, self.asked);
        (from..(from + count).min(PORTS)).map_while(move |more| first.checked_add(more))
    }

    /// What came from these ports.
    fn take(&mut self, answers: Vec<(u16, std::result::Result<Process, Failure>)>) {
        let (is_first, before) = (self.asked == 0, self.found.len());
        self.asked += answers.len() as u16;
        let mut is_lost = answers.is_empty();
        for (port, answer) in answers {
            match answer {
                Ok(process) => {
                    self.found.push(process);
                    self.answered = Some(port);
                }
                Err(failure) => {
                    is_lost |= matches!(failure, Failure::NoAddress(_) | Failure::Unreachable(_) | Failure::NoTime);
                    self.failures.push((port, failure));
                }
            }
        }
        // Some of a host's processes may have ended, but not as many as this.
        self.done = is_lost || (!is_first && self.found.len() == before);
    }

    /// Whether one of its ports is open.
    fn has_processes(&self) -> bool {
        self.answered.is_some() || self.failures.iter().any(|(_, failure)| matches!(failure, Failure::Silent))
    }

    /// The ports that gave no status, without the closed ones beyond the last process.
    fn missing(&self) -> impl Iterator<Item = &(u16, Failure)> {
        self.failures.iter().filter(|(port, failure)| {
            !matches!(failure, Failure::Refused) || self.answered.is_some_and(|last| *port < last)
        })
    }

    /// Notes for the user: each process that gave no status, or why there is none.
    fn notes(&self) -> Vec<String> {
        let told: Vec<_> = self.missing().collect();
        let (name, first) = (&self.name, self.first);
        if told.is_empty() && self.found.is_empty() {
            let last = first.saturating_add(self.asked.saturating_sub(1));
            return vec![format!(
                "{name}: nothing listens at the ports {first} to {last}: does the job run there, with a TOWLINE_STATUS_LISTEN \
                 of this port and TOWLINE_KEY_FILE?"
            )];
        }
        told.into_iter().map(|(port, failure)| format!("{name}:{port} {failure}")).collect()
    }
}

/// Why there is no status from a port.
#[derive(Debug)]
enum Failure {
    /// The host's name does not resolve.
    NoAddress(io::Error),
    /// No port of the host would be reached.
    Unreachable(io::Error),
    /// Nothing listens there.
    Refused,
    /// The time for all hosts was over.
    NoTime,
    /// The process rejected our key.
    OtherKey(io::Error),
    /// The process accepts connections and sends nothing.
    Silent,
    /// Its answer is no status.
    Unreadable(io::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAddress(error) => write!(text, "has no address ({error}): is the name right?"),
            Self::Unreachable(error) => write!(
                text,
                "cannot be reached ({error}): is the host up, and does a firewall let this port through from here?"
            ),
            Self::Refused => write!(text, "is not open: did the process that had it end?"),
            Self::NoTime => write!(text, "was not asked: {} s were over; name fewer hosts", ALL.as_secs()),
            Self::OtherKey(error) => write!(
                text,
                "gave nothing ({error}): does TOWLINE_KEY_FILE name the job's key file here, and is its Towline of this release?"
            ),
            Self::Silent => write!(
                text,
                "has not answered within {} s: its process may be stopped, or is no process of Towline's",
                ANSWER.as_secs()
            ),
            Self::Unreadable(error) => write!(text, "gave a status that cannot be read: {error}"),
        }
    }
}

fn process_at(host: &str, port: u16, key: &SharedKey) -> std::result::Result<Process, Failure> {
    let mut last = Failure::NoAddress(io::Error::new(io::ErrorKind::NotFound, "none is known"));
    for address in (host, port).to_socket_addrs().map_err(Failure::NoAddress)? {
        match TcpStream::connect_timeout(&address, REACH) {
            Ok(stream) => return ask_process(&stream, key),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => last = Failure::Refused,
            Err(error) => last = Failure::Unreachable(error),
        }
    }
    Err(last)
}

fn ask_process(stream: &TcpStream, key: &SharedKey) -> std::result::Result<Process, Failure> {
    let bytes = remote::ask(stream, key, ANSWER, LONGEST).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Failure::Silent,
        io::ErrorKind::InvalidData => Failure::Unreadable(error),
        _ => Failure::OtherKey(error),
    })?;
    let state = State::read(&bytes).map_err(Failure::Unreadable)?;
    let heard = clock::now();
    Ok(Process { shift: heard as i64 - state.now as i64, heard, state })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::os::key_file::Purpose;

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

    /// A host that accepts connections and keeps silent, as a stopped process does.
    fn silent(number: u8) -> Host {
        let name = format!("127.0.1.{number}");
        let listener = TcpListener::bind((name.as_str(), 0)).unwrap();
        let host = Host::new((&name, listener.local_addr().unwrap().port()));
        std::thread::spawn(move || listener.incoming().collect::<Vec<_>>());
        host
    }

    #[test]
    fn many_hosts_that_do_not_answer_take_the_time_of_a_few() {
        let key = SharedKey::from_content(&[1; 32], Purpose::Status);
        let mut hosts: Vec<Host> = (1..=60).map(silent).collect();
        let began = Instant::now();
        ask_all(&mut hosts, key, began + ALL);
        assert!(began.elapsed() < ALL + ANSWER, "{:?}", began.elapsed());
        for host in &hosts {
            let notes = host.notes();
            assert!(notes[0].contains("has not answered within 6 s"), "{notes:?}");
        }
    }

    #[test]
    fn each_reason_for_no_status_names_the_host_and_what_to_try() {
        let error = || io::Error::other("why");
        for (failure, expected) in [
            (Failure::NoAddress(error()), "node1:9500 has no address (why): is the name right?"),
            (Failure::Unreachable(error()), "is the host up"),
            (Failure::Refused, "node1: nothing listens at the ports 9500 to 9500: does the job run there"),
            (Failure::NoTime, "name fewer hosts"),
            (Failure::OtherKey(error()), "does TOWLINE_KEY_FILE name the job's key file here"),
            (Failure::Silent, "may be stopped"),
            (Failure::Unreadable(error()), "node1:9500 gave a status that cannot be read: why"),
        ] {
            let mut host = Host::new(("node1", 9500));
            host.take(vec![(9500, Err(failure))]);
            let notes = host.notes();
            assert!(notes.len() == 1 && notes[0].contains(expected), "{notes:?}");
        }
    }

    #[test]
    fn the_processes_of_a_host_are_found_beyond_a_gap_and_beyond_the_last_port_is_none() {
        let process = || Ok(Process { shift: 0, heard: 0, state: State::default() });
        let mut host = Host::new(("node1", 9500));
        assert_eq!(host.ports(1).collect::<Vec<_>>(), [9500]);
        host.take(vec![(9500, Err(Failure::Refused))]);
        assert!(!host.done);
        assert_eq!(host.ports(GAP).collect::<Vec<_>>(), (9501..9509).collect::<Vec<_>>());
        host.take(
            (9501..9509).map(|port| (port, if port == 9508 { process() } else { Err(Failure::Refused) })).collect(),
        );
        assert!(!host.done && host.ports(GAP).next() == Some(9509));
        host.take((9509..9517).map(|port| (port, Err(Failure::Refused))).collect());
        assert!(host.done && host.found.len() == 1);
        let notes = host.notes();
        assert_eq!((notes.len(), &notes[0][..]), (8, "node1:9500 is not open: did the process that had it end?"));
        // One process is gone, the next is there, and the last one is stopped.
        let mut some = Host::new(("node2", 7000));
        some.take(vec![(7000, Err(Failure::Refused))]);
        some.take(vec![(7001, process()), (7002, Err(Failure::Silent)), (7003, Err(Failure::Refused))]);
        assert_eq!(some.notes().len(), 2, "{:?}", some.notes());
        let mut hosts = vec![some];
        assert_eq!(unanswered(&hosts), 2);
        // A host with fewer processes, and one with a single process, which is stopped.
        hosts.extend([Host::new(("node3", 9500)), Host::new(("node4", 9500))]);
        hosts[1].take(vec![(9500, process()), (9501, Err(Failure::Refused))]);
        hosts[2].take(vec![(9500, Err(Failure::Silent))]);
        assert_eq!(unanswered(&hosts), 3);
        // Where the processes of a host are not known, none of them is counted as one that does not answer, nor any
        // other.
        for failure in [Failure::Refused, Failure::Unreachable(io::Error::other("why")), Failure::NoTime] {
            hosts.push(Host::new(("node5", 9500)));
            hosts[3].take(vec![(9500, Err(failure))]);
            assert_eq!(unanswered(&hosts), 0);
            hosts.pop();
        }
        // One that cannot be reached has no other port, either.
        let mut host = Host::new(("node1", u16::MAX));
        host.take(vec![(u16::MAX, process())]);
        assert_eq!(host.ports(GAP).count(), 0);
        host.take(Vec::new());
        assert!(host.done);
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
