//! The key file: shared by all ranks of a job and secret to everyone else.
//!
//! Any file of 32 to 4096 bytes is accepted. Line ends at its end are ignored, so an editor or a `base64` does no harm.
//! The content must be impossible to guess: an attacker who records the handshake can test guesses offline, as with
//! every handshake based on a shared key alone. `openssl rand -base64 32` makes a good key.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::error::{Error, Result};

/// The fewest bytes that can hold 128 unguessable bits as hexadecimal digits.
const SHORTEST: usize = 32;
/// The largest number of bytes that are read from a key file.
const LONGEST: usize = 4096;

/// What a key is for: each use has bytes of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Connections between ranks.
    Connections,
    /// The status over TCP.
    Status,
}

/// The shared key, ready for a handshake. It cannot be printed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct SharedKey([u8; 32]);

impl std::fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedKey(not shown)")
    }
}

impl SharedKey {
    /// Reads a key file.
    ///
    /// # Errors
    /// As [`read`].
    pub(crate) fn load(path: &Path, purpose: Purpose) -> Result<Self> {
        read(path).map(|content| Self::from_content(&content, purpose))
    }

    /// The key from the content of a key file.
    pub(crate) fn from_content(content: &[u8], purpose: Purpose) -> Self {
        let label: &[u8] = match purpose {
            Purpose::Connections => b"towline key file 1",
            Purpose::Status => b"towline status key 1",
        };
        Self(Sha256::new().chain_update(label).chain_update(content).finalize().into())
    }

    /// The bytes for the handshake.
    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Reads a key file: its content without the line ends at its end.
///
/// # Errors
/// When it cannot be read, is too short or too long, or can be read or changed by others than its owner.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    if path.as_os_str().is_empty() {
        return Err(Error::usage("TOWLINE_KEY_FILE is set, but names no file")
            .with_hint("name the key file, or unset the variable on all hosts to go without encryption"));
    }
    let shown = path.display();
    let unreadable = |error: &std::io::Error| {
        Error::system(format!("reading the key file {shown}"), error)
            .with_hint("TOWLINE_KEY_FILE must name the same key on all hosts, readable by the job")
    };
    let file = File::open(path).map_err(|error| unreadable(&error))?;
    // Of the open file, so that it cannot be replaced in between.
    let about = file.metadata().map_err(|error| unreadable(&error))?;
    // SAFETY: takes nothing, cannot fail.
    let me = unsafe { libc::geteuid() };
    check_access(path, about.mode(), about.uid(), me)?;
    let mut content = Vec::new();
    file.take(LONGEST as u64 + 1).read_to_end(&mut content).map_err(|error| unreadable(&error))?;
    trimmed(&content).map(<[u8]>::to_vec).ok_or_else(|| {
        Error::usage(format!("the key file {shown} must hold {SHORTEST} to {LONGEST} bytes"))
            .with_hint("make one with: openssl rand -base64 32")
    })
}

/// The content of a file without the line ends at its end; None when it is too short or too long.
fn trimmed(content: &[u8]) -> Option<&[u8]> {
    let end = content.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r'))? + 1;
    ((SHORTEST..=LONGEST).contains(&end) && content.len() <= LONGEST).then(|| &content[..end])
}

/// Whether the file is private enough for a key. Its group may read it: container platforms provide secrets that way.
fn check_access(path: &Path, mode: u32, owner: u32, me: u32) -> Result<()> {
    let shown = path.display();
    if owner != me && owner != 0 {
        return Err(Error::usage(format!(
            "the key file {shown} belongs to user {owner}, not to this process's or root"
        ))
        .with_hint("chown it, or let the job use a copy of its own"));
    }
    if mode & 0o027 != 0 {
        let mode = mode & 0o777;
        return Err(Error::usage(format!("the key file {shown} can be used or changed by others (mode {mode:03o})"))
            .with_hint(
                "chmod 600 it, or 640; for a Kubernetes secret set `defaultMode: 0400` in the pod's volume, and \
                 `fsGroup` when the job does not run as root",
            ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_cannot_be_printed_and_serves_one_purpose() {
        let of = |purpose| SharedKey::from_content(&[0x41; 32], purpose);
        assert_eq!(format!("{:?}", of(Purpose::Status)), "SharedKey(not shown)");
        assert_ne!(of(Purpose::Status), of(Purpose::Connections));
    }

    #[test]
    fn a_key_that_others_could_read_or_change_is_refused() {
        let path = Path::new("key");
        for mode in [0o100_600, 0o100_400, 0o100_640, 0o100_440] {
            assert!(check_access(path, mode, 7, 7).is_ok(), "{mode:o}");
            assert!(check_access(path, mode, 0, 7).is_ok(), "{mode:o}, root's");
            assert!(check_access(path, mode, 8, 7).is_err(), "{mode:o}, a stranger's");
        }
        for mode in [0o100_644, 0o100_604, 0o100_620, 0o100_660, 0o100_602, 0o100_777, 0o100_601] {
            assert!(check_access(path, mode, 7, 7).is_err(), "{mode:o}");
        }
    }

    #[test]
    fn line_ends_do_not_matter_and_everything_else_does() {
        let plain = [b'k'; 40];
        assert_eq!(trimmed(&[&plain[..], b"\r\n"].concat()), Some(&plain[..]));
        assert_eq!(
            trimmed(b"\n not at the end\n, and of 32 bytes"),
            Some(&b"\n not at the end\n, and of 32 bytes"[..])
        );
        assert_eq!(trimmed(&[b'k'; SHORTEST - 1]), None);
        assert_eq!(trimmed(&[b'\n'; SHORTEST]), None);
        assert_eq!(trimmed(&[b'k'; LONGEST + 1]), None);
        assert!(trimmed(&[b'k'; SHORTEST]).is_some() && trimmed(&[b'k'; LONGEST]).is_some());
    }
}
