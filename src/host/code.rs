//! What a plugin answered when it did not answer success.
//!
//! Guarantees: every value that is not `ncclSuccess` becomes exactly one [`Code`]. The failures that arise in the host
//! itself (no such entry, no answer in time, memory overrun) cannot be mistaken for one.

use std::fmt;

use crate::nccl::ffi;
use crate::os::error::{Cause, Error};

/// The result of one call into a plugin.
pub type Result<T> = std::result::Result<T, Code>;

/// Why a call into a plugin failed: NCCL's result codes, and the host's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// `ncclUnhandledCudaError`.
    UnhandledCudaError,
    /// `ncclSystemError`.
    SystemError,
    /// `ncclInternalError`.
    InternalError,
    /// `ncclInvalidArgument`.
    InvalidArgument,
    /// `ncclInvalidUsage`.
    InvalidUsage,
    /// `ncclRemoteError`. NCCL knows it from 2.13 on: v4 and v5 plugins answer `ncclSystemError` instead.
    RemoteError,
    /// A number that is no NCCL result.
    Unknown(u32),
    /// The host's own: this API version has no such call, or the plugin left its entry NULL, or a size does not fit
    /// the type that this version gives it. The plugin was not called.
    NotOffered(&'static str),
    /// The host's own: the plugin kept returning "not yet" until the deadline. The text names what was awaited.
    Deadline(&'static str),
    /// The host's own: NCCL would find no path from a GPU to any device of the plugin, and end the job.
    Unplaced,
    /// The host's own: the plugin wrote outside the memory that this API version gives it.
    Overrun(&'static str),
}

impl Code {
    /// Reads a plugin's answer.
    pub fn check(answer: ffi::ncclResult_t) -> Result<()> {
        match answer {
            ffi::ncclSuccess => Ok(()),
            ffi::ncclUnhandledCudaError => Err(Self::UnhandledCudaError),
            ffi::ncclSystemError => Err(Self::SystemError),
            ffi::ncclInternalError => Err(Self::InternalError),
            ffi::ncclInvalidArgument => Err(Self::InvalidArgument),
            ffi::ncclInvalidUsage => Err(Self::InvalidUsage),
            ffi::ncclRemoteError => Err(Self::RemoteError),
            other => Err(Self::Unknown(other)),
        }
    }

    /// The same failure as an error for users: `doing` is what the host was doing, as in "connecting to rank 1".
    #[must_use]
    pub(crate) fn while_doing(self, doing: impl fmt::Display) -> Error {
        let cause = match self {
            Self::InvalidArgument => Cause::Argument,
            Self::InvalidUsage | Self::NotOffered(_) => Cause::Usage,
            Self::RemoteError | Self::Deadline(_) => Cause::Remote,
            Self::InternalError | Self::Unknown(_) | Self::Overrun(_) | Self::Unplaced => Cause::Internal,
            Self::UnhandledCudaError | Self::SystemError => Cause::System,
        };
        let error = Error::new(cause, format!("{doing} failed: {self}"));
        match self {
            Self::NotOffered(_) | Self::Deadline(_) | Self::Overrun(_) | Self::Unplaced => error,
            _ => error.with_hint("NCCL_DEBUG=INFO shows what the plugin says about it"),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnhandledCudaError => f.write_str("ncclUnhandledCudaError"),
            Self::SystemError => f.write_str("ncclSystemError"),
            Self::InternalError => f.write_str("ncclInternalError"),
            Self::InvalidArgument => f.write_str("ncclInvalidArgument"),
            Self::InvalidUsage => f.write_str("ncclInvalidUsage"),
            Self::RemoteError => f.write_str("ncclRemoteError"),
            Self::Unknown(value) => write!(f, "the unknown result {value}"),
            Self::NotOffered(what) => write!(f, "the plugin does not offer {what}"),
            Self::Deadline(what) => write!(f, "no {what} in time"),
            Self::Unplaced => f.write_str("NCCL would find no path from a GPU to any of the plugin's devices"),
            Self::Overrun(what) => write!(f, "the plugin wrote behind the end of {what}"),
        }
    }
}

impl std::error::Error for Code {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn success_is_the_only_answer_that_is_no_code() {
        assert_eq!(Code::check(0), Ok(()));
        assert_eq!(Code::check(6), Err(Code::RemoteError));
        assert_eq!(Code::check(77), Err(Code::Unknown(77)));
        for value in 1..=255 {
            assert!(Code::check(value).is_err(), "{value}");
        }
    }
}
