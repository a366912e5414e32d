//! Standard output, and the progress line on standard error.
//!
//! Guarantees: when the reader of our output goes away (`towline … | head`) the program ends quietly, as if by
//! SIGPIPE; progress appears on a terminal only and never mixes with rows. Children end with the program, so nothing
//! is left behind.

use std::fs::{self, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::os::error::{Error, Result};
use serde::Serialize;

/// The exit status that a shell reports for a program that SIGPIPE ended.
const EXIT_SIGPIPE: i32 = 128 + libc::SIGPIPE;

/// The name of standard output where a file is wanted.
pub(crate) const STDOUT: &str = "-";

/// Whether standard output was closed when the program started.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Rust's runtime opens /dev/null in place of a closed standard output before `main`; the initialisers of a program run
/// before that.
#[used]
// SAFETY: the section holds addresses of functions in C's convention, which the C runtime calls once; that it gives
// them arguments does not matter to one that takes none.
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = {
    extern "C" fn look() {
        // SAFETY: the call touches no memory, and a descriptor that is not open is an error only.
        let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
        CLOSED.store(flags == -1, Ordering::Relaxed);
    }
    look
};

/// Fails when standard output was closed, so that no reader could see the results.
pub(crate) fn check_stdout() -> Result<()> {
    if CLOSED.load(Ordering::Relaxed) {
        return Err(Error::usage("standard output is closed").with_hint("redirect it to /dev/null if it is not needed"));
    }
    Ok(())
}

/// Checks before a long run that its results can be written there. An existing file keeps its contents, and no new file
/// is left behind.
pub(crate) fn check_json(file: Option<&Path>) -> Result<()> {
    let Some(file) = file.filter(|file| *file != Path::new(STDOUT)) else { return Ok(()) };
    let there = OpenOptions::new().append(true).open(file);
    let outcome = match there.map(drop) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            match OpenOptions::new().append(true).create_new(true).open(file) {
                // A symbolic link whose target does not exist yet.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                made => made.and_then(|_| fs::remove_file(file)),
            }
        }
        outcome => outcome,
    };
    outcome.map_err(|error| writing(file, &error))
}

/// Writes results as JSON, to a file or to standard output.
pub(crate) fn write_json(file: Option<&Path>, results: &impl Serialize) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let text = serde_json::to_string_pretty(results).map_err(|error| Error::internal(error.to_string()))?;
    if file == Path::new(STDOUT) {
        print(&(text + "\n"));
        return Ok(());
    }
    fs::write(file, text + "\n").map_err(|error| writing(file, &error))
}

/// Writes to standard output at once. Ends the program when the reader of a pipe has gone, or the output cannot be
/// written.
pub(crate) fn print(text: impl AsRef<[u8]>) {
    let mut stdout = io::stdout().lock();
    check_written(stdout.write_all(text.as_ref()).and_then(|()| stdout.flush()));
}

/// Ends the program when standard output was not written.
pub(crate) fn check_written(outcome: io::Result<()>) {
    match outcome {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => process::exit(EXIT_SIGPIPE),
        Err(error) => {
            eprintln!("towline: writing to standard output failed: {error}");
            process::exit(super::EXIT_FAILED.into());
        }
    }
}

fn writing(file: &Path, error: &io::Error) -> Error {
    Error::system(format!("writing {}", file.display()), error)
}

/// Lines for standard output, and one line of progress.
pub(crate) struct Output {
    /// Standard output is for JSON: lines go to standard error.
    on_stderr: bool,
    shows_progress: bool,
    progress_width: usize,
}

impl Output {
    pub(crate) fn new() -> Self {
        Self { on_stderr: false, shows_progress: io::stderr().is_terminal(), progress_width: 0 }
    }

    /// The same where results are also written there as JSON.
    pub(crate) fn with_json(file: Option<&Path>) -> Self {
        Self { on_stderr: file == Some(Path::new(STDOUT)), ..Self::new() }
    }

    /// Prints one line at once.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) {
        self.clear_progress();
        let line = format!("{}\n", text.as_ref());
        if self.on_stderr { eprint!("{line}") } else { print(line) }
    }

    /// Replaces the progress line, on a terminal.
    pub(crate) fn progress(&mut self, text: impl FnOnce() -> String) {
        if self.shows_progress {
            let text = text();
            eprint!("\r{text:<width$}", width = self.progress_width);
            self.progress_width = text.chars().count();
        }
    }

    fn clear_progress(&mut self) {
        if self.progress_width > 0 {
            eprint!("\r{:width$}\r", "", width = self.progress_width);
            self.progress_width = 0;
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.clear_progress();
    }
}
