//! Places: what a URL of a remote means, and the carrier for it.
//!
//! | URL | storage | written |
//! |---|---|---|
//! | `file:///srv/models` | a folder, often a mount | yes |
//! | `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` | a bucket | yes |
//! | `oci://HOST/REPOSITORY[:TAG]` | a registry of containers | yes |
//! | `hf://OWNER/REPO`, `hf://OWNER/REPO@REVISION` | a repository of the Hugging Face Hub | branches |
//! | `https://HOST/PATH` | plain static files, such as a folder or a bucket behind a CDN | no |
//!
//! Credentials and endpoints come from the environment, under the names that the tools of the storage use
//! (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, …,
//! `HF_TOKEN`), or from the machine's role; those of a registry from where `docker login` keeps them. Plain
//! HTTP is for this machine alone: nobody else's bytes come unencrypted. Static files are read from the named host alone: a
//! redirect to another one is refused.

use std::{fs, sync::Arc, time::Duration};

use object_store::{
    ClientOptions, ObjectStore, RetryConfig,
    aws::AmazonS3Builder,
    azure::MicrosoftAzureBuilder,
    client::{HttpClient, HttpConnector},
    gcp::GoogleCloudStorageBuilder,
    http::HttpBuilder,
    local::LocalFileSystem,
    memory::InMemory,
    path::Path,
};
use reqwest::redirect::{Attempt, Policy};
use url::Url;

use crate::{
    carrier::Carrier, error::RemoteError, host::is_local, hub::Hub, oci::Oci, readonly::ReadOnly,
    storage::Storage,
};

/// What a carrier is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum For {
    /// To read.
    Reading,
    /// To write: a folder that is missing is created.
    Writing,
    /// To see what writing would do: a folder that is missing is empty.
    Looking,
}

/// Opens the carrier for a URL.
pub fn open(text: &str, to: For) -> Result<Box<dyn Carrier>, RemoteError> {
    let wrong = |why: String| RemoteError::Url {
        url: shown(text),
        why,
    };
    let url = Url::parse(text).map_err(|e| wrong(e.to_string()))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong("it has a name or a password in it".to_owned()));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(wrong("it has more than a path".to_owned()));
    }
    let failed = |e: object_store::Error| wrong(e.to_string());
    let retry = retry();
    let inside = || Path::from_url_path(url.path()).map_err(|e| wrong(e.to_string()));
    let (store, at, lists): (Arc<dyn ObjectStore>, Path, bool) = match url.scheme() {
        "file" => {
            let folder = url
                .to_file_path()
                .map_err(|()| wrong("it is no absolute path".to_owned()))?;
            if to == For::Looking && !folder.exists() {
                let nothing = Storage::new(Arc::new(InMemory::new()), Path::default(), true)?;
                return Ok(Box::new(nothing));
            }
            if to == For::Writing {
                fs::create_dir_all(&folder)
                    .map_err(|e| wrong(format!("can't make `{}`: {e}", folder.display())))?;
            }
            let store = LocalFileSystem::new_with_prefix(&folder)
                .map_err(|e| wrong(format!("can't open `{}`: {e}", folder.display())))?;
            (Arc::new(store.with_fsync(true)), Path::default(), true)
        }
        "s3" => {
            let builder = AmazonS3Builder::from_env().with_url(url.as_str());
            // For a server of this machine, as in tests.
            let local = std::env::var("AWS_ENDPOINT_URL").is_ok_and(|url| is_local(&url));
            let builder = builder.with_client_options(client(local)).with_retry(retry);
            (Arc::new(builder.build().map_err(failed)?), inside()?, true)
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_url(url.as_str());
            let builder = builder
                .with_client_options(client(false))
                .with_retry(retry)
                .build();
            (Arc::new(builder.map_err(failed)?), inside()?, true)
        }
        "az" => {
            let builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str());
            let builder = builder
                .with_client_options(client(false))
                .with_retry(retry)
                .build();
            (Arc::new(builder.map_err(failed)?), inside()?, true)
        }
        "oci" => {
            let host = text.replacen("oci://", "http://", 1);
            let carrier = Oci::open(text, is_local(&host), to == For::Reading)?;
            return Ok(match to {
                For::Writing => Box::new(carrier),
                For::Reading | For::Looking => Box::new(read_only(carrier, text)),
            });
        }
        "https" | "http" => {
            if url.scheme() == "http" && !is_local(text) {
                return Err(wrong(
                    "only `https://` is read from another host".to_owned(),
                ));
            }
            let builder = HttpBuilder::new()
                .with_url(text.trim_end_matches('/'))
                .with_http_connector(SameHost {
                    allow_http: url.scheme() == "http",
                })
                .with_retry(retry);
            let store = builder.build().map_err(failed)?;
            let carrier = Storage::new(Arc::new(store), Path::default(), false)?;
            return Ok(Box::new(ReadOnly {
                inner: carrier,
                url: text.to_owned(),
                why: "files over HTTP are only read",
            }));
        }
        "hf" => {
            let variables = |name: &str| std::env::var(name).ok();
            let hub = Hub::open(text, &variables, to != For::Reading)?;
            return Ok(match to {
                For::Writing => Box::new(hub),
                _ => Box::new(read_only(hub, text)),
            });
        }
        other => return Err(wrong(format!("there is no storage `{other}`"))),
    };
    let carrier = Storage::new(store, at, lists)?;
    if to == For::Writing {
        return Ok(Box::new(carrier));
    }
    Ok(Box::new(read_only(carrier, text)))
}

