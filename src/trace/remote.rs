//! A process's status over TCP, for holders of the job's key: `towline why --host`.
//!
//! ```text
//! client                                  process
//!   offer (48: ephemeral key, proof)  ──▶
//!                                     ◀──  answer (48: ephemeral key, proof)
//!   "status", encrypted               ──▶
//!                                     ◀──  the status, encrypted, in records
//! ```
//!
//! The handshake is the Noise protocol framework's `NNpsk0` with a key derived from the key file, as between NCCL's
//! ranks. A client without the key gets no answer and no work: the process closes the connection at its first message.
//! A recorded offer may be sent again, but its sender cannot encrypt a request.
//!
//! A record is its length (2 bytes, big-endian) and its ciphertext; the first byte of its text is 1 when more follow,
//! else 0.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use snow::{Builder, HandshakeState, TransportState};

use super::metrics::server::Limited;
use crate::os::error::Result;
use crate::os::key_file::{Purpose, SharedKey};

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
const PROLOGUE: &[u8] = b"towline status 1";
const REQUEST: &[u8] = b"status";

/// Bytes of each message of the handshake: an ephemeral key and a tag.
const GREETING: usize = 32 + TAG;
const TAG: usize = 16;

/// Text of a record beside its first byte, at most.
const PIECE: usize = 32 << 10;

/// How long a client may take to prove that it has the key. Until then it holds one of the places for clients.
const PROOF: Duration = Duration::from_secs(2);

/// The key of this protocol: not the bytes that connections between ranks use.
///
/// # Errors
/// As [`SharedKey::load`].
pub(crate) fn load_key(path: &Path) -> Result<SharedKey> {
    SharedKey::load(path, Purpose::Status)
}

fn builder(key: &SharedKey) -> io::Result<Builder<'_>> {
    let params = PATTERN.parse().map_err(refused)?;
    Builder::new(params).prologue(PROLOGUE).and_then(|builder| builder.psk(0, key.bytes())).map_err(refused)
}

fn refused(error: snow::Error) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("the other side does not have this key ({error})"))
}

/// Serves one client that has connected; `answer` makes the status.
///
/// # Errors
/// When the client does not have the key, or is too slow.
pub(in crate::trace) fn serve(client: &TcpStream, key: &SharedKey, answer: impl FnOnce() -> String) -> io::Result<()> {
    let mut stream = Limited::new(client, PROOF);
    let state = builder(key)?.build_responder().map_err(refused)?;
    let mut session = respond(&mut stream, state)?;
    let (request, _) = receive(&mut stream, &mut session)?;
    if request != REQUEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    stream.extend();
    let text = answer();
    let mut pieces = text.as_bytes().chunks(PIECE).peekable();
    while let Some(piece) = pieces.next() {
        send(&mut stream, &mut session, piece, pieces.peek().is_some())?;
    }
    Ok(())
}

/// Asks the process at the other end of `stream` for its status.
///
/// # Errors
/// When that process has another key, or takes longer than `patience`.
pub(crate) fn ask(stream: &TcpStream, key: &SharedKey, patience: Duration, longest: u64) -> io::Result<Vec<u8>> {
    let mut stream = Limited::new(stream, patience);
    let mut state = builder(key)?.build_initiator().map_err(refused)?;
    let mut greeting = [0; GREETING];
    state.write_message(&[], &mut greeting).map_err(refused)?;
    stream.write_all(&greeting)?;
    stream.read_exact(&mut greeting).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it closed the connection, as it does when the client lacks its key or it has too many clients",
        ),
        _ => error,
    })?;
    state.read_message(&greeting, &mut []).map_err(refused)?;
    let mut session = state.into_transport_mode().map_err(refused)?;
    send(&mut stream, &mut session, REQUEST, false)?;
    let mut status = Vec::new();
    loop {
        let (piece, more) = receive(&mut stream, &mut session)?;
        status.extend_from_slice(&piece);
        if !more {
            return Ok(status);
        }
        if status.len() as u64 > longest {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the status is too long"));
        }
    }
}

/// The process's part of the handshake.
fn respond(stream: &mut (impl Read + Write), mut state: HandshakeState) -> io::Result<TransportState> {
    let mut greeting = [0; GREETING];
    stream.read_exact(&mut greeting)?;
    state.read_message(&greeting, &mut []).map_err(refused)?;
    state.write_message(&[], &mut greeting).map_err(refused)?;
    stream.write_all(&greeting)?;
    state.into_transport_mode().map_err(refused)
}

