fn main() -> std::process::ExitCode {
    precast::cli::main()
}
