//! Manual pages and shell completions from the command line's own description, for packages.

use std::fs;
use std::path::{Path, PathBuf};

use crate::os::error::{Error, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::{CommandLine, Verdict};

/// Write the manual pages (man1/) and the shell completions (completions/) into a directory
#[derive(Args)]
pub(crate) struct Options {
    /// The directory, made if it is not there
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Writes them.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    write_all(&options.dir).map_err(|error| Error::system("writing manual pages and completions", &error))?;
    Ok(Verdict::Good)
}

fn write_all(dir: &Path) -> std::io::Result<()> {
    let (man, completions) = (dir.join("man1"), dir.join("completions"));
    fs::create_dir_all(&man)?;
    fs::create_dir_all(&completions)?;
    clap_mangen::generate_to(CommandLine::command(), man)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut CommandLine::command(), "towline", &completions)?;
    }
    Ok(())
}