fn read_only<C>(inner: C, url: &str) -> ReadOnly<C> {
    ReadOnly {
        inner,
        url: url.to_owned(),
        why: "it was opened to be read",
    }
}

/// Returns a URL without what could be a secret.
fn shown(text: &str) -> String {
    let Ok(url) = Url::parse(text) else {
        return text.to_owned();
    };
    if url.username().is_empty() && url.password().is_none() && url.query().is_none() {
        return text.to_owned();
    }
    let host = url.host_str().unwrap_or_default();
    format!("{}://{host}{}", url.scheme(), url.path())
}

/// A large file may take long; a connection that says nothing may not.
const SILENCE: Duration = Duration::from_secs(120);
/// How long a host has to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

fn client(allow_http: bool) -> ClientOptions {
    ClientOptions::new()
        .with_allow_http(allow_http)
        .with_timeout_disabled()
        .with_connect_timeout(CONNECT)
        .with_read_timeout(SILENCE)
}

/// Makes clients that follow no redirect to another host. The options of `object_store` have no choice for that.
#[derive(Debug)]
struct SameHost {
    allow_http: bool,
}

impl HttpConnector for SameHost {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let builder = reqwest::Client::builder()
            .user_agent(concat!("precast-remote/", env!("CARGO_PKG_VERSION")))
            .http1_only()
            .https_only(!self.allow_http)
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .redirect(Policy::custom(stay));
        let client = builder.build().map_err(|e| object_store::Error::Generic {
            store: "HTTP",
            source: Box::new(e),
        })?;
        Ok(HttpClient::new(client))
    }
}

/// Follows a redirect within a host and port, a few times.
fn stay(attempt: Attempt<'_>) -> reqwest::redirect::Action {
    let of = |url: &Url| {
        (
            url.host_str().map(str::to_owned),
            url.port_or_known_default(),
        )
    };
    match attempt.previous().first() {
        Some(first) if of(first) != of(attempt.url()) => {
            let to = attempt.url().host_str().unwrap_or_default().to_owned();
            attempt.error(format!(
                "it redirects to another host, `{to}`: name that place itself if you trust it"
            ))
        }
        _ => Policy::default().redirect(attempt),
    }
}

/// How often a failing storage is tried again. The time counts from the start of a request, which may be that of a file
/// that takes an hour.
fn retry() -> RetryConfig {
    RetryConfig {
        max_retries: 8,
        retry_timeout: Duration::from_secs(6 * 3600),
        ..RetryConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_place_is_refused_by_name() {
        for (url, why) in [
            ("models", "relative URL without a base"),
            ("ftp://host/models", "there is no storage `ftp`"),
            ("http://example.org/models", "only `https://`"),
            (
                "https://me:secret@example.org/models",
                "a name or a password",
            ),
            ("https://example.org/models?token=1", "more than a path"),
            ("file:///no/such/folder", "can't open `/no/such/folder`"),
            ("oci://registry.example.org", "it names no repository"),
            ("oci://models/minilm", "`models` is no host of a registry"),
            ("oci://registry.example.org/m@sha256:00", "name a tag"),
            ("oci://registry.example.org/M:x y", "invalid"),
        ] {
            let error = open(url, For::Reading).err().unwrap();
            let text = error.to_string();
            assert!(text.contains(why) && text.contains(&shown(url)), "{text}");
            assert!(
                !text.contains("secret") && !text.contains("token=1"),
                "{text}"
            );
            assert!(error.hint().contains("s3://"));
        }
    }
}
