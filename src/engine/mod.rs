//! The parts that both backends share: the request slab, the completion poller, counters and NetPlugin events.
//!
//! The engine knows neither TCP nor verbs. A backend posts a transfer by taking a [`request::RequestSlots`] slot,
//! moves it in the step that [`poller::Source::poll`] runs, and ends it through that slot. NCCL's thread and the worker
//! threads run the same step: polling is a role, not a thread.
//!
//! | module | holds |
//! |---|---|
//! | [`backoff_timer`] | when to repeat an action that had no effect |
//! | [`handle`] | the opaque values that NCCL keeps as pointers |
//! | [`table`] | the objects that those values name, in memory that is never freed |
//! | [`request`] | the request slab of one connection |
//! | [`tags`] | the number of a message or receive among those with its tag |
//! | [`span`] | memory by its addresses |
//! | [`doorbell`] | how a sleeping worker is notified |
//! | [`poller`] | worker threads, readiness, kicks and ticks |
//! | [`events`] | the profiler events of transfers |
//! | [`schedule`] | which thread moves a message, and the constants that steer it |
//! | [`counters`] | the counters of a connection |

pub(crate) mod backoff_timer;
pub(crate) mod counters;
mod deadlines;
pub(crate) mod doorbell;
pub mod events;
pub(crate) mod handle;
pub mod poller;
pub mod request;
pub(crate) mod schedule;
pub(crate) mod span;
pub(crate) mod table;
pub(crate) mod tags;
