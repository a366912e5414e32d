//! The one place where a failure becomes an NCCL result code.

use crate::nccl::ffi::{
    ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclResult_t, ncclSystemError,
};
use crate::os::error::Cause;

/// Takes the place of NCCL's version when FlagCX calls. Its result codes are those of NCCL's v8.
pub(super) const FLAGCX: u8 = u8::MAX;

/// The code for `cause` in version `api` of the interface. NCCL knows the remote error from 2.13 on, that is with v6;
/// older hosts get the system error, which they also treat as a network failure.
pub(super) fn code(cause: Cause, api: u8) -> ncclResult_t {
    match cause {
        Cause::System => ncclSystemError,
        Cause::Argument => ncclInvalidArgument,
        Cause::Usage => ncclInvalidUsage,
        Cause::Internal => ncclInternalError,
        Cause::Remote if api < 6 => ncclSystemError,
        Cause::Remote => ncclRemoteError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_before_v6_never_see_the_remote_error() {
        for api in 4..=12 {
            let expected = if api <= 5 { 2 } else { 6 };
            assert_eq!(code(Cause::Remote, api), expected, "v{api}");
        }
    }

    #[test]
    fn flagcx_knows_the_remote_error() {
        assert_eq!(code(Cause::Remote, FLAGCX), 6);
    }

    #[test]
    fn the_other_causes_have_one_code_each() {
        for api in 4..=12 {
            let codes = [Cause::System, Cause::Argument, Cause::Usage, Cause::Internal].map(|cause| code(cause, api));
            assert_eq!(codes, [2, 4, 5, 3], "v{api}");
        }
    }
}
