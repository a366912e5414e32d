//! The meaning of a failed work request: one sentence with queue pair, addresses and codes, and the usual cause.

use rdma_sys::ibv_wc_status as status;

use super::gid;
use super::verbs::{Completion, Gid};
use crate::os::error::{Cause, Error};

/// The two ends of a queue pair, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ends {
    /// This side's queue pair.
    pub pair: u32,
    /// The peer's.
    pub peer_pair: u32,
    /// This side's GID, or its LID in the first two bytes where there is no GID.
    pub gid: Gid,
    /// The peer's.
    pub peer_gid: Gid,
}

/// The operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    /// Writing a message into a receive.
    Sending,
    /// Announcing a receive, or waiting for the send.
    Receiving,
    /// Making received bytes visible to the GPU.
    Flushing,
}

/// The failure that a completion reports, without the peer.
pub(crate) fn explain(
    completion: &Completion,
    text: &str,
    device: &str,
    port_is_down: bool,
    ends: &Ends,
    doing: Doing,
) -> Error {
    let (cause, usual) = usual_cause(completion.status(), doing, port_is_down);
    let doing = match doing {
        Doing::Sending => "an RDMA write of a message",
        Doing::Receiving => "an RDMA operation of a receive",
        Doing::Flushing => "the flush of a receive",
    };
    let what = format!(
        "{doing} failed: {text} (status {}, vendor code {:#x}) on {device}, queue pair {} with GID {} to {} with GID {}",
        completion.status(),
        completion.vendor_code(),
        ends.pair,
        gid::display(&ends.gid),
        ends.peer_pair,
        gid::display(&ends.peer_gid),
    );
    Error::new(cause, what).with_hint(usual)
}

/// Whether the path of the work request may have failed, so that another path may work. Other failures are mistakes
/// that would occur again.
pub(crate) fn is_path_failure(code: u32) -> bool {
    !matches!(
        code,
        status::IBV_WC_LOC_LEN_ERR
            | status::IBV_WC_LOC_PROT_ERR
            | status::IBV_WC_LOC_ACCESS_ERR
            | status::IBV_WC_REM_ACCESS_ERR
            | status::IBV_WC_REM_INV_REQ_ERR
    )
}

/// The kind of failure that a status means, and its most frequent cause.
fn usual_cause(code: u32, doing: Doing, port_is_down: bool) -> (Cause, &'static str) {
    match code {
        // Through a queue pair that is connected to itself: the peer is not involved.
        status::IBV_WC_LOC_PROT_ERR | status::IBV_WC_LOC_ACCESS_ERR | status::IBV_WC_REM_ACCESS_ERR
            if doing == Doing::Flushing =>
        {
            (Cause::Usage, "the memory that was received into is not registered any more, or was unmapped")
        }
        _ if doing == Doing::Flushing && port_is_down => {
            (Cause::System, "this side's port is down: look at the cable, the switch and the interface")
        }
        _ if doing == Doing::Flushing => {
            (Cause::System, "this side's device could not read back what it had written; look at the kernel's log")
        }
        status::IBV_WC_LOC_QP_OP_ERR if port_is_down => {
            (Cause::System, "this side's port is down: look at the cable, the switch and the interface")
        }
        status::IBV_WC_RETRY_EXC_ERR if port_is_down => {
            (Cause::Remote, "this side's port is down: look at the cable, the switch and the interface")
        }
        status::IBV_WC_RETRY_EXC_ERR => (
            Cause::Remote,
            "the peer's port did not answer: look at the peer's log, its port, and the switches between; on RoCE also at \
             the chosen GIDs (NCCL_IB_GID_INDEX); NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT say how long to wait",
        ),
        status::IBV_WC_RNR_RETRY_EXC_ERR => {
            (Cause::Remote, "the peer's queue of receives stayed empty; look at the peer's log")
        }
        status::IBV_WC_REM_ACCESS_ERR if doing == Doing::Sending => (
            Cause::Remote,
            "the receiving side's buffer is not registered any more; it must stay so until test says that the receive is done",
        ),
        status::IBV_WC_REM_ACCESS_ERR => {
            (Cause::Remote, "the peer refused the key of its memory; look at the peer's log")
        }
        status::IBV_WC_REM_INV_REQ_ERR | status::IBV_WC_REM_OP_ERR => {
            (Cause::Remote, "the peer's device refused the request; look at the peer's log and at both drivers")
        }
        status::IBV_WC_LOC_PROT_ERR => {
            (Cause::Usage, "the memory of this side is not registered, or was unmapped while it was in use")
        }
        status::IBV_WC_LOC_LEN_ERR => (Cause::Internal, "a message did not fit its queue pair"),
        status::IBV_WC_WR_FLUSH_ERR => (
            Cause::Remote,
            "the queue pair was stopped before, mostly because the peer violated its memory's bounds or its device failed; \
             look at both logs",
        ),
        status::IBV_WC_FATAL_ERR => (Cause::System, "the device failed; look at the kernel's log"),
        _ => (Cause::System, "look at the kernel's log and at the driver"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_down_is_named_before_the_peer() {
        let (cause, hint) = usual_cause(status::IBV_WC_RETRY_EXC_ERR, Doing::Sending, true);
        assert_eq!(cause, Cause::Remote);
        assert!(hint.contains("this side's port is down"));
        assert!(usual_cause(status::IBV_WC_RETRY_EXC_ERR, Doing::Sending, false).1.contains("NCCL_IB_TIMEOUT"));
    }

    #[test]
    fn a_mistake_is_not_repeated_over_another_way() {
        assert!(
            [status::IBV_WC_LOC_PROT_ERR, status::IBV_WC_REM_ACCESS_ERR].into_iter().all(|code| !is_path_failure(code))
        );
        assert!([status::IBV_WC_RETRY_EXC_ERR, status::IBV_WC_WR_FLUSH_ERR].into_iter().all(is_path_failure));
    }

    #[test]
    fn a_flush_that_fails_is_not_the_peers_fault() {
        for code in [status::IBV_WC_RETRY_EXC_ERR, status::IBV_WC_WR_FLUSH_ERR, status::IBV_WC_REM_OP_ERR] {
            assert_eq!(usual_cause(code, Doing::Flushing, false).0, Cause::System);
            assert!(usual_cause(code, Doing::Flushing, true).1.contains("this side's port is down"));
        }
        assert_eq!(usual_cause(status::IBV_WC_REM_ACCESS_ERR, Doing::Flushing, false).0, Cause::Usage);
    }

    #[test]
    fn a_buffer_given_up_too_early_is_told_to_the_sender() {
        let (cause, hint) = usual_cause(status::IBV_WC_REM_ACCESS_ERR, Doing::Sending, false);
        assert_eq!(cause, Cause::Remote);
        assert!(hint.contains("not registered any more"));
    }
}
