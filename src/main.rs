//! The command-line program `towline`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
