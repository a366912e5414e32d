//! The connection handle: what a listener gives to NCCL, and NCCL carries to the connecting side.
//!
//! One layout for all API versions, small enough for the 64 bytes of v4 (NCCL 2.8 to 2.11):
//!
//! | bytes | content |
//! |---|---|
//! | 0–7 | magic and version |
//! | 8–23 | secret, 128 bits |
//! | 24–47 | address of the listening socket |
//! | 48 | the backend: 0 TCP, 1 RDMA |
//! | 49–55 | zero |
//! | 56–63 | the connecting side's: key of a connection attempt under way, else zero |
//!
//! NCCL hands the same bytes to `connect` until it succeeds, but may copy them between calls, so the attempt is found
//! by a key, never by a pointer.

use std::net::SocketAddr;

use crate::os::error::{Error, Result};
use crate::tcp::handshake::{Secret, put_address, read_address};

const MAGIC: [u8; 8] = *b"TOWLINE\x01";

/// A decoded handle.
#[derive(Debug, Clone)]
pub struct ConnectionHandle {
    /// What the connecting side proves.
    pub secret: Secret,
    /// Where the listener's socket is.
    pub address: SocketAddr,
    /// Whether the listener's connections are over RDMA.
    pub is_rdma: bool,
    /// The connecting side's attempt, or 0.
    pub key: u64,
}

impl ConnectionHandle {
    /// The 64 bytes for NCCL.
    pub fn encode(&self) -> [u8; 64] {
        let mut out = [0; 64];
        out[..8].copy_from_slice(&MAGIC);
        out[8..24].copy_from_slice(&self.secret.bytes());
        put_address(&mut out[24..48], self.address);
        out[48] = u8::from(self.is_rdma);
        out[56..].copy_from_slice(&self.key.to_le_bytes());
        out
    }

    /// Reads a handle.
    ///
    /// # Errors
    /// An argument error when it was made by something else.
    pub fn decode(bytes: &[u8; 64]) -> Result<Self> {
        if bytes[..7] != MAGIC[..7] {
            return Err(Error::argument("the connection handle was not made by Towline")
                .with_hint("all ranks must use the same network plugin: set NCCL_NET=Towline everywhere"));
        }
        if bytes[7] != MAGIC[7] {
            return Err(Error::argument(format!("the connection handle is of version {}, not {}", bytes[7], MAGIC[7]))
                .with_hint("use the same Towline release on all hosts"));
        }
        let address = read_address(&bytes[24..48])
            .ok_or_else(|| Error::argument("the connection handle holds no address; it was damaged on its way"))?;
        Ok(Self {
            secret: Secret::from_bytes(bytes[8..24].try_into().expect("sixteen bytes")),
            address,
            is_rdma: bytes[48] != 0,
            key: u64::from_le_bytes(bytes[56..].try_into().expect("eight bytes")),
        })
    }

    /// Writes the connecting side's key into a handle.
    pub fn set_key(bytes: &mut [u8; 64], key: u64) {
        bytes[56..].copy_from_slice(&key.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_and_leaves_the_connecting_sides_bytes_zero() {
        for address in ["10.1.2.3:45", "[fe80::1%7]:45"] {
            let handle = ConnectionHandle {
                secret: Secret::random().unwrap(),
                address: address.parse().unwrap(),
                is_rdma: false,
                key: 0,
            };
            let bytes = handle.encode();
            assert!(bytes[48..].iter().all(|byte| *byte == 0));
            let read = ConnectionHandle::decode(&bytes).unwrap();
            assert_eq!((read.secret, read.address), (handle.secret, handle.address));
        }
    }

    #[test]
    fn a_handle_of_another_plugin_or_release_is_refused_with_advice() {
        assert!(ConnectionHandle::decode(&[7; 64]).unwrap_err().to_string().contains("NCCL_NET=Towline"));
        let mut newer = [0; 64];
        newer[..8].copy_from_slice(b"TOWLINE\x02");
        assert!(ConnectionHandle::decode(&newer).unwrap_err().to_string().contains("same Towline release"));
    }
}
