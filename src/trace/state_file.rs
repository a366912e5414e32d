//! The process's state in a file, renewed each second on a thread of its own: a file system that hangs delays no other
//! thread.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::claim::{claim, is_older};
use super::live::{KEPT_IN_FILE, place};
use super::metrics;
use super::process::Request;
use super::say::host;
use super::service::ask;

/// How often the file is renewed.
const BEAT: Duration = Duration::from_secs(1);

/// File sizes are multiples of this.
const BLOCK: usize = 4096;

/// The file that this process keeps, once it is there, with the process's number, since a forked child has its
/// parent's here; locked while it is written.
static STATE: Mutex<Option<(u32, PathBuf)>> = Mutex::new(None);

/// The process ends: its state stays as it is.
static LEFT: AtomicBool = AtomicBool::new(false);

/// Keeps the file for as long as the process lives.
pub(super) fn keep(path: &Path, requests: &Sender<Request>) {
    if let Some(dir) = path.parent() {
        place::sweep(dir, &format!("{}-", host()), place::ENDING);
    }
    loop {
        renew(path, requests);
        std::thread::sleep(BEAT);
    }
}

/// Renews the file, or removes it while there is nothing to report.
fn renew(path: &Path, requests: &Sender<Request>) {
    // Another thread may hold it when the process ends; in a child that was forked while its parent wrote, for ever.
    let Ok(mut kept) = STATE.try_lock() else { return };
    if LEFT.load(Ordering::Acquire) {
        return;
    }
    match ask(requests, |reply| Request::Status(KEPT_IN_FILE, reply)) {
        // The profiler is busy: without a new state the old one shows no heartbeat.
        None => {}
        Some(None) => drop(kept.take().map(|(_, path)| std::fs::remove_file(path))),
        Some(Some(text)) => {
            let ours = kept.as_ref().filter(|(owner, _)| *owner == std::process::id()).map(|(_, path)| path.clone());
            let path = ours.unwrap_or_else(|| claim(path, |path| is_older(path, 10 * BEAT)).0);
            let text = with_room(text);
            let written = metrics::replace(&path, &text).or_else(|_| metrics::overwrite(&path, &text));
            if written.is_ok() {
                *kept = Some((std::process::id(), path));
            }
        }
    }
}

/// Blanks at the end, so that the file has room for a longer state when the disk is full.
fn with_room(mut text: String) -> String {
    let length = (text.len() + text.len() / 4).next_multiple_of(BLOCK);
    text.extend(std::iter::repeat_n(' ', length - text.len()));
    text
}

/// The process ends: the file gets its last words, or goes too when there are none. It may wait for a file system.
pub(super) fn leave(last_words: Option<String>) {
    LEFT.store(true, Ordering::Release);
    let kept = STATE.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some((owner, path)) = kept
        && owner == std::process::id()
    {
        let _ = match last_words {
            Some(text) => metrics::replace(&path, &text),
            None => std::fs::remove_file(path),
        };
    }
}
