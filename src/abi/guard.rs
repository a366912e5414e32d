//! The frame around every call from NCCL: no panic leaves it, every failure is logged once and becomes a code.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use super::result;
use crate::nccl::ffi::{ncclResult_t, ncclSuccess};
use crate::os::error::{Cause, Error, Result};
use crate::os::log;

/// Runs `body` for NCCL's call `call` in version `API` of the interface.
pub(super) fn guard<const API: u8>(call: &'static str, body: impl FnOnce() -> Result<()>) -> ncclResult_t {
    guard_and_tell::<API>(call, if API == result::FLAGCX { tell_where_nobody_reads } else { tell }, body)
}

/// As [`guard`]; `tell` logs a failure.
pub(super) fn guard_and_tell<const API: u8>(
    call: &'static str,
    tell: fn(&'static str, &Error),
    body: impl FnOnce() -> Result<()>,
) -> ncclResult_t {
    // After a panic nothing of `body` is used again: what it borrowed is NCCL's, and the transport's own state guards
    // itself (a connection in which a panic happened has failed).
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return ncclSuccess,
        Ok(Err(error)) => error,
        Err(payload) => Error::internal(format!("a defect of Towline: {}", panic_message(&*payload))),
    };
    // The logger is NCCL's or the host's; if writing to it panics, the result code is still returned.
    let _ = catch_unwind(AssertUnwindSafe(|| tell(call, &error)));
    result::code(error.cause(), API)
}

fn tell(call: &'static str, error: &Error) {
    if !error.report_once() {
        return;
    }
    match error.cause() {
        Cause::Internal => tracing::error!("{call}: {error}"),
        _ => tracing::warn!("{call}: {error}"),
    }
}

/// The calls after whose failure FlagCX waits for ever. It ignores the results of `listen`, `isend`, `irecv` and
/// `test`. After an error of `connect` or `accept` its service thread calls again, and the thread that waits for the
/// connection continues to wait.
const AWAITED: [&str; 6] = ["listen", "connect", "accept", "isend", "irecv", "test"];

/// For FlagCX, which repeats a call that failed. The same failure is logged once, or it would flood the log. It also
/// goes to standard error, since NCCL's logger may print no warnings, and the user learns nowhere else that the job
/// stands still.
fn tell_where_nobody_reads(call: &'static str, error: &Error) {
    /// A request failed, and the log has the reason. FlagCX tests the request again; the next error says only that it
    /// is over.
    static FAILED: AtomicBool = AtomicBool::new(false);
    if call == "test" && FAILED.swap(true, Ordering::Relaxed) && error.cause() == Cause::Usage {
        return;
    }
    let (is_first, is_first_here) = (error.report_once(), error.tell_host_once());
    let stands_still = AWAITED.contains(&call);
    let is_new = if stands_still { is_first_here } else { is_first };
    if !is_new || log::once_per((call, error.what(), error.peer())).is_none() {
        return;
    }
    let end = match call {
        // A peer that was only late is still let in.
        "accept" => "; FlagCX goes on waiting for it: if that rank has ended, end the job",
        _ if stands_still => "; FlagCX does not notice and waits for ever: end the job",
        _ => "",
    };
    let line = format!("{call}: {error}{end}");
    log::also_to_stderr(&line);
    tracing::warn!("{line}");
}

fn panic_message(payload: &(dyn Any + Send)) -> &str {
    if let Some(text) = payload.downcast_ref::<&str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "a panic without a message"
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing_subscriber::Layer;
    use tracing_subscriber::layer::{Context, SubscriberExt};

    use super::*;

    /// Collects the text of every event.
    struct Lines(Arc<Mutex<Vec<String>>>);

    impl<S: tracing::Subscriber> Layer<S> for Lines {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            struct Text(String);
            impl Visit for Text {
                fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                    if field.name() == "message" {
                        self.0 = format!("{value:?}");
                    }
                }
            }
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().unwrap().push(format!("{} {}", event.metadata().level(), text.0));
        }
    }

    fn logged(run: impl FnOnce()) -> Vec<String> {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let subscriber = tracing_subscriber::registry().with(Lines(lines.clone()));
        tracing::subscriber::with_default(subscriber, run);
        lines.lock().unwrap().clone()
    }

    #[test]
    fn a_panic_becomes_the_internal_error_and_one_line() {
        let lines = logged(|| {
            assert_eq!(guard::<12>("isend", || panic!("slot {} is taken", 7)), 3);
        });
        assert_eq!(lines, ["ERROR isend: a defect of Towline: slot 7 is taken"]);
    }

    #[test]
    fn an_error_that_a_connection_keeps_is_logged_once() {
        let kept = Error::remote("the connection was reset").with_peer("10.0.0.2:9");
        let lines = logged(|| {
            for _ in 0..3 {
                assert_eq!(guard::<6>("test", || Err(kept.clone())), 6);
            }
            assert_eq!(guard::<5>("isend", || Err(kept.clone())), 2);
        });
        assert_eq!(lines, ["WARN test: the connection was reset (peer 10.0.0.2:9)"]);
    }

    #[test]
    fn where_nobody_reads_the_result_the_log_says_once_that_the_job_stands_still() {
        let kept = Error::remote("the connection ended").with_peer("10.0.0.3:9");
        assert!(kept.report_once(), "the connection has logged it");
        let lines = logged(|| {
            for _ in 0..3 {
                assert_eq!(guard::<{ result::FLAGCX }>("test", || Err(kept.clone())), 6);
                assert_eq!(guard::<{ result::FLAGCX }>("test", || Err(Error::usage("it was reported"))), 5);
            }
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].starts_with("WARN test: the connection ended (peer 10.0.0.3:9); FlagCX"), "{lines:?}");
    }

    #[test]
    fn success_is_silent() {
        let lines = logged(|| assert_eq!(guard::<4>("devices", || Ok(())), 0));
        assert!(lines.is_empty(), "{lines:?}");
    }
}
