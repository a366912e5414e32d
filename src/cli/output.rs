//! Standard output, and the progress line on standard error.
//!
//! Guarantees: when the reader of our output goes away (`towline … | head`) the program ends quietly, as if by
//! SIGPIPE; progress appears on a terminal only and never mixes with rows. Children end with the program, so nothing
//! is left behind.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process;

use serde::Serialize;
use towline::os::error::{Error, Result};

/// What a shell reports for a program that SIGPIPE ended.
const EXIT_SIGPIPE: i32 = 128 + libc::SIGPIPE;

/// The name of standard output where a file is wanted.
pub(crate) const STDOUT: &str = "-";

/// Makes sure, before a run that takes its time, that its results can be written there. What is there already stays.
pub(crate) fn check_json(file: Option<&Path>) -> Result<()> {
    let Some(file) = file.filter(|file| *file != Path::new(STDOUT)) else { return Ok(()) };
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(file);
    opened.map(drop).map_err(|error| writing(file, &error))
}

/// Writes results as JSON, to a file or to standard output.
pub(crate) fn write_json(file: Option<&Path>, results: &impl Serialize) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let text = serde_json::to_string_pretty(results).map_err(|error| Error::internal(error.to_string()))?;
    if file == Path::new(STDOUT) {
        print(&(text + "\n"));
        return Ok(());
    }
    std::fs::write(file, text + "\n").map_err(|error| writing(file, &error))
}

/// Writes to standard output at once. Ends the program when the reader of a pipe has gone, or the output cannot be written.
pub(crate) fn print(text: impl AsRef<[u8]>) {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_ref()).and_then(|()| stdout.flush()) {
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
