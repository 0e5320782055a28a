//! Requests to a Hub.
//!
//! A request that meets a busy Hub or a broken connection is sent again, after the time that the Hub asks for. Files
//! lie on other hosts, to which the Hub redirects: over HTTPS, or to the Hub's own host. The token goes to the origin of
//! the Hub alone.

use std::{io, thread, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use reqwest::{
    Body, Method, RequestBuilder, Response, StatusCode,
    header::{self, HeaderMap, HeaderValue},
    redirect::Policy,
};
use tokio::{runtime::Runtime, sync::mpsc};
use url::Url;

use super::{
    address::Address,
    answer::{asked_wait, passes, said, whole, why},
};
use crate::{carrier::Source, error::RemoteError, work};

/// The form of requests for large files.
pub const LFS: &str = "application/vnd.git-lfs+json";
/// How often a request is sent.
pub const TRIES: u32 = 6;
/// The longest time that a Hub may ask to wait.
const PATIENCE: u64 = 330;
/// A connection that says nothing for so long is broken.
const SILENCE: Duration = Duration::from_secs(120);
/// Most redirects of a request.
const HOPS: usize = 8;
/// Bytes of a file that are read at once.
const CHUNK: usize = 1 << 20;
/// Most bytes of an answer that is read whole.
const LARGEST: usize = 64 << 20;

/// A Hub, and who asks.
pub struct Client {
    http: reqwest::Client,
    runtime: Runtime,
    endpoint: Url,
    token: Option<HeaderValue>,
    /// As `OWNER/REPO`, for errors.
    pub repo: String,
}

/// A request whose body is in memory.
pub struct Ask<'a> {
    pub method: Method,
    pub url: Url,
    pub body: Option<(&'static str, Bytes)>,
    /// What it is for, for errors: "read".
    pub what: &'static str,
    /// The file or folder, for errors.
    pub name: &'a str,
    /// Where a file begins.
    pub from: u64,
}

/// Why a request has no answer.
enum Failed {
    /// It can be sent again.
    Lost(String),
    Fatal(RemoteError),
}

impl Client {
    pub fn new(endpoint: Url, token: Option<&str>, to: &Address) -> Result<Self, RemoteError> {
        let repo = format!("{}/{}", to.owner, to.repo);
        let failed = |why: String| RemoteError::Storage {
            what: "reach",
            name: endpoint.to_string(),
            why,
        };
        let http = reqwest::Client::builder()
            .redirect(Policy::none())
            .connect_timeout(Duration::from_secs(30))
            .read_timeout(SILENCE)
            .user_agent(concat!("precast/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| failed(said(&e)))?;
        let token = token.map(|token| {
            let value = HeaderValue::from_str(&format!("Bearer {token}"));
            value.map(|mut value| {
                value.set_sensitive(true);
                value
            })
        });
        let token = token.transpose();
        let token = token.map_err(|_| failed("the token has other characters".to_owned()))?;
        Ok(Self {
            http,
            runtime: work::runtime(&repo)?,
            endpoint,
            token,
            repo,
        })
    }

    /// Returns a URL of the Hub. Each part is one step of its path, whatever letters it has.
    pub fn url<'a>(&self, parts: impl IntoIterator<Item = &'a str>) -> Url {
        let mut url = self.endpoint.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(parts);
        }
        url
    }

    /// Returns a URL that the Hub named, if a client may follow it.
    pub fn named(&self, from: &Url, text: &str, name: &str) -> Result<Url, RemoteError> {
        let url = from.join(text).ok();
        let good = |url: &Url| {
            url.scheme() == "https" || (url.scheme() == "http" && self.is_own_host(url))
        };
        url.filter(good).ok_or_else(|| {
            RemoteError::damaged(
                name,
                "the Hub sends to a place without encryption".to_owned(),
            )
        })
    }

    /// Returns whether plain HTTP to this host is as good as to the Hub, which is then on this machine.
    fn is_own_host(&self, url: &Url) -> bool {
        self.endpoint.scheme() == "http" && url.host() == self.endpoint.host()
    }

    fn is_own(&self, url: &Url) -> bool {
        url.origin() == self.endpoint.origin()
    }

    /// Sends a request, and returns the good answer; none if there is no such file.
    pub fn ask(&self, ask: &Ask<'_>) -> Result<Option<Response>, RemoteError> {
        let answer = self.tries(ask.what, ask.name, || {
            let mut url = ask.url.clone();
            for _ in 0..HOPS {
                let mut request = self.http.request(ask.method.clone(), url.clone());
                if let Some((kind, body)) = &ask.body {
                    request = request.header(header::CONTENT_TYPE, *kind);
                    if *kind == LFS {
                        request = request.header(header::ACCEPT, LFS);
                    }
                    request = request.body(body.clone());
                }
                if ask.from > 0 {
                    request = request.header(header::RANGE, format!("bytes={}-", ask.from));
                }
                let answer = self.send(request, &url)?;
                if !answer.status().is_redirection() {
                    return Ok(answer);
                }
                let to = answer.headers().get(header::LOCATION);
                let to = to.and_then(|to| to.to_str().ok()).unwrap_or_default();
                let to = self.named(&url, to, ask.name).map_err(Failed::Fatal)?;
                // What is sent goes to the Hub alone.
                if ask.body.is_some() && !self.is_own(&to) {
                    break;
                }
                url = to;
            }
            let why = "the Hub redirects too often".to_owned();
            Err(Failed::Fatal(RemoteError::damaged(ask.name, why)))
        })?;
        self.judged(answer, ask.what, ask.name)
    }

    /// Sends a request, and reads the good answer; none if there is no such file.
    pub fn text(&self, ask: &Ask<'_>) -> Result<Option<(HeaderMap, Vec<u8>)>, RemoteError> {
        let Some(mut answer) = self.ask(ask)? else {
            return Ok(None);
        };
        let headers = std::mem::take(answer.headers_mut());
        let text = self.runtime.block_on(whole(answer, LARGEST));
        let text = text.map_err(|why| RemoteError::Storage {
            what: ask.what,
            name: ask.name.to_owned(),
            why,
        })?;
        Ok(Some((headers, text)))
    }

    /// Sends a whole file to a place that the Hub named, and returns the headers of the answer.
    pub fn put(
        &self,
        url: &Url,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
    ) -> Result<HeaderMap, RemoteError> {
        let lost = |source| {
            Failed::Fatal(RemoteError::Read {
                name: name.to_owned(),
                source,
            })
        };
        let answer = self.tries("write", name, || {
            from.rewind().map_err(lost)?;
            let (send, chunks) = mpsc::channel::<io::Result<Bytes>>(2);
            let body = stream::unfold(chunks, |mut chunks| async {
                chunks.recv().await.map(|chunk| (chunk, chunks))
            });
            let request = self.http.put(url.clone());
            let request = request.header(header::CONTENT_LENGTH, bytes);
            let request = self.with_token(request, url).body(Body::wrap_stream(body));
            let answer = self.runtime.spawn(async { request.send().await });
            let mut left = bytes;
            while left > 0 {
                let mut chunk = vec![0; left.min(CHUNK as u64) as usize];
                if let Err(e) = from.read_exact(&mut chunk) {
                    answer.abort();
                    return Err(lost(e));
                }
                left -= chunk.len() as u64;
                // An answer before the end of the file is an error, which is seen below.
                if send.blocking_send(Ok(chunk.into())).is_err() {
                    break;
                }
            }
            drop(send);
            let answer = self.runtime.block_on(answer);
            let answer = answer.map_err(|e| Failed::Lost(e.to_string()))?;
            answer.map_err(|e| Failed::Lost(said(&e)))
        })?;
        let answer = self.judged(answer, "write", name)?;
        answer
            .map(|mut answer| std::mem::take(answer.headers_mut()))
            .ok_or_else(|| RemoteError::Storage {
                what: "write",
                name: name.to_owned(),
                why: "the Hub named a place for it that is not there".to_owned(),
            })
    }

    /// Waits for what the threads of this client do.
    pub fn wait<F: Future>(&self, what: F) -> F::Output {
        self.runtime.block_on(what)
    }

    fn with_token(&self, request: RequestBuilder, to: &Url) -> RequestBuilder {
        match &self.token {
            Some(token) if self.is_own(to) => request.header(header::AUTHORIZATION, token),
            _ => request,
        }
    }

    fn send(&self, request: RequestBuilder, to: &Url) -> Result<Response, Failed> {
        let request = self.with_token(request, to);
        let answer = self.wait(async { request.send().await });
        answer.map_err(|e| Failed::Lost(said(&e)))
    }

    /// Sends a request until there is an answer that is worth a look.
    fn tries(
        &self,
        what: &'static str,
        name: &str,
        mut send: impl FnMut() -> Result<Response, Failed>,
    ) -> Result<Response, RemoteError> {
        let mut last = String::new();
        for tried in 0..TRIES {
            let (why, wait) = match send() {
                Ok(answer) if !passes(answer.status()) => return Ok(answer),
                Ok(answer) => (answer.status().to_string(), asked_wait(answer.headers())),
                Err(Failed::Lost(why)) => (why, None),
                Err(Failed::Fatal(error)) => return Err(error),
            };
            last = why;
            let wait = wait.map_or(Duration::from_millis(500 << tried), Duration::from_secs);
            if wait.as_secs() > PATIENCE {
                last = format!(
                    "{last}, and the Hub asks to wait {} seconds",
                    wait.as_secs()
                );
                break;
            }
            if tried + 1 < TRIES {
                thread::sleep(wait);
            }
        }
        Err(RemoteError::Storage {
            what,
            name: name.to_owned(),
            why: last,
        })
    }

    /// Returns a good answer; none if there is no such file.
    fn judged(
        &self,
        answer: Response,
        what: &'static str,
        name: &str,
    ) -> Result<Option<Response>, RemoteError> {
        let status = answer.status();
        if status.is_success() {
            return Ok(Some(answer));
        }
        let headers = answer.headers().clone();
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let code = header("X-Error-Code").unwrap_or_default();
        let missing = |what: String| RemoteError::NoRepository {
            url: self.endpoint.to_string(),
            what,
        };
        match (status, code) {
            (_, "RepoNotFound") => return Err(missing(format!("repository `{}`", self.repo))),
            (_, "RevisionNotFound") => {
                return Err(missing(format!("such revision of `{}`", self.repo)));
            }
            (StatusCode::NOT_FOUND, _) => return Ok(None),
            _ => {}
        }
        let why = self.runtime.block_on(why(answer));
        let why = format!("{status}: {}", why.trim());
        let name = name.to_owned();
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => RemoteError::Denied {
                name: self.repo.clone(),
                why: match self.token {
                    Some(_) => format!("the Hub refuses the token, or what it may do ({why})"),
                    None => format!("there is no token ({why})"),
                },
            },
            StatusCode::PRECONDITION_FAILED | StatusCode::CONFLICT => RemoteError::Moved { name },
            _ => RemoteError::Storage { what, name, why },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(endpoint: &str) -> Client {
        crate::use_ring();
        let to = Address::parse("hf://org/model").unwrap();
        Client::new(Url::parse(endpoint).unwrap(), Some("secret"), &to).unwrap()
    }

    #[test]
    fn a_url_of_the_hub_has_its_path_letter_by_letter() {
        let hub = client("https://hub.example.org/mirror/");
        let url = hub.url([
            "org",
            "model",
            "resolve",
            "refs/pr/1",
            "a%2Fb",
            "mod\u{e8}le 1?",
        ]);
        let path = "/mirror/org/model/resolve/refs%2Fpr%2F1/a%252Fb/mod%C3%A8le%201%3F";
        assert_eq!(url.path(), path);
    }

    #[test]
    fn a_redirect_is_encrypted_and_the_token_stays_at_home() {
        let hub = client("https://hub.example.org");
        let from = hub.url(["a"]);
        let go = |hub: &Client, text: &str| hub.named(&from, text, "a");
        assert_eq!(
            go(&hub, "/b").unwrap().as_str(),
            "https://hub.example.org/b"
        );
        assert!(go(&hub, "https://cdn.example.org/x?signed").is_ok());
        for bad in [
            "http://hub.example.org/b",
            "http://127.0.0.1/",
            "file:///etc/passwd",
            "http://[",
        ] {
            assert!(go(&hub, bad).is_err(), "{bad}");
        }
        let local = client("http://127.0.0.1:9000");
        assert!(go(&local, "http://127.0.0.1:9001/x").is_ok());
        assert!(go(&local, "http://10.0.0.1/x").is_err());
        let has_token = |hub: &Client, url: &str| {
            let url = Url::parse(url).unwrap();
            let request = hub
                .with_token(hub.http.get(url.clone()), &url)
                .build()
                .unwrap();
            request.headers().contains_key(header::AUTHORIZATION)
        };
        assert!(has_token(&hub, "https://hub.example.org/b"));
        assert!(has_token(&local, "http://127.0.0.1:9000/b"));
        for other in [
            "https://cdn.example.org/",
            "https://hub.example.org:444/",
            "https://x.hub.example.org/",
            "http://hub.example.org/",
        ] {
            assert!(!has_token(&hub, other), "{other}");
        }
        assert!(!has_token(&local, "http://127.0.0.1:9001/b"));
    }
}