fn send(stream: &mut impl Write, session: &mut TransportState, piece: &[u8], more: bool) -> io::Result<()> {
    let text = [&[u8::from(more)], piece].concat();
    let mut record = vec![0; 2 + text.len() + TAG];
    let length = session.write_message(&text, &mut record[2..]).map_err(refused)?;
    record[..2].copy_from_slice(&(length as u16).to_be_bytes());
    stream.write_all(&record[..2 + length])
}

/// The text of a record, and whether more follow.
fn receive(stream: &mut impl Read, session: &mut TransportState) -> io::Result<(Vec<u8>, bool)> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut record = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut record)?;
    let mut text = vec![0; record.len()];
    let length = session.read_message(&record, &mut text).map_err(refused)?;
    match text[..length].split_first() {
        Some((first @ (0 | 1), rest)) => Ok((rest.to_vec(), *first == 1)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::sync::Arc;

    use super::super::metrics::server::{self, Clients};
    use super::*;

    const LONGEST: u64 = 1 << 24;
    const PATIENCE: Duration = Duration::from_secs(20);

    fn key(byte: u8) -> SharedKey {
        SharedKey::from_content(&[byte; 32], Purpose::Status)
    }

    /// A process with this status, and where it listens.
    fn process(status: String) -> SocketAddr {
        let listener = server::bind(([127, 0, 0, 1], 0).into(), None).unwrap();
        let address = listener.local_addr().unwrap();
        let handle: server::Handle<TcpStream> = Arc::new(move |client| drop(serve(client, &key(1), || status.clone())));
        std::thread::spawn(move || {
            let clients = Clients::new(b"");
            loop {
                server::serve(|| listener.accept().map(|(client, _)| client), &clients, &handle);
            }
        });
        address
    }

    fn ask(address: SocketAddr, key: &SharedKey) -> io::Result<Vec<u8>> {
        super::ask(&TcpStream::connect(address)?, key, PATIENCE, LONGEST)
    }

    #[test]
    fn a_holder_of_the_key_gets_the_status_whatever_its_length() {
        for length in [1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 7] {
            let status = "s".repeat(length);
            let told = ask(process(status.clone()), &key(1)).unwrap();
            assert_eq!(told, status.into_bytes());
        }
    }

    #[test]
    fn another_key_gets_nothing_and_the_reason() {
        let error = ask(process("secret".into()), &key(2)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    }

    #[test]
    fn nothing_leaves_in_the_clear_and_noise_gets_no_byte() {
        let address = process("secret".into());
        for bytes in [&b"GET /status HTTP/1.1\r\nHost: somewhere.example\r\n\r\n"[..], &[0; 4096]] {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(bytes).unwrap();
            let mut told = Vec::new();
            // The connection may end with a reset, since bytes were left unread.
            let _ = stream.read_to_end(&mut told);
            assert_eq!(told, b"");
        }
    }

    #[test]
    fn a_recorded_offer_makes_no_status() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let key = key(1);
        let mut offer = [0; GREETING];
        builder(&key).unwrap().build_initiator().unwrap().write_message(&[], &mut offer).unwrap();
        let client = std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&offer).unwrap();
            stream.read_exact(&mut [0; GREETING]).unwrap();
            // The sender of a recorded offer cannot go on from here.
            stream.write_all(&[0, 23]).and_then(|()| stream.write_all(&[7; 23])).unwrap();
            stream.read_to_end(&mut Vec::new()).unwrap_or(0)
        });
        let (stream, _) = listener.accept().unwrap();
        serve(&stream, &key, || unreachable!("it has not proved anything")).unwrap_err();
        drop(stream);
        assert_eq!(client.join().unwrap(), 0);
    }

    #[test]
    fn silent_clients_hold_up_a_holder_of_the_key_for_their_time_at_most() {
        let address = process("status".into());
        let silent: Vec<_> = (0..server::CLIENTS).map(|_| TcpStream::connect(address).unwrap()).collect();
        std::thread::sleep(Duration::from_millis(200));
        // All places are taken.
        ask(address, &key(1)).unwrap_err();
        std::thread::sleep(PROOF + Duration::from_secs(1));
        assert_eq!(ask(address, &key(1)).unwrap(), b"status");
        drop(silent);
    }
}
