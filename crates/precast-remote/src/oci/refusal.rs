//! What a registry refuses, as errors of a remote.

use oci_client::errors::{OciDistributionError, OciErrorCode};
use reqwest::StatusCode;

use crate::{error::RemoteError, storage};

pub fn is_busy(status: StatusCode) -> bool {
    status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS
}

pub fn is_passing(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::RequestError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code >= 500 || *code == 429,
        _ => false,
    }
}

pub fn broken(error: &tokio::task::JoinError) -> OciDistributionError {
    OciDistributionError::GenericError(Some(error.to_string()))
}

pub fn is_missing(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::ServerError { code, .. } => *code == 404,
        OciDistributionError::RegistryError { envelope, .. } => envelope.errors.iter().any(|one| {
            matches!(
                one.code,
                OciErrorCode::BlobUnknown | OciErrorCode::NameUnknown
            )
        }),
        _ => false,
    }
}

/// Returns the error for what `oci-client` says, without URLs: there may be signatures in them.
pub fn failed(what: &'static str, name: &str, error: &OciDistributionError) -> RemoteError {
    let name = name.to_owned();
    let (denied, why) = match error {
        OciDistributionError::UnauthorizedError { .. } => (true, "it wants a login".to_owned()),
        OciDistributionError::AuthenticationFailure(why) => (true, format!("no login: {why}")),
        OciDistributionError::ServerError { code, message, .. } => {
            (matches!(code, 401 | 403), format!("{code}: {message}"))
        }
        OciDistributionError::RegistryError { envelope, .. } => {
            let denied =
                |code: &_| matches!(code, OciErrorCode::Unauthorized | OciErrorCode::Denied);
            let denied = envelope.errors.iter().any(|one| denied(&one.code));
            (denied, envelope.to_string())
        }
        OciDistributionError::RequestError(error) => {
            let source = std::error::Error::source(error);
            (false, source.map_or("no answer".to_owned(), storage::chain))
        }
        other => (false, storage::chain(other)),
    };
    let why = shortened(&why);
    match denied {
        true => RemoteError::Denied { name, why },
        false => RemoteError::Storage { what, name, why },
    }
}

/// Returns the start of what a registry says, in one line.
pub fn shortened(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().take(300).collect()
}
