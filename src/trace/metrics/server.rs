//! A small server, and on it the HTTP endpoint: `GET /metrics` for Prometheus, `GET /summary` in readable form.
//!
//! Each client has a thread of its own, so that a slow client delays no other. It is our own code, because a server
//! crate would open descriptors that a forked child keeps ([`crate::os::fd`]).

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::os::fd::Registered;

/// How long a client may take to send its request and read the answer.
const CLIENT: Duration = Duration::from_secs(10);

/// Clients that a listener serves at once; more are turned away.
pub(in crate::trace) const CLIENTS: usize = 16;

/// How long it may take to turn a client away; the answer fits its socket.
const TURNED_AWAY: Duration = Duration::from_millis(10);

/// Longest request that is read.
const LONGEST: usize = 8192;

/// Ports that are tried after the first one, if the process's number on the host is unknown.
const PORTS: u16 = 64;

/// The answer for a path of the URL; None when there is none.
pub(in crate::trace) type Answer = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Serves a client, on its own thread.
pub(in crate::trace) type Handle<S> = Arc<dyn Fn(&S) + Send + Sync>;

/// A client's connection.
pub(in crate::trace) trait Socket: AsRawFd + Send + 'static {
    /// How long the next read or write may last.
    fn limit(&self, time: Duration) -> io::Result<()>;
}

impl Socket for TcpStream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

impl Socket for UnixStream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

/// The clients of a listener that are being served, and the answer for one too many.
#[derive(Debug)]
pub(in crate::trace) struct Clients {
    served: Arc<AtomicUsize>,
    turned_away: Vec<u8>,
}

impl Clients {
    pub(in crate::trace) fn new(turned_away: &[u8]) -> Self {
        Self { served: Arc::default(), turned_away: turned_away.to_vec() }
    }

    /// HTTP's.
    pub(in crate::trace) fn of_http() -> Self {
        Self::new(&response("503 Service Unavailable", "too many clients\n"))
    }
}

/// Opens the socket. Processes of one host get one port each: the address's plus their number on the host, where the
/// launcher says it, else the first that is free.
pub(in crate::trace) fn bind(address: SocketAddr, local_rank: Option<u16>) -> io::Result<Registered<TcpListener>> {
    let at = |more: u16| {
        let port = address.port().checked_add(more).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Registered::open(|| TcpListener::bind(SocketAddr::new(address.ip(), port)))
    };
    match local_rank {
        _ if address.port() == 0 => at(0),
        Some(number) => at(number),
        None => {
            let mut tries = (0..PORTS).map(at);
            let first = tries.next().expect("there is one");
            match first {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    tries.find(Result::is_ok).unwrap_or(Err(error))
                }
                other => other,
            }
        }
    }
}

/// Takes in one client.
pub(in crate::trace) fn serve<S: Socket>(accept: impl FnOnce() -> io::Result<S>, clients: &Clients, handle: &Handle<S>)
where
    for<'a> &'a S: Read + Write,
{
    let Ok(client) = Registered::open(accept) else { return };
    let served = Arc::clone(&clients.served);
    if served.fetch_add(1, Ordering::AcqRel) >= CLIENTS {
        served.fetch_sub(1, Ordering::AcqRel);
        let _ = Limited::new(&*client, TURNED_AWAY).write(&clients.turned_away);
        return;
    }
    let (handle, counted) = (Arc::clone(handle), Arc::clone(&served));
    let thread = crate::os::thread::spawn("towline-client", move || {
        handle(&client);
        drop(client);
        counted.fetch_sub(1, Ordering::AcqRel);
    });
    if thread.is_err() {
        served.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A connection whose reads and writes together may last for a limited time.
pub(in crate::trace) struct Limited<'a, S> {
    stream: &'a S,
    end: Instant,
}

impl<'a, S: Socket> Limited<'a, S> {
    pub(in crate::trace) fn new(stream: &'a S, limit: Duration) -> Self {
        Self { stream, end: Instant::now() + limit }
    }

    /// From now on the client has the time of one that is served.
    pub(in crate::trace) fn extend(&mut self) {
        self.end = Instant::now() + CLIENT;
    }

    /// The next read or write may last for what is left.
    fn limit(&self) -> io::Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.limit(left.max(Duration::from_millis(1)))
    }
}

impl<'a, S: Socket> Read for Limited<'a, S>
where
    &'a S: Read,
{
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.read(bytes)
    }
}

impl<'a, S: Socket> Write for Limited<'a, S>
where
    &'a S: Write,
{
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.limit()?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A request up to its end, or as long as one may be.
pub(in crate::trace) fn read_until(client: &mut impl Read, end: &[u8]) -> io::Result<String> {
    let mut text = Vec::new();
    let mut bytes = [0; 512];
    while text.len() < LONGEST && !text.windows(end.len()).any(|found| found == end) {
        match client.read(&mut bytes)? {
            0 => break,
            count => text.extend_from_slice(&bytes[..count]),
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Answers one request by HTTP.
pub(in crate::trace) fn talk(client: &TcpStream, answer: &Answer) -> io::Result<()> {
    let mut client = Limited::new(client, CLIENT);
    let text = read_until(&mut client, b"\r\n\r\n")?;
    let mut words = text.split_whitespace();
    let said = match (words.next(), words.next()) {
        (Some("GET"), Some(path)) => match answer(path.split('?').next().unwrap_or(path)) {
            Some(body) => response("200 OK", &body),
            None => response("404 Not Found", "there is /metrics and /summary\n"),
        },
        _ => response("405 Method Not Allowed", "only GET\n"),
    };
    client.write_all(&said)
}

fn response(status: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(port: u16, request: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_slow_client_keeps_no_other_one_waiting() {
        let listener = bind(([127, 0, 0, 1], 0).into(), None).unwrap();
        let port = listener.local_addr().unwrap().port();
        let answer: Answer = Arc::new(|path| (path == "/metrics").then(|| "figures\n".into()));
        let handle: Handle<TcpStream> = Arc::new(move |client| drop(talk(client, &answer)));
        std::thread::spawn(move || {
            let clients = Clients::of_http();
            loop {
                serve(|| listener.accept().map(|(client, _)| client), &clients, &handle);
            }
        });
        // One sends no request, one never reads.
        let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut slow = TcpStream::connect(("127.0.0.1", port)).unwrap();
        slow.write_all(b"GET /met").unwrap();
        let began = Instant::now();
        let text = ask(port, "GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nfigures\n"), "{text}");
        assert!(ask(port, "GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(ask(port, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(began.elapsed() < CLIENT / 2, "{:?}", began.elapsed());
    }

    #[test]
    fn each_process_of_a_host_has_a_port() {
        let first = bind(([127, 0, 0, 1], 0).into(), Some(3)).unwrap();
        let address = first.local_addr().unwrap();
        // The process's number is unknown.
        let next = bind(address, None).unwrap().local_addr().unwrap().port();
        assert!(next > address.port() && next < address.port() + PORTS, "{next}");
        // The launcher passes the number; if another program is there, the user is notified.
        assert!(bind(address, Some(0)).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse));
        assert!(bind(([127, 0, 0, 1], u16::MAX).into(), Some(1)).is_err());
    }
}
