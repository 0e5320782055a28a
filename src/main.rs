//! The `precast` command: everything is in the library.

fn main() -> std::process::ExitCode {
    precast::cli::main()
}
