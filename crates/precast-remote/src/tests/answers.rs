//! What single answers of a server do.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::http::{Http, s3, send};
use crate::{
    carrier::{Carrier, How, MARKER},
    remote::Remote,
};

const LIMIT: Duration = Duration::from_secs(60);
/// What S3 answers to a create that meets another one.
const CONFLICT: &[u8] = b"<Error><Code>ConditionalRequestConflict</Code></Error>";

#[test]
fn a_conflict_is_no_file() {
    // 409 to the first create, whose other writer then fails: there is no file.
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let server = Http::start(move |asked, stream| {
        match (&*asked.method, count.fetch_add(1, Ordering::Relaxed)) {
            ("PUT", 0) => send(stream, "409 Conflict", "", CONFLICT),
            ("PUT", _) => send(stream, "200 OK", "ETag: \"1\"\r\n", b""),
            _ => send(stream, "404 Not Found", "", b""),
        }
    });
    let carrier = s3(server.port, "", LIMIT, 0);
    let text = b"text";
    let made = carrier
        .create(MARKER, &mut io::Cursor::new(text), 4, How::New)
        .unwrap();
    assert!(made && asked.load(Ordering::Relaxed) == 3);
    // And one that never ends is an error, which says what the storage said.
    let server = Http::start(|asked, stream| match &*asked.method {
        "PUT" => send(stream, "409 Conflict", "", CONFLICT),
        _ => send(stream, "404 Not Found", "", b""),
    });
    let carrier = s3(server.port, "", LIMIT, 0);
    let refused = carrier
        .create(MARKER, &mut io::Cursor::new(text), 4, How::Content)
        .unwrap_err();
    assert!(
        refused.to_string().contains("ConditionalRequestConflict"),
        "{refused}"
    );
}

#[test]
fn a_redirect_to_another_host_is_refused() {
    let other = Http::start(|_, stream| send(stream, "200 OK", "", b"{\"layout\":1}"));
    let port = other.port;
    let server = Http::start(move |asked, stream| {
        let host = if asked.target.starts_with("/elsewhere") {
            format!("http://127.0.0.1:{port}")
        } else if asked.target.starts_with("/here") {
            String::new()
        } else {
            return send(
                stream,
                "200 OK",
                "",
                precast_store::marker::text().as_bytes(),
            );
        };
        let to = format!("Location: {host}/there/{MARKER}\r\n");
        send(stream, "302 Found", &to, b"");
    });
    let url = format!("http://127.0.0.1:{}", server.port);
    let refused = Remote::open(&format!("{url}/elsewhere")).err().unwrap();
    assert!(
        refused.to_string().contains("it redirects to another host"),
        "{refused}"
    );
    Remote::open(&format!("{url}/here")).unwrap();
}
