//! The messages of the two sides before the first write, over the socket of their handshake.
//!
//! ```text
//! sending side                                        receiving side
//!   offer: ports, queue pairs per port          ──▶
//!                                               ◀──   answer: ports, queue pairs, table of sizes
//!   accept: queue pairs, class, CTS ring        ──▶
//! ```
//!
//! A record is a Protocol Buffers message behind its length (4 bytes, little-endian), followed by a proof of 32 bytes
//! with the connection's key, over everything exchanged so far. A side that cannot continue sends a record with the
//! reason instead.

use std::os::fd::AsRawFd;
use std::time::Instant;

use prost::Message;

use super::adapter::MAX_DEVICES;
use super::stripe::MAX_QPS;
use super::verbs::{Ece, Gid, LinkLayer};
use crate::os::error::{Error, Result};
use crate::session::handshake::{PROOF, Secret};
use crate::session::link::Sock;
use crate::session::shortage::PAUSE;
use crate::session::wire::{self, Filled, send_all};

/// The version of this exchange and of everything that follows it.
pub(crate) const VERSION: u32 = 4;

/// The longest record in bytes: 128 queue pairs take about 3 KiB.
const MAX_RECORD: usize = 16 << 10;

/// One record; which fields are filled depends on the step.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Record {
    /// [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The side's ports, in the order of its device.
    #[prost(message, repeated, tag = "2")]
    pub ports: Vec<PortRecord>,
    /// Offer: queue pairs for each pair of ports.
    #[prost(uint32, tag = "3")]
    pub pairs_per_port: u32,
    /// The side's queue pairs.
    #[prost(message, repeated, tag = "4")]
    pub qps: Vec<QpRecord>,
    /// Accept: the CTS ring. Answer: the table of sizes.
    #[prost(fixed64, tag = "5")]
    pub address: u64,
    /// The keys of that memory, by port.
    #[prost(fixed32, repeated, tag = "6")]
    pub keys: Vec<u32>,
    /// Why the side gives up.
    #[prost(string, tag = "7")]
    pub failure: String,
    /// Answer: the receiver's inbox for short messages; 0 when it has none.
    #[prost(fixed64, tag = "8")]
    pub inbox: u64,
    /// Its keys, by port.
    #[prost(fixed32, repeated, tag = "9")]
    pub inbox_keys: Vec<u32>,
    /// Accept: the traffic class of both sides' packets.
    #[prost(uint32, tag = "10")]
    pub traffic_class: u32,
    /// Accept: the service level of both sides' packets.
    #[prost(uint32, tag = "11")]
    pub service_level: u32,
}

/// A port.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PortRecord {
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub gid: Vec<u8>,
    /// The local identifier; 0 on Ethernet.
    #[prost(uint32, tag = "2")]
    pub lid: u32,
    /// `IBV_MTU_*`.
    #[prost(uint32, tag = "3")]
    pub mtu: u32,
    /// Ethernet, and not InfiniBand.
    #[prost(bool, tag = "4")]
    pub is_ethernet: bool,
    /// The largest message in bytes.
    #[prost(uint32, tag = "5")]
    pub max_message: u32,
    /// Its name, for messages.
    #[prost(string, tag = "6")]
    pub name: String,
}

/// A queue pair.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QpRecord {
    /// Its number.
    #[prost(uint32, tag = "1")]
    pub number: u32,
    /// The number of its first packet.
    #[prost(uint32, tag = "2")]
    pub first_packet: u32,
    /// The options that its driver offers or has agreed to.
    #[prost(message, optional, tag = "3")]
    pub ece: Option<EceRecord>,
}

/// Options of enhanced connection establishment.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct EceRecord {
    /// The vendor of these options.
    #[prost(uint32, tag = "1")]
    pub vendor: u32,
    /// The options.
    #[prost(uint32, tag = "2")]
    pub options: u32,
    /// Reserved.
    #[prost(uint32, tag = "3")]
    pub mask: u32,
}

impl From<Ece> for EceRecord {
    fn from(ece: Ece) -> Self {
        Self { vendor: ece.vendor, options: ece.options, mask: ece.mask }
    }
}

impl From<&EceRecord> for Ece {
    fn from(record: &EceRecord) -> Self {
        Self { vendor: record.vendor, options: record.options, mask: record.mask }
    }
}

impl PortRecord {
    /// The GID.
    pub(crate) fn gid(&self) -> Gid {
        self.gid.as_slice().try_into().unwrap_or_default()
    }

    /// The network.
    pub(crate) fn link_layer(&self) -> LinkLayer {
        if self.is_ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand }
    }
}

impl Record {
    /// Refuses values that no side of this version sends.
    fn check(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::remote(format!("the peer's RDMA parameters are wrong: {what}")));
        if !self.failure.is_empty() {
            let text: String = self.failure.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
            return Err(Error::remote(format!("the peer cannot connect over RDMA: {text}")));
        }
        if self.version != VERSION {
            return Err(Error::remote(format!("the peer's RDMA protocol is version {}, not {VERSION}", self.version))
                .with_hint("use the same Towline release on all hosts"));
        }
        if self.ports.len() > MAX_DEVICES
            || self.keys.len().max(self.inbox_keys.len()) > MAX_DEVICES
            || self.qps.len() > MAX_QPS
        {
            return wrong(format!("{} ports, {} queue pairs", self.ports.len(), self.qps.len()));
        }
        if let Some(port) = self.ports.iter().find(|port| port.gid.len() != 16 || !(1..=5).contains(&port.mtu)) {
            return wrong(format!("port {:?}", port.name));
        }
        if self.traffic_class.max(self.service_level) > 255 {
            return wrong(format!("traffic class {}, service level {}", self.traffic_class, self.service_level));
        }
        if self.ports.iter().any(|port| port.max_message < 4096) {
            return wrong("a port that carries no message".to_owned());
        }
        Ok(())
    }
}

