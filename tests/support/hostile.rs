//! A peer that holds the secret and does not keep to the protocol. It speaks the wire format by itself, so that it can
//! say what no Towline would.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use towline::host::Handle;
use towline::session::frame::{HEADER, Header, Type};
use towline::session::handshake::{
    GREETING, HELLO, Hello, Intent, PREAMBLE, Preamble, READY, Secret, Transcript, WELCOME, Welcome, nonce,
};

use super::PATIENCE;
use super::proxy::{address_of, lead_to};

/// The name under which it appears in the logs.
pub const NAME: &str = "mallory:666";

/// One stream, with the handshake behind it.
pub struct Hostile {
    /// The socket.
    pub stream: TcpStream,
    /// The connection's number.
    pub connection: u64,
    /// What further streams prove.
    pub key: Secret,
    /// Where the plugin's process listens, if it has said so.
    pub rails: Vec<SocketAddr>,
}

/// The secret in a handle.
pub fn secret_of(handle: &Handle) -> Secret {
    Secret::from_bytes(handle.bytes()[8..24].try_into().expect("16 bytes"))
}

fn said(stream: &mut TcpStream, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

impl Hostile {
    /// Connects to the listener behind a handle as a sending side.
    pub fn connect(handle: &Handle) -> Self {
        let mut sender = Self::welcomed(handle);
        sender.confirm();
        sender
    }

    /// The same up to the welcome. The listener waits for the confirmation.
    pub fn welcomed(handle: &Handle) -> Self {
        let secret = secret_of(handle);
        let intent = Intent::Connect { listener: secret.listener_id() };
        Self::dial(address_of(handle), &secret, intent).expect("the listener welcomes who holds the secret")
    }

    /// That the welcome has come.
    pub fn confirm(&mut self) {
        self.say_bytes(&self.connection.to_le_bytes());
    }

    /// Asks for a further stream of this connection. None when that is refused.
    pub fn join(&self, stream: u16, epoch: u16) -> Option<Self> {
        let intent = Intent::Join { connection: self.connection, stream, epoch };
        Self::dial(self.stream.peer_addr().expect("connected"), &self.key, intent)
    }

    /// A whole handshake, but for the confirmation that ends it on a new connection. None when the other side ends it.
    pub fn dial(address: SocketAddr, secret: &Secret, intent: Intent) -> Option<Self> {
        let mut stream = TcpStream::connect(address).expect("the listener can be reached");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        let mut transcript = Transcript::new();
        let preamble = Preamble { low: 1, high: 1, features: 1 }.encode();
        stream.write_all(&preamble).ok()?;
        let greeting = said(&mut stream, GREETING)?;
        transcript.add(&preamble);
        transcript.add(&greeting);
        let hello = Hello { intent, nonce: nonce().expect("random bytes"), label: NAME.to_owned(), rails: Vec::new() };
        stream.write_all(&hello.seal(secret, &mut transcript)).ok()?;
        let key = match intent {
            Intent::Connect { .. } => secret.connection_key(transcript.bytes()),
            Intent::Join { .. } | Intent::Call { .. } => secret.clone(),
        };
        let welcome = said(&mut stream, WELCOME)?;
        let welcome =
            Welcome::open(&welcome.try_into().expect("its length"), secret, &mut transcript).expect("a proof");
        Some(Self { stream, connection: welcome.connection, key, rails: welcome.rails })
    }

    /// Waits behind a handle of its own making for the plugin to connect, and welcomes it as a receiving side.
    pub fn listen(handle: &mut Handle) -> TcpListener {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        lead_to(handle, listener.local_addr().expect("an address"));
        listener
    }

    /// Welcomes the next connection.
    pub fn accept(listener: &TcpListener, handle: &Handle) -> Self {
        let secret = secret_of(handle);
        let (mut stream, _) = listener.accept().expect("the plugin connects");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        let mut transcript = Transcript::new();
        let preamble = said(&mut stream, PREAMBLE).expect("a preamble");
        let theirs = Preamble::decode(&preamble).expect("Towline's");
        let greeting = [&theirs.choose(1).encode()[..], &nonce().expect("random bytes")].concat();
        stream.write_all(&greeting).expect("it is taken");
        transcript.add(&preamble);
        transcript.add(&greeting);
        let hello = said(&mut stream, HELLO).expect("a hello");
        let hello = hello.try_into().expect("its length");
        assert!(Hello::verify(&hello, &secret, &mut transcript));
        let lifelines = Hello::decode(&hello).expect("a hello").rails;
        let key = secret.connection_key(transcript.bytes());
        let rails = vec![listener.local_addr().expect("an address")];
        let welcome = Welcome { connection: 5, received: 0, label: NAME.to_owned(), rails };
        stream.write_all(&welcome.seal(&secret, &mut transcript)).expect("it is taken");
        assert_eq!(said(&mut stream, READY).expect("the confirmation"), welcome.connection.to_le_bytes());
        Self { stream, connection: 5, key, rails: lifelines }
    }

    /// Says a frame with this payload behind it.
    pub fn say(&mut self, header: Header, payload: &[u8]) {
        self.say_bytes(&[&header.encode()[..], payload].concat());
    }

    /// Says anything at all.
    pub fn say_bytes(&mut self, bytes: &[u8]) {
        // The other side may have hung up in the middle.
        let _ = self.stream.write_all(bytes);
    }

    /// The next frame, with what follows its header.
    pub fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let header = Header::decode(&said(&mut self.stream, HEADER)?.try_into().expect("its length")).expect("a frame");
        let payload = said(&mut self.stream, header.length as usize)?;
        Some((header, payload))
    }

    /// Waits until a frame of that kind comes.
    pub fn await_frame(&mut self, kind: Type) -> (Header, Vec<u8>) {
        loop {
            let received = self.receive().unwrap_or_else(|| panic!("no {kind:?} frame came before the end"));
            if received.0.kind == kind {
                return received;
            }
        }
    }

    /// What is said within a short while.
    pub fn is_silent(&mut self) -> bool {
        self.stream.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
        let silent = self.stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        self.stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        silent
    }
}
