//! Every message of the handshake, from a stranger (raw bytes) and from a peer that holds the secret (sealed bytes).

use super::Input;
use towline::session::handshake::{HELLO, Hello, Intent, PREAMBLE, Preamble, Secret, Transcript, WELCOME, Welcome};

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(5) {
        0 => preamble(&input.bytes::<PREAMBLE>()),
        1 => strange_hello(&input.bytes::<HELLO>()),
        2 => {
            let welcome = Welcome::open(&input.bytes::<WELCOME>(), &secret(), &mut Transcript::new());
            assert!(welcome.is_err(), "a welcome without a proof is believed");
        }
        3 => hello(&mut input),
        _ => welcome(&mut input),
    }
}

fn secret() -> Secret {
    Secret::from_bytes(*b"sixteen bytes...")
}

fn is_plain(label: &str) -> bool {
    label.bytes().all(|byte| byte.is_ascii_graphic())
}

fn preamble(bytes: &[u8; PREAMBLE]) {
    if let Ok(preamble) = Preamble::decode(bytes) {
        assert_eq!(preamble.encode(), *bytes);
        let answer = preamble.choose(1);
        assert!(answer.low == 0 || (preamble.low..=preamble.high).contains(&answer.low));
        assert_eq!(answer.features & !preamble.features, 0);
    }
}

fn strange_hello(bytes: &[u8; HELLO]) {
    if let Ok(hello) = Hello::decode(bytes) {
        assert!(is_plain(&hello.label));
    }
    assert!(!Hello::verify(bytes, &secret(), &mut Transcript::new()), "a hello without a proof is believed");
}

fn text(input: &mut Input<'_>) -> String {
    let length = input.below(90);
    (0..length).map(|_| char::from(input.byte())).collect()
}

fn hello(input: &mut Input<'_>) {
    let (kind, connection) = (input.below(3), input.number());
    let (stream, epoch) = (input.number() as u16, input.number() as u16);
    let intent = match kind {
        0 => Intent::Connect { listener: connection },
        1 => Intent::Join { connection, stream, epoch },
        _ => Intent::Call { connection, stream, epoch },
    };
    let rails = (0..input.below(20)).map(|_| rail(input)).collect();
    let hello = Hello { intent, nonce: input.bytes(), label: text(input), rails };
    let said: [u8; 8] = input.bytes();
    let transcript = || {
        let mut transcript = Transcript::new();
        transcript.add(&said);
        transcript
    };
    let mut bytes = hello.seal(&secret(), &mut transcript());
    let read = Hello::decode(&bytes).expect("what we wrote can be read");
    assert_eq!((read.intent, read.nonce), (hello.intent, hello.nonce));
    assert_eq!(read.rails, hello.rails[..hello.rails.len().min(16)]);
    assert!(is_plain(&read.label));
    assert!(Hello::verify(&bytes, &secret(), &mut transcript()));
    let (at, change) = (usize::from(u16::from_le_bytes(input.bytes())) % HELLO, input.byte());
    bytes[at] ^= change;
    assert_eq!(Hello::verify(&bytes, &secret(), &mut transcript()), change == 0, "a changed hello is believed");
}

fn welcome(input: &mut Input<'_>) {
    let mut bytes: [u8; WELCOME] = {
        let rails = (0..input.below(20)).map(|_| rail(input)).collect();
        let welcome = Welcome { connection: input.number(), received: input.number(), label: text(input), rails };
        let bytes = welcome.seal(&secret(), &mut Transcript::new());
        let read = Welcome::open(&bytes, &secret(), &mut Transcript::new()).expect("what we wrote can be read");
        assert_eq!((read.connection, read.received), (welcome.connection, welcome.received));
        assert_eq!(read.rails, welcome.rails[..welcome.rails.len().min(16)]);
        assert!(is_plain(&read.label));
        bytes
    };
    let (at, change) = (usize::from(u16::from_le_bytes(input.bytes())) % WELCOME, input.byte());
    bytes[at] ^= change;
    assert_eq!(Welcome::open(&bytes, &secret(), &mut Transcript::new()).is_ok(), change == 0);
}

fn rail(input: &mut Input<'_>) -> std::net::SocketAddr {
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
    let port = u16::from_le_bytes(input.bytes());
    if input.below(2) == 0 {
        SocketAddrV4::new(Ipv4Addr::from(input.bytes::<4>()), port).into()
    } else {
        SocketAddrV6::new(Ipv6Addr::from(input.bytes::<16>()), port, 0, input.byte().into()).into()
    }
}
