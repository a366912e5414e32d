//! The message for a failed attempt to connect.

use std::io;
use std::time::Duration;

use crate::os::error::{Cause, Error, advice};
use crate::session::link::NO_PORT_HINT;
use crate::session::tries::ROUND_TRIP_MAX;

/// The error text when the peer's process no longer knows the connection.
pub(super) const TURNED_AWAY_TEXT: &str = "the peer closed the connection during the handshake";

pub(super) const UNANSWERED_TEXT: &str = "the peer did not answer";

pub(super) const REFUSED_TEXT: &str = "the peer refused the connection";

/// The failure of connect(2).
pub(super) fn refused(error: &io::Error) -> Error {
    if error.kind() == io::ErrorKind::ConnectionRefused {
        return Error::remote(REFUSED_TEXT).with_hint("its process may have ended; look at its log");
    }
    if advice(error).is_some() {
        return Error::system("connecting", error);
    }
    // A resource that this host lacks, whatever the peer.
    let lacks = match error.raw_os_error() {
        Some(libc::EADDRNOTAVAIL | libc::EADDRINUSE) => Some(NO_PORT_HINT),
        None if error.kind() == io::ErrorKind::AddrNotAvailable => Some("look at the host's addresses (ip address)"),
        _ => None,
    };
    if let Some(hint) = lacks {
        return Error::system("connecting", error).with_hint(hint);
    }
    let hint = match error.raw_os_error() {
        Some(libc::EHOSTUNREACH | libc::ENETUNREACH) => {
            "is the peer's host up, and is there a route to it over the chosen interface (ip route get, NCCL_SOCKET_IFNAME)? firewalls answer so, too"
        }
        _ => "check that the hosts can reach each other on the chosen interfaces (NCCL_SOCKET_IFNAME)",
    };
    Error::remote(format!("connecting failed: {error}")).with_hint(hint)
}

/// The error when no answer arrived for this long.
pub(super) fn unanswered(waited: Duration) -> Error {
    let hint =
        "check that the hosts can reach each other on the chosen interfaces (NCCL_SOCKET_IFNAME), and their firewalls";
    // Only a long wait distinguishes a round trip that is too long from other causes.
    if waited < ROUND_TRIP_MAX {
        return Error::remote(UNANSWERED_TEXT).with_hint(hint);
    }
    let (waited, most) = (waited.as_secs_f64(), ROUND_TRIP_MAX.as_secs());
    Error::remote(format!("the peer did not answer within {waited:.0} s"))
        .with_hint(format!("{hint}; paths with a round trip above {most} s are not supported"))
}

pub(super) const FORBIDDEN_TEXT: &str = "this host does not let the connection out";

/// The failure when connect(2) itself fails before any packet is sent: `EACCES` (a route of type prohibit), `EPERM` (a
/// firewall or security module), `EINVAL` (a route of type blackhole). The same codes in an answer from the network are
/// different: another host sent them, and the cause may disappear.
pub(super) fn forbidden(error: &io::Error) -> Option<Error> {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EINVAL)).then(|| {
        Error::new(Cause::System, format!("{FORBIDDEN_TEXT} ({error})")).with_hint(
            "a route of type prohibit or blackhole (ip route get), a firewall or a security module of this host is in the way",
        )
    })
}
