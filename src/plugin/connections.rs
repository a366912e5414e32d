//! The connections of this process, for `towline why` and `towline top`.

use super::backend::{Connected, Description};
use super::process::process;

/// All connections of this process. Visits each place of the table, and waits for a thread that closes one: not for the
/// data path.
pub(crate) fn connections() -> Vec<Description> {
    let list = std::cell::RefCell::new(Vec::new());
    process().comms.any(|comm| {
        list.borrow_mut().extend(comm.connected().ok().map(Connected::describe));
        false
    });
    list.into_inner()
}
