//! The command-line program `towline`.

fn main() -> std::process::ExitCode {
    towline::main()
}
