//! The key from the key file, as the handshake uses it.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::os::error::Result;
use crate::os::key_file;

/// The shared key, ready for the handshake. It cannot be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct SharedKey([u8; 32]);

impl std::fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedKey(not shown)")
    }
}

impl SharedKey {
    /// Reads a key file.
    ///
    /// # Errors
    /// As [`key_file::read`].
    pub fn load(path: &Path) -> Result<Self> {
        key_file::read(path).map(|content| Self::from_content(&content))
    }

    /// The key from the content of a key file.
    pub fn from_content(content: &[u8]) -> Self {
        Self(Sha256::new().chain_update(b"towline key file 1").chain_update(content).finalize().into())
    }

    /// The bytes for the handshake.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_cannot_be_printed() {
        let key = SharedKey::from_content(&[0x41; 32]);
        assert_eq!(format!("{key:?}"), "SharedKey(not shown)");
    }
}