/// The exchange over one socket: everything exchanged so far, and the part of the next record that has arrived.
pub(crate) struct Talk {
    key: Secret,
    transcript: Vec<u8>,
    input: Vec<u8>,
    /// The kernel had no memory for the last call, which must be repeated.
    is_short: bool,
}

impl Talk {
    /// An exchange without messages.
    pub(crate) fn new(key: Secret) -> Self {
        Self { key, transcript: b"towline rdma 1".to_vec(), input: Vec::new(), is_short: false }
    }

    /// Sends a record.
    ///
    /// # Errors
    /// When the socket does not accept it; an empty socket always does.
    pub(crate) fn write(&mut self, sock: &Sock, record: &Record) -> Result<()> {
        let bytes = self.seal(record);
        send_all(sock, &bytes)
    }

    /// When to read again without being woken: no event follows a call for which the kernel had no memory.
    pub(crate) fn again(&self) -> Option<Instant> {
        self.is_short.then(|| Instant::now() + PAUSE)
    }

    fn seal(&mut self, record: &Record) -> Vec<u8> {
        let body = record.encode_to_vec();
        let mut out = u32::try_from(body.len()).expect("records are small").to_le_bytes().to_vec();
        out.extend_from_slice(&body);
        self.transcript.extend_from_slice(&out);
        out.extend_from_slice(&self.key.prove(&[&self.transcript]));
        out
    }

    /// The peer's next record; None while it has not arrived.
    ///
    /// # Errors
    /// When the peer has left, does not hold the key, or reports that it gives up.
    pub(crate) fn read(&mut self, sock: &Sock) -> Result<Option<Record>> {
        if !self.fill(sock, 4)? {
            return Ok(None);
        }
        let length = u32::from_le_bytes(self.input[..4].try_into().expect("four bytes")) as usize;
        if length > MAX_RECORD {
            return Err(Error::remote(format!("the peer announced RDMA parameters of {length} bytes")));
        }
        if !self.fill(sock, 4 + length + PROOF)? {
            return Ok(None);
        }
        let input = std::mem::take(&mut self.input);
        self.open(&input).map(Some)
    }

    fn open(&mut self, input: &[u8]) -> Result<Record> {
        let (body, proof) = input.split_at(input.len() - PROOF);
        self.transcript.extend_from_slice(body);
        if !self.key.is_proof(&[&self.transcript], proof.try_into().expect("a proof's length")) {
            return Err(Error::remote("the peer could not prove that its RDMA parameters are its own"));
        }
        let record = Record::decode(&body[4..])
            .map_err(|error| Error::remote(format!("the peer's RDMA parameters cannot be read: {error}")))?;
        record.check()?;
        Ok(record)
    }

    /// Reads until `wanted` bytes are there and no further: bytes after the last record belong to the control channel.
    fn fill(&mut self, sock: &Sock, wanted: usize) -> Result<bool> {
        match wire::fill(sock.as_raw_fd(), &mut self.input, wanted) {
            Ok(Filled::Ended) => {
                Err(Error::remote("the peer left while RDMA parameters were exchanged").with_hint("its log says why"))
            }
            Ok(filled) => {
                self.is_short = filled == Filled::Short;
                Ok(filled == Filled::Whole)
            }
            Err(error) => Err(Error::remote(format!("exchanging RDMA parameters broke off: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let port =
            PortRecord { gid: vec![1; 16], mtu: 3, max_message: 1 << 23, name: "rxe0".into(), ..PortRecord::default() };
        let qp = QpRecord { number: 17, first_packet: 5, ece: None };
        Record { version: VERSION, ports: vec![port], qps: vec![qp], keys: vec![9], ..Record::default() }
    }

    #[test]
    fn only_the_holder_of_the_key_is_believed_and_only_in_turn() {
        let key = Secret::random().expect("random bytes");
        let talk = || (Talk::new(key.clone()), Talk::new(key.clone()));
        let (mut us, mut them) = talk();
        let first = us.seal(&record());
        assert_eq!(them.open(&first).expect("proven"), record());
        assert_eq!(us.open(&them.seal(&record())).expect("proven"), record());
        // The first record again is a replay, or this side's own record sent back.
        assert!(them.open(&first).is_err());
        assert!(us.open(&first).is_err());
        assert!(Talk::new(Secret::random().expect("random bytes")).open(&first).is_err());
        for at in 0..first.len() {
            let mut changed = first.clone();
            changed[at] ^= 1;
            assert!(talk().1.open(&changed).is_err(), "byte {at}");
        }
    }

    #[test]
    fn impossible_records_are_refused_with_the_reason() {
        let refused = |change: fn(&mut Record)| {
            let mut wrong = record();
            change(&mut wrong);
            wrong.check().expect_err("refused").to_string()
        };
        assert!(refused(|r| r.version = VERSION + 1).contains("same Towline release"));
        assert!(refused(|r| r.failure = "no port\x1b".into()).contains("no port?"));
        assert!(refused(|r| r.qps = vec![QpRecord::default(); MAX_QPS + 1]).contains("129 queue pairs"));
        assert!(refused(|r| r.ports[0].gid.clear()).contains("rxe0"));
        assert!(refused(|r| r.ports[0].max_message = 0).contains("no message"));
        assert!(refused(|r| r.traffic_class = 256).contains("traffic class 256"));
        assert!(refused(|r| r.service_level = u32::MAX).contains("service level 4294967295"));
    }
}
