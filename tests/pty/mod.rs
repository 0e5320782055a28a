//! Runs a command in a terminal of a given size.

use std::{
    fs::{File, OpenOptions},
    io::Read,
    num::NonZero,
    os::unix::ffi::OsStrExt,
    path::Path,
    process::{Command, Stdio},
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

/// The output of a command in a terminal.
pub struct Shown {
    pub code: i32,
    /// With all escapes.
    pub text: String,
    /// The screen at the end, without empty lines below.
    #[allow(dead_code, reason = "each test target uses a part of it")]
    pub screen: String,
}

/// Runs `command` with its three standard streams on a new terminal that is `columns` wide.
pub fn run(command: &mut Command, columns: u16) -> Shown {
    const ROWS: u16 = 200;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
    let own = openpt(flags).unwrap();
    grantpt(&own).unwrap();
    unlockpt(&own).unwrap();
    let size = Winsize {
        ws_row: ROWS,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&own, size).unwrap();
    let name = ptsname(&own, Vec::new()).unwrap();
    let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
    let side = || {
        Stdio::from(
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(path)
                .unwrap(),
        )
    };
    let mut child = command
        .stdin(side())
        .stdout(side())
        .stderr(side())
        .spawn()
        .unwrap();
    // The command holds the descriptors of the terminal's side too: while it does, the end is never seen.
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let (mut bytes, mut own, mut part) = (Vec::new(), File::from(own), [0; 4096]);
    // When the last process on it is gone, reading a terminal is an error and not an end.
    while let Ok(read @ 1..) = own.read(&mut part) {
        bytes.extend(&part[..read]);
    }
    let cells = |count| NonZero::new(count).unwrap();
    let mut screen = vt100::Parser::new(cells(ROWS), cells(columns), 0);
    screen.process(&bytes);
    Shown {
        code: child.wait().unwrap().code().unwrap(),
        text: String::from_utf8(bytes).unwrap().replace("\r\n", "\n"),
        screen: screen.screen().contents().trim_end().to_owned(),
    }
}

/// Returns `text` with colours as words, so that a snapshot can be read.
#[allow(dead_code, reason = "each test target uses a part of it")]
pub fn visible(text: &str) -> String {
    let words = [
        ("\x1b[0m", "‹›"),
        ("\x1b[39m", "‹›"),
        ("\x1b[22m", "‹›"),
        ("\x1b[1m", "‹bold›"),
        ("\x1b[2m", "‹dim›"),
        ("\x1b[31m", "‹red›"),
        ("\x1b[32m", "‹green›"),
        ("\x1b[33m", "‹yellow›"),
        ("\x1b[34m", "‹blue›"),
        ("\x1b[36m", "‹cyan›"),
    ];
    let shown = words.iter().fold(text.to_owned(), |text, (code, word)| {
        text.replace(code, word)
    });
    shown.replace('\x1b', "␛")
}
