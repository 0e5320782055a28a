//! `precast-remote`: what `precast` starts to reach a remote. See `precast_remote::protocol`.

use std::{
    io::{BufReader, stdin, stdout},
    process::ExitCode,
};

fn main() -> ExitCode {
    precast_remote::use_ring();
    let done = precast_remote::protocol::answer(BufReader::new(stdin()), stdout());
    if done {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
