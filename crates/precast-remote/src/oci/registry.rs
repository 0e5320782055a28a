//! One repository of a registry: documents, tags and blobs.
//!
//! `oci-client` logs in, sends blobs and documents, and reads blobs, whose digests it checks. It reads documents and lists of
//! tags without a limit, and deletes nothing: that is asked for here, with its tokens.
//!
//! A blob is sent in one request, as some registries refuse parts. A large one may take long, so its time is not limited,
//! but a registry that takes nothing for a while is given up.

use std::{
    future::Future,
    io::{self, Read},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use oci_client::{
    Client, Reference, RegistryOperation,
    client::{ClientConfig, ClientProtocol},
    errors::OciDistributionError,
    secrets::RegistryAuth,
};
use precast_store::Digest;
use reqwest::{Method, Response, StatusCode, header};
use serde::Deserialize;
use tokio::{runtime::Runtime, sync::mpsc, time::timeout};

use super::{
    blob::Arriving,
    documents::{self, Blob},
    login::credentials,
    refusal::{broken, failed, is_busy, is_missing, is_passing, shortened},
};
use crate::{carrier::Body, error::RemoteError, storage, work};

/// How long a connection may say nothing.
const SILENCE: Duration = Duration::from_secs(120);
/// How long a registry may take to keep a blob that has arrived: some copy it once more.
const KEEPING: Duration = Duration::from_secs(900);
/// A large blob is read in pieces of this size, and a few of them are on their way.
const PIECE: u64 = 1 << 20;
const PIECES: usize = 4;
/// How often what a registry refuses for a while is asked for again, after twice the time each time.
const TRIES: u32 = 6;
const PAUSE: Duration = Duration::from_millis(100);
/// More tags than any repository of use has.
const MOST_TAGS: usize = 100_000;
const PAGE: usize = 1000;
const LARGEST_PAGE: usize = 16 << 20;

type Sent = Result<String, OciDistributionError>;

/// A repository.
pub struct Registry {
    at: Reference,
    /// `https://HOST/v2/REPOSITORY`.
    url: String,
    client: Client,
    /// Without a limit on the time until an answer, for what takes long to send.
    sending: Client,
    web: reqwest::Client,
    auth: RegistryAuth,
    operation: RegistryOperation,
    token: Mutex<Option<String>>,
    runtime: Arc<Runtime>,
}

impl Registry {
    /// Opens a repository, with the credentials that `docker login` keeps. A `local` registry is one of this machine,
    /// without TLS.
    pub fn open(at: Reference, local: bool, writes: bool) -> Result<Self, RemoteError> {
        let host = at.resolve_registry().to_owned();
        let failed = |why: String| RemoteError::Storage {
            what: "reach",
            name: host.clone(),
            why,
        };
        let config = |read_timeout| ClientConfig {
            protocol: match local {
                true => ClientProtocol::Http,
                false => ClientProtocol::Https,
            },
            use_monolithic_push: true,
            read_timeout,
            connect_timeout: Some(SILENCE),
            user_agent: concat!("precast/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let client =
            |limit| Client::try_from(config(limit)).map_err(|e| failed(storage::chain(&e)));
        let (client, sending) = (client(Some(SILENCE))?, client(None)?);
        let web = reqwest::Client::builder()
            .read_timeout(SILENCE)
            .connect_timeout(SILENCE)
            .user_agent(concat!("precast/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| failed(storage::chain(&e)))?;
        let auth = credentials(&host)?;
        let runtime = Arc::new(work::runtime(&host)?);
        runtime.block_on(async {
            client.store_auth_if_needed(&host, &auth).await;
            sending.store_auth_if_needed(&host, &auth).await;
        });
        let scheme = if local { "http" } else { "https" };
        Ok(Self {
            url: format!("{scheme}://{host}/v2/{}", at.repository()),
            at,
            client,
            sending,
            web,
            auth,
            operation: match writes {
                true => RegistryOperation::Push,
                false => RegistryOperation::Pull,
            },
            token: Mutex::new(None),
            runtime,
        })
    }

    /// Returns all tags; none if the repository is not there.
    pub fn tags(&self) -> Result<Vec<String>, RemoteError> {
        #[derive(Deserialize)]
        struct Page {
            tags: Option<Vec<String>>,
        }
        let name = "the list of tags";
        let mut all: Vec<String> = Vec::new();
        loop {
            let last = all
                .last()
                .map_or(String::new(), |last| format!("&last={last}"));
            let path = format!("tags/list?n={PAGE}{last}");
            let answer = self.ask(Method::GET, &path, "list", name)?;
            if answer.status() == StatusCode::NOT_FOUND {
                return Ok(all);
            }
            let answer = self.good(answer, "list", name)?;
            let more = answer.headers().contains_key(header::LINK);
            let text = self.limited(answer, LARGEST_PAGE, name)?;
            let damaged = |why: String| RemoteError::damaged(name, why);
            let page: Page = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
            let tags = page.tags.unwrap_or_default();
            let ends = !more || tags.is_empty();
            // They go into a URL, and a page that begins again would have no end.
            let is_tag = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            if let Some(bad) = tags.iter().find(|tag| !tag.chars().all(is_tag)) {
                return Err(damaged(format!("`{}` is no tag", bad.escape_debug())));
            }
            if all.len() + tags.len() > MOST_TAGS {
                return Err(damaged(format!("it has more than {MOST_TAGS} tags")));
            }
            all.extend(tags);
            if ends {
                all.sort();
                all.dedup();
                return Ok(all);
            }
        }
    }

    /// Returns the document that a tag or a digest names; none if there is none.
    pub fn document(&self, reference: &str) -> Result<Option<Vec<u8>>, RemoteError> {
        let answer = self.ask(
            Method::GET,
            &format!("manifests/{reference}"),
            "read",
            reference,
        )?;
        if answer.status() == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        let answer = self.good(answer, "read", reference)?;
        let text = self.limited(answer, documents::LARGEST, reference)?;
        let hex = reference.strip_prefix("sha256:");
        if hex.is_some_and(|hex| hex != Digest::of(&text).hex()) {
            return Err(RemoteError::damaged(
                reference,
                "its content has another digest",
            ));
        }
        Ok(Some(text))
    }

    /// Writes a document under a tag or its digest, whatever is there.
    pub fn put_document(
        &self,
        reference: &str,
        media_type: &'static str,
        text: &[u8],
    ) -> Result<(), RemoteError> {
        // A digest in place of a tag leads to the right URL, and `oci-client` expects a tag there.
        let at = self.reference(reference);
        let put = self.again(|| {
            let (client, at, text) = (self.client.clone(), at.clone(), text.to_vec());
            async move {
                let media_type = header::HeaderValue::from_static(media_type);
                client.push_manifest_raw(&at, text, media_type).await
            }
        });
        put.map(|_| ()).map_err(|e| failed("write", reference, &e))
    }

    /// Deletes what a tag names. Not every registry lets a tag be deleted alone: then the document goes, with all its tags.
    pub fn delete(&self, tag: &str) -> Result<(), RemoteError> {
        let Some(text) = self.document(tag)? else {
            return Ok(());
        };
        let digest = documents::name(&Digest::of(&text));
        for reference in [tag, &digest] {
            let path = format!("manifests/{reference}");
            let answer = self.ask(Method::DELETE, &path, "delete", tag)?;
            match answer.status() {
                StatusCode::NOT_FOUND => return Ok(()),
                StatusCode::BAD_REQUEST | StatusCode::METHOD_NOT_ALLOWED => {}
                _ => return self.good(answer, "delete", tag).map(|_| ()),
            }
        }
        Err(RemoteError::Storage {
            what: "delete",
            name: tag.to_owned(),
            why: "this registry deletes nothing when asked by its API: allow it there, or delete the tag with the \
                  registry's own tool"
                .to_owned(),
        })
    }

    /// Returns whether the repository has a blob.
    pub fn has(&self, name: &str, blob: &Blob) -> Result<bool, RemoteError> {
        let path = format!("blobs/{}", blob.name());
        let answer = self.ask(Method::HEAD, &path, "look at", name)?;
        if answer.status() == StatusCode::NOT_FOUND {
            return Ok(false);
        }
        self.good(answer, "look at", name).map(|_| true)
    }

    /// Opens a blob; none if it is not there.
    pub fn open_blob(&self, name: &str, blob: &Blob) -> Result<Option<Body>, RemoteError> {
        let opened = self.again(|| {
            let (client, at, digest) = (self.client.clone(), self.at.clone(), blob.name());
            async move { client.pull_blob_stream(&at, &*digest).await }
        });
        let found = match opened {
            Ok(found) => found,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(failed("read", name, &error)),
        };
        if found
            .content_length
            .is_some_and(|bytes| bytes != blob.bytes)
        {
            let bytes = found.content_length.unwrap_or_default();
            let why = format!("its manifest says {} bytes, and it has {bytes}", blob.bytes);
            return Err(RemoteError::damaged(name, why));
        }
        let (client, at, runtime) = (&self.client, &self.at, &self.runtime);
        let read = Arriving::new(client.clone(), at.clone(), *blob, found, runtime.clone());
        Ok(Some(Body {
            bytes: blob.bytes,
            read: Box::new(read),
        }))
    }

    /// Sends a blob that is in memory, unless the registry has it.
    pub fn put_small(&self, name: &str, content: &[u8]) -> Result<Blob, RemoteError> {
        let blob = Blob::of(content);
        if !self.has(name, &blob)? {
            let content = Bytes::copy_from_slice(content);
            let put = self.again(|| {
                let (client, at, content) = (self.client.clone(), self.at.clone(), content.clone());
                async move {
                    let whole = stream::iter([Ok(content)]);
                    (client.push_blob_stream(&at, whole, &blob.name(), Some(blob.bytes))).await
                }
            });
            put.map_err(|e| failed("write", name, &e))?;
        }
        Ok(blob)
    }

    /// Sends a blob of any size.
    pub fn put(&self, name: &str, blob: &Blob, from: &mut dyn Read) -> Result<(), RemoteError> {
        let (pieces, mut taken) = mpsc::channel::<Result<Bytes, OciDistributionError>>(PIECES);
        let (client, at, blob) = (self.sending.clone(), self.at.clone(), *blob);
        let sending = self.runtime.spawn(async move {
            let content = stream::poll_fn(move |context| taken.poll_recv(context));
            (client.push_blob_stream(&at, content, &blob.name(), Some(blob.bytes))).await
        });
        let stuck = || {
            sending.abort();
            RemoteError::Storage {
                what: "write",
                name: name.to_owned(),
                why: "the registry takes nothing more".to_owned(),
            }
        };
        let mut left = blob.bytes;
        while left > 0 {
            let mut piece = vec![0; left.min(PIECE) as usize];
            if let Err(source) = from.read_exact(&mut piece) {
                sending.abort();
                let name = name.to_owned();
                return Err(RemoteError::Read { name, source });
            }
            left -= piece.len() as u64;
            let send = async { timeout(SILENCE, pieces.send(Ok(piece.into()))).await };
            match self.runtime.block_on(send) {
                Ok(Ok(())) => {}
                // The request has ended, and says why.
                Ok(Err(_)) => break,
                Err(_) => return Err(stuck()),
            }
        }
        drop(pieces);
        let handle = &mut { sending };
        let ended = self
            .runtime
            .block_on(async { timeout(KEEPING, &mut *handle).await });
        let Ok(ended) = ended else {
            handle.abort();
            return Err(RemoteError::Storage {
                what: "write",
                name: name.to_owned(),
                why: "the registry does not say that it has it".to_owned(),
            });
        };
        let sent: Sent = ended.unwrap_or_else(|e| Err(broken(&e)));
        sent.map(|_| ()).map_err(|e| failed("write", name, &e))
    }

    fn reference(&self, tag: &str) -> Reference {
        let (registry, repository) = (
            self.at.registry().to_owned(),
            self.at.repository().to_owned(),
        );
        Reference::with_tag(registry, repository, tag.to_owned())
    }

    /// Asks the registry, again where it refuses for a while, and with a token where it wants one.
    fn ask(
        &self,
        method: Method,
        path: &str,
        what: &'static str,
        name: &str,
    ) -> Result<Response, RemoteError> {
        let url = format!("{}/{path}", self.url);
        let accept = [
            documents::INDEX,
            documents::MANIFEST,
            "application/vnd.docker.distribution.manifest.list.v2+json",
            "application/vnd.docker.distribution.manifest.v2+json",
        ];
        let mut asked_for_token = false;
        let mut tries = 0;
        loop {
            let token = self.token.lock().ok().and_then(|token| token.clone());
            let mut request = self.web.request(method.clone(), &url);
            request = request.header(header::ACCEPT, accept.join(", "));
            request = match (&token, &self.auth) {
                (Some(token), _) => request.bearer_auth(token),
                (None, RegistryAuth::Basic(user, password)) if asked_for_token => {
                    request.basic_auth(user, Some(password))
                }
                _ => request,
            };
            let why = match self.runtime.block_on(async { request.send().await }) {
                Ok(answer) if answer.status() == StatusCode::UNAUTHORIZED && !asked_for_token => {
                    asked_for_token = true;
                    let token = self.runtime.block_on(async {
                        self.client.auth(&self.at, &self.auth, self.operation).await
                    });
                    let token = token.map_err(|e| failed(what, name, &e))?;
                    if let Ok(mut kept) = self.token.lock() {
                        *kept = token;
                    }
                    continue;
                }
                Ok(answer) if !is_busy(answer.status()) => return Ok(answer),
                Ok(answer) => answer.status().to_string(),
                Err(e) => storage::chain(&e.without_url()),
            };
            tries += 1;
            if tries == TRIES {
                let name = name.to_owned();
                return Err(RemoteError::Storage { what, name, why });
            }
            thread::sleep(PAUSE * 2u32.pow(tries));
        }
    }

    /// Returns an answer that is good, or the error that it is.
    fn good(
        &self,
        answer: Response,
        what: &'static str,
        name: &str,
    ) -> Result<Response, RemoteError> {
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let text = self.limited(answer, 1 << 12, name).unwrap_or_default();
        let said = shortened(&String::from_utf8_lossy(&text));
        let (name, why) = (name.to_owned(), format!("{status}: {said}"));
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => RemoteError::Denied { name, why },
            _ => RemoteError::Storage { what, name, why },
        })
    }

    /// Reads an answer of at most `most` bytes.
    fn limited(&self, answer: Response, most: usize, name: &str) -> Result<Vec<u8>, RemoteError> {
        self.runtime.block_on(async {
            let (mut text, mut pieces) = (Vec::new(), answer.bytes_stream());
            while let Some(piece) = pieces.next().await {
                let piece = piece.map_err(|e| RemoteError::Read {
                    name: name.to_owned(),
                    source: io::Error::other(storage::chain(&e)),
                })?;
                if text.len() + piece.len() > most {
                    let why = format!("it has more than {most} bytes");
                    return Err(RemoteError::damaged(name, why));
                }
                text.extend_from_slice(&piece);
            }
            Ok(text)
        })
    }

    /// Lets `oci-client` do something, again where the registry refuses for a while. In a task, as it panics where a
    /// registry says what no registry should.
    fn again<T, F>(&self, work: impl Fn() -> F) -> Result<T, OciDistributionError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, OciDistributionError>> + Send + 'static,
    {
        let mut tries = 0;
        loop {
            let ended = self.runtime.block_on(self.runtime.spawn(work()));
            let ended = ended.unwrap_or_else(|e| Err(broken(&e)));
            tries += 1;
            match ended {
                Err(error) if tries < TRIES && is_passing(&error) => {
                    thread::sleep(PAUSE * 2u32.pow(tries));
                }
                ended => return ended,
            }
        }
    }
}
