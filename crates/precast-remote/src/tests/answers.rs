//! What single answers of a server do.

use super::http::{Http, send};
use crate::remote::{MARKER, Remote};

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
