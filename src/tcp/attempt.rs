//! An attempt to connect over TCP streams.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::sender::SendConn;
use crate::os::error::{Error, Result};
use crate::session::dialer::{Dial, Target};
use crate::session::net::Net;
use crate::session::opening::{Handed, Opener};
use crate::session::owner::Streams;

/// A request to be connected.
pub(crate) struct Attempt {
    dial: Arc<Dial>,
    opened: Arc<Opened>,
}

/// The resulting connection.
struct Opened {
    net: Arc<Net>,
    conn: Mutex<Option<Arc<SendConn>>>,
}

impl Opened {
    fn conn(&self) -> MutexGuard<'_, Option<Arc<SendConn>>> {
        self.conn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Opener for Opened {
    fn is_bare(&self) -> bool {
        false
    }

    fn open(&self, handed: Handed) -> Result<Option<Arc<dyn Streams>>> {
        let Handed { link, peer, sock, seal } = handed;
        let conn = SendConn::new(Arc::clone(&self.net), link, peer, sock, seal)?;
        conn.begin()?;
        *self.conn() = Some(Arc::clone(&conn));
        Ok(Some(conn))
    }
}

impl Attempt {
    /// Starts connecting to a listener.
    ///
    /// # Errors
    /// When the control thread cannot be started.
    pub(crate) fn start(net: &Arc<Net>, target: Target) -> Result<Arc<Self>> {
        let opened = Arc::new(Opened { net: Arc::clone(net), conn: Mutex::new(None) });
        let dial = Dial::connect(Arc::clone(net), target, Arc::clone(&opened) as _)?;
        Ok(Arc::new(Self { dial, opened }))
    }

    fn opened(&self, result: Result<()>) -> Result<Arc<SendConn>> {
        result?;
        self.opened.conn().clone().ok_or_else(|| Error::internal("a dial ended well, and opened no connection"))
    }

    /// The connection, once it exists; the failure, once the attempt has failed.
    pub(crate) fn result(&self) -> Option<Result<Arc<SendConn>>> {
        self.dial.result().map(|result| self.opened(result))
    }

    /// Waits until the attempt has succeeded or failed; it has a deadline of its own.
    ///
    /// # Errors
    /// The attempt's error.
    pub(crate) fn wait(&self) -> Result<Arc<SendConn>> {
        let result = self.dial.wait();
        self.opened(result)
    }

    /// Gives up: the connection is not wanted any more.
    pub(crate) fn cancel(&self) {
        self.dial.cancel();
        // No lock is held here: a close may wait.
        let unused = self.opened.conn().take();
        if let Some(conn) = unused {
            conn.close();
        }
    }
}
