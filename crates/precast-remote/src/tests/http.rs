//! A server of HTTP on this machine whose answers a function makes, and the client of S3 for it.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use object_store::{
    BackoffConfig, ClientOptions, RetryConfig, aws::AmazonS3Builder, path::Path as At,
};

use crate::storage::Storage;

/// A request.
pub struct Asked {
    pub method: String,
    /// Path and query.
    pub target: String,
    /// All lines before the body, with the empty one.
    pub head: String,
    pub body: Vec<u8>,
}

impl Asked {
    /// Reads the request of a connection; none if it is no whole one.
    fn read(stream: &mut TcpStream) -> Option<Self> {
        let mut bytes = Vec::new();
        let mut chunk = vec![0; 1 << 16];
        loop {
            let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
            if let Some(end) = end {
                let body = bytes.split_off(end + 4);
                let head = String::from_utf8(bytes).ok()?;
                let mut words = head.split(' ').map(str::to_owned);
                let (method, target) = (words.next()?, words.next()?);
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(": ")?;
                    name.eq_ignore_ascii_case("content-length")
                        .then(|| value.parse::<usize>())
                });
                let mut asked = Self {
                    method,
                    target,
                    head,
                    body,
                };
                let length = length.and_then(Result::ok).unwrap_or(0);
                let had = asked.body.len();
                asked.body.resize(length.max(had), 0);
                stream.read_exact(&mut asked.body[had..]).ok()?;
                return Some(asked);
            }
            match stream.read(&mut chunk).ok()? {
                0 => return None,
                count => bytes.extend_from_slice(&chunk[..count]),
            }
        }
    }
}

/// A server that runs until it is dropped. Each connection is for one request.
pub struct Http {
    pub port: u16,
    stop: Arc<AtomicBool>,
}

impl Http {
    pub fn start(answer: impl Fn(Asked, &mut TcpStream) + Send + Sync + 'static) -> Self {
        crate::use_ring();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stop, answer) = (Arc::new(AtomicBool::new(false)), Arc::new(answer));
        let stopped = stop.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let answer = answer.clone();
                thread::spawn(move || {
                    if let Ok(mut stream) = stream
                        && let Some(asked) = Asked::read(&mut stream)
                    {
                        answer(asked, &mut stream);
                    }
                });
            }
        });
        Self { port, stop }
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Sends an answer.
pub fn send(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    // Whoever asked may be gone.
    let _ = stream
        .write_all(head.as_bytes())
        .and_then(|()| stream.write_all(body));
}

/// Returns the carrier for a folder of the bucket `models` on a port of this machine. It has much less patience than
/// that of users, so that thousands of faults take minutes.
pub fn s3(port: u16, at: &str, silence: Duration, retries: usize) -> Storage {
    crate::use_ring();
    let client = ClientOptions::new()
        .with_allow_http(true)
        .with_timeout_disabled()
        .with_read_timeout(silence);
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(1),
        max_backoff: Duration::from_millis(5),
        base: 2.0,
    };
    let retry = RetryConfig {
        backoff,
        max_retries: retries,
        retry_timeout: Duration::from_secs(60),
    };
    let store = AmazonS3Builder::new()
        .with_bucket_name("models")
        .with_endpoint(format!("http://127.0.0.1:{port}"))
        .with_access_key_id("test")
        .with_secret_access_key("testtest")
        .with_region("us-east-1")
        .with_client_options(client)
        .with_retry(retry)
        .build()
        .unwrap();
    Storage::new(Arc::new(store), At::from(at), true).unwrap()
}
